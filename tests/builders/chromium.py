"""A headless Chromium for the tests of the pages, and the pictures of README and docs/mismatch.md.

python -m builders.chromium docs/pictures   # in tests/: run the commands on planted dumps and take the pictures

It writes a digest of each page with them. Where the digest of today's page differs, a test says to run it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from builders import planted_dumps
from builders.dumps import plain, records, write_jsonl
from rollout_corr.cli.main import main
from rollout_corr.diagnose.show.style import STYLE

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Nothing of a user's profile, no network, no window.
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-sync"),
)
DARK = "--blink-settings=preferredColorScheme=0"

# Name of the picture: dump, width and height, further options.
PICTURES = {
    "broken_run": ("dump.jsonl", (1280, 784), ()),
    "report": ("rollouts.jsonl", (1280, 908), ()),
    "report_phone": ("rollouts.jsonl", (390, 1010), (DARK,)),
}
DIGESTS = "made_of.json"
# When the dumps say that they were written.
WRITTEN = 1_750_000_000
NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?")
TEXT = (
    "So the answer is 7 because each side adds two more and then we check it again by hand : x = 3 , y = 4 . Let us "
    "now call tool with query result returned therefore sum equals 12 not 14 wait no yes that fits what was asked first"
)
WORDS = TEXT.split()


def browser() -> str:
    """Return the path of a browser. Without one the test fails: whoever runs it asked for a browser."""
    found = os.environ.get("BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, f"no browser: install one of {', '.join(BROWSERS)}, or set BROWSER to the path of one"
    return found


def run(profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the browser once."""
    command = [browser(), *OPTIONS, f"--user-data-dir={profile}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def write_dump(path: Path, columns: dict) -> None:
    """Write columns as records with texts, which the ids stand for."""
    rows = [plain(record) for record in records(columns)]
    write_jsonl(path, (row | {"texts": [WORDS[i % len(WORDS)] for i in row.pop("token_ids")]} for row in rows))


def write_pages() -> dict[str, Path]:
    """Write the pages of PICTURES into this folder; give them by the names of their dumps."""
    made = {
        "dump.jsonl": planted_dumps.temperature(0, 0.7, 0.7, 1.0),
        "rollouts.jsonl": planted_dumps.retokenized(1, 2),
    }
    for name, columns in made.items():
        write_dump(Path(name), columns)
        os.utime(name, (WRITTEN, WRITTEN))
        assert main(["report", name]) == 0
    return {name: Path(f"{name}.report.html").resolve() for name in made}


def digest(page: Path) -> str:
    """Give the digest of a page without its numbers, whose last digits differ by CPU: words, parts and style remain."""

    def kinds(svg: re.Match[str]) -> str:
        return " ".join(sorted(set(re.findall(r'<\w+|class="[^"]*"', svg[0]))))

    text = page.read_text(encoding="utf-8").replace(STYLE, "")
    text = re.sub(r"<svg.*?</svg>", kinds, text, flags=re.DOTALL)
    text = NUMBER.sub("", re.sub(r"torch \S+", "torch", text))
    return hashlib.sha256((STYLE + text).encode()).hexdigest()[:16]


def take_pictures(folder: Path) -> None:
    """Write the pages, the pictures of their first screens, and the digests of the pages."""
    from PIL import Image

    folder, before = folder.resolve(), Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        pages = write_pages()
        for name, (dump, (width, height), options) in PICTURES.items():
            # A window has at least 500 pixels, a frame as many as it is asked for.
            frame, shot = Path("frame.html").resolve(), Path("shot.png").resolve()
            source = f'<iframe src="{pages[dump].name}" width="{width}" height="{height}" style="border: 0"></iframe>'
            frame.write_text(f'<!DOCTYPE html><body style="margin: 0">{source}', encoding="utf-8")
            window = f"--window-size={max(width, 500)},{height}"
            run(Path("profile").resolve(), *options, window, f"--screenshot={shot}", frame.as_uri())
            # 64 colors show a page well, in a third of the bytes.
            picture = Image.open(shot).convert("RGB").crop((0, 0, width, height))
            picture.quantize(64, dither=Image.Dither.NONE).save(folder / f"{name}.png", optimize=True)
        digests = {name: digest(page) for name, page in pages.items()}
        (folder / DIGESTS).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
        os.chdir(before)


if __name__ == "__main__":
    take_pictures(Path(sys.argv[1]))

"""A headless Chromium for the tests of the pages, and the pictures of docs/mismatch.md.

python -m builders.chromium docs/pictures   # in tests/: run the commands on two planted dumps and take the pictures
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from builders import planted_dumps
from rollout_corr.cli.main import main

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Nothing of a user's profile, no network, no window.
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-sync"),
)
DARK = "--blink-settings=preferredColorScheme=0"

# Name of the picture: page, width and height, further options.
PICTURES = {
    "report": ("report", (1280, 1010), ()),
    "report_phone": ("report", (390, 1010), (DARK,)),
    "what_if": ("what-if", (1280, 1250), ()),
}
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
    names = [name for name in ("train_logp", "rollout_logp", "mask") if name in columns]
    with path.open("w", encoding="utf-8") as file:
        for start, stop in pairwise(columns["cu_seqlens"].tolist()):
            record = {name: columns[name][start:stop].tolist() for name in names}
            record["texts"] = [WORDS[i % len(WORDS)] for i in columns["token_ids"][start:stop].tolist()]
            file.write(json.dumps(record) + "\n")


def take_pictures(folder: Path) -> None:
    """Write a page of each kind and the pictures of their first screens."""
    from PIL import Image

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        dumps = {"report": "rollouts.jsonl", "what-if": "step_120.jsonl"}
        write_dump(Path(dumps["report"]), planted_dumps.retokenized(1, 2))
        write_dump(Path(dumps["what-if"]), planted_dumps.updated(1, 0.25, sequences=150))
        for kind, dump in dumps.items():
            assert main([kind, dump]) == 0
        for name, (kind, size, options) in PICTURES.items():
            page, shot = Path(f"{dumps[kind]}.{kind}.html").resolve(), Path("shot.png").resolve()
            window = f"--window-size={size[0]},{size[1]}"
            run(Path("profile").resolve(), *options, window, f"--screenshot={shot}", page.as_uri())
            # 64 colors show a page well, in a third of the bytes.
            picture = Image.open(shot).convert("RGB").quantize(64, dither=Image.Dither.NONE)
            picture.save(before / folder / f"{name}.png", optimize=True)
        os.chdir(before)


if __name__ == "__main__":
    take_pictures(Path(sys.argv[1]))

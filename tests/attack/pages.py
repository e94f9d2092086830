"""Texts that act, in every place of a dump and of the command line: what terminals and pages make of them.

Each attempt writes a small dump whose token texts, field names, file name and broken values are hostile, and runs one
command on it. Judged is what came out: the page by Python's own parser against a list of tags and attributes, stdout
and stderr by the kinds of their characters, the exit code, and the files that are there afterwards.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import tempfile
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import torch

from attack.campaign import Area, Outcome
from attack.files import run
from builders.hostile import TEXTS

TAGS = frozenset(
    (
        *("a", "b", "body", "circle", "code", "details", "div", "figcaption", "figure", "g", "h1", "h2", "head"),
        *("html", "li", "line", "meta", "p", "polyline", "pre", "rect", "section", "span", "style", "summary", "svg"),
        *("table", "tbody", "td", "text", "th", "thead", "title", "tr", "ul"),
    )
)
ATTRIBUTES = frozenset(
    (
        *("aria-label", "charset", "class", "content", "cx", "cy", "data-head", "data-says", "fill-opacity", "height"),
        *("href", "id", "lang", "name", "open", "points", "r", "role", "rx", "tabindex", "text-anchor", "title"),
        *("transform", "viewbox", "width", "x", "x1", "x2", "y", "y1", "y2"),
    )
)
# Attributes in which a text may stand; and the only addresses: places of the same page.
SAYS = frozenset(("aria-label", "data-head", "data-says", "title"))
PLACES = {"href": re.compile("#[a-z0-9-]+"), "id": re.compile("[a-z0-9-]+")}
COLORS = re.compile(r"\x1b\[(?:0|1|3[136]|1;3[1236]|1;3[1236];\d+)m")
# A mark that hostile texts carry, to be looked for where no text belongs.
MARK = "ALERT"
PIECES = (
    *TEXTS,
    *(f"<b class={MARK}>", f"<svg role={MARK}>", f'" class="{MARK}', f"<td title='{MARK}'>", f"<{MARK}>", f"<!{MARK}"),
    *(f"<?{MARK}?>", f"\n{MARK}", f"\r{MARK}\n", f"\u2028{MARK}", f"\x85{MARK}", f"\x1b[1m{MARK}", f"[{MARK}]"),
    f"\x1b]52;c;{MARK}\x07",
)
SUFFIXES = (".jsonl", ".jsonl", ".pt")


class Page(HTMLParser):
    """Keeps the elements and texts of a page, and notes everything in it that this package never writes."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.elements: list[tuple[str, dict[str, str], tuple[str, ...]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        if self.open:
            self.wrong.append(f"never closed: {self.open}")

    def handle_starttag(self, tag, attributes):
        if tag not in TAGS:
            self.wrong.append(f"<{tag}>")
        for name, value in attributes:
            known = name in ATTRIBUTES and value is not None
            if known and name in PLACES:
                known = bool(PLACES[name].fullmatch(value))
            elif known and name not in SAYS:
                known = MARK.lower() not in value.lower()
            if not known:
                self.wrong.append(f"<{tag} {name}={value!r}>")
        if len(dict(attributes)) != len(attributes):
            self.wrong.append(f"<{tag}> has an attribute twice")
        self.elements.append((tag, dict(attributes), tuple(self.open)))
        if tag != "meta":
            self.open.append(tag)

    def handle_data(self, data):
        self.texts.append((data, self.open[-1] if self.open else ""))

    def said(self, *tags):
        return [text for text, tag in self.texts if tag in tags]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> out of place")

    def handle_comment(self, data):
        self.wrong.append(f"<!--{data[:40]}")

    def handle_decl(self, declaration):
        if declaration != "DOCTYPE html":
            self.wrong.append(f"<!{declaration[:40]}")

    def handle_pi(self, data):
        self.wrong.append(f"<?{data[:40]}")

    def unknown_decl(self, data):
        self.wrong.append(f"<![{data[:40]}")


def hostile(rng: random.Random) -> str:
    """Make a text of hostile pieces and of any characters at all."""
    made = [rng.choice(PIECES) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    if rng.random() < 0.3:
        made.append("".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(1, 20))))
    rng.shuffle(made)
    return "".join(made)


def file_name(rng: random.Random, suffix: str) -> str:
    """Make a hostile name that a file system takes."""
    raw = hostile(rng).replace("\0", "").replace("/", "_").encode("utf-8", "surrogatepass")
    return (os.fsdecode(raw[:120]).strip(".") or "x") + suffix


def fields_of(rng: random.Random) -> list[dict[str, object]]:
    """Make the records of a dump; some are broken, with hostile texts in place of values."""
    extra = hostile(rng)
    broken = rng.random() < 0.4
    made = []
    for _ in range(rng.randrange(1, 6)):
        n = rng.randrange(1, 12)
        rollout = [-rng.expovariate(1.0) for _ in range(n)]
        train = [x - rng.choice((0.0, 0.01, 3.0)) * rng.random() for x in rollout]
        record: dict[str, object] = {"train_logp": train, "rollout_logp": rollout, extra: [rng.random()] * n}
        record["texts"] = [hostile(rng) for _ in range(n)]
        if broken and rng.random() < 0.5:
            key = rng.choice(list(record))
            record[key] = rng.choice(
                (hostile(rng), [hostile(rng)], {hostile(rng): hostile(rng)}, None, [1.0], math.nan)
            )
        made.append(record)
    return made


def write(path: Path, records: list[dict[str, object]]) -> None:
    """Write records as the name of the file says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    else:
        torch.save(records, path)


def command(rng: random.Random, dump: Path, extra: str, other: Path) -> tuple[list[str], Path | None]:
    """Make the arguments of a command, and where its page goes."""
    kind = rng.choice(("report",) * 5 + ("doctor",) * 3 + ("what-if",))
    made, page = [kind, str(dump)], None
    if kind == "doctor":
        if rng.random() < 0.4:
            made += ["--fail-if", rng.choice((hostile(rng), f"{hostile(rng)} > 1", "tokens > 0", "tokens < 0"))]
    elif kind == "report" and rng.random() < 0.8:
        page = dump if rng.random() < 0.1 else dump.parent / file_name(rng, ".html")
        made += ["--page", str(page)]
    elif kind == "report":
        made += ["--no-page"]
    if kind == "report" and rng.random() < 0.5:
        made += ["--by", rng.choice((extra, hostile(rng)))]
    if kind == "report" and rng.random() < 0.2:
        made += ["--compare", str(other)]
    if rng.random() < 0.15:
        made += ["--field", rng.choice((f"train_logp={hostile(rng)}", f"{hostile(rng)}=x", hostile(rng)))]
    if rng.random() < 0.05:
        made += ["--limit", rng.choice(("1", "0", "-1", "9" * 30, hostile(rng)))]
    if rng.random() < 0.3:
        made.append("--json")
    if rng.random() < 0.05:
        made.append(hostile(rng))
    return made, page


def acting(text: str) -> list[str]:
    """List the characters of an output that act on a terminal."""
    return [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


def judged(code: int, out: str, err: str, arguments: list[str], width: int) -> str:
    """Return what is wrong with the output of a command, or nothing."""
    if code not in (0, 1, 2):
        return f"exit code {code}: {err[-300:]!r}"
    if "Traceback" in err or "mistake in rollout-corr" in err:
        return f"a mistake: {err[-400:]!r}"
    if found := acting(COLORS.sub("", out)) + acting(COLORS.sub("", err)):
        return f"{found[:5]!r} on the terminal"
    if code != 2 and err:
        return f"exit code {code} with {err[:200]!r} on stderr"
    if code == 2 and not err.startswith("usage: ") and err.count("\n") != 1:
        return f"expected one line, got {err[:400]!r}"
    if code != 2 and "--json" in arguments:
        json.loads(out)
    elif width > 10_000 and (forged := [line for line in out.split("\n") if line.startswith(MARK)]):
        return f"a line that a text made: {forged[0][:100]!r}"
    return ""


def attempt(seed: int) -> Outcome:
    """Run one command on one hostile dump."""
    rng = random.Random(seed)
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return _attempt(rng, Path(folder))
        finally:
            os.chdir(before)


def _attempt(rng: random.Random, folder: Path) -> Outcome:
    records = fields_of(rng)
    dump, other = (folder / file_name(rng, rng.choice(SUFFIXES)) for _ in range(2))
    for path, made in ((dump, records), (other, fields_of(rng))):
        # Not every writer takes a hostile name.
        plain = folder / f"plain{path.suffix}"
        write(plain, made)
        plain.rename(path)
    arguments, page = command(rng, dump, list(records[0])[2], other)
    if rng.random() < 0.1:
        arguments[1] = str(folder)
    old = dump.read_bytes() if page == dump else None
    if page is not None and page != dump and rng.random() < 0.5:
        old = b"old"
        page.write_bytes(old)
    width = rng.choice((20, 80, 200, 100_000))
    environment = {"COLUMNS": str(width), rng.choice(("FORCE_COLOR", "NO_COLOR")): "1"}
    full = rng.random() < 0.05
    failing = mock.patch("os.fsync", side_effect=OSError(28, "No space left on device"))
    there = {path: path.read_bytes() for path in folder.iterdir()}
    with mock.patch.dict(os.environ, environment), failing if full else contextlib.nullcontext():
        code, out, err = run(arguments)
    says = f"{arguments!r}: "
    if wrong := judged(code, out, err, arguments, width):
        return Outcome("wrong", (says + wrong)[:3000])
    for path, content in there.items():
        if path != page and path.read_bytes() != content:
            return Outcome("wrong", f"{says}{path} was changed")
    more = {path for path in folder.iterdir() if path not in there and path != page}
    if more:
        return Outcome("wrong", f"{says}left behind: {sorted(map(str, more))}")
    if page is not None:
        if code == 2:
            if (page.read_bytes() if page.exists() else None) != old:
                return Outcome("wrong", f"{says}refused, and the page was written")
        elif page == dump or full:
            return Outcome("wrong", f"{says}exit code {code} for a page that cannot be written")
        else:
            source = page.read_bytes().decode()
            if not (source.startswith("<!DOCTYPE html>") and source.endswith("</html>\n")):
                return Outcome("wrong", f"{says}half a page")
            if wrong := Page(source).wrong or acting(source):
                return Outcome("wrong", f"{says}in the page: {wrong[:5]!r}"[:3000])
    return Outcome("refused", err.strip()) if code == 2 else Outcome("right")


AREA = Area("pages", "pages", attempt, count=3000, few=8)

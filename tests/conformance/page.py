"""docs/conformance.md: the table of what was compared, and the list of what is compared and what is only restated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from conformance.rows import DOCS, Tally
from conformance.sources import Source
from rollout_corr.frameworks.shared import lookup

PAGE = DOCS / "conformance.md"
BEGIN, END = "<!-- begin: made by `make conformance ARGS=--write` -->", "<!-- end -->"
BEGIN_LIST, END_LIST = "<!-- begin: made by `make conformance ARGS=--list` -->", "<!-- end of the list -->"


class Line(NamedTuple):
    """A line of the table, as it stands there."""

    framework: str
    version: str
    ours: str
    theirs: str
    cases: str
    agreed: str
    declared: str
    undeclared: str

    @property
    def kind(self) -> str:
        """Where the framework's code came from: "installed" or "checkout"."""
        return self.version.rpartition("(")[2].rstrip(")")

    @property
    def name(self) -> str:
        """The name of this package's side, without its kind and what is said of it behind a comma."""
        return self.ours.partition("`")[2].rstrip("`").partition(",")[0]


HEADER = Line(
    "framework", "version", "this package", "the framework's function", "cases", "agree", "declared", "undeclared"
)


def line_of(source: Source, tally: Tally) -> Line:
    """Write what came of one row."""
    declared = "; ".join(f"{n} {name}" for name, n in sorted(tally.declared.items())) or "-"
    version, theirs = f"{source.version} ({source.kind})", f"`{tally.theirs}`".replace("|", "/")
    counts = (str(tally.cases), str(tally.agreed), declared, str(len(tally.undeclared) or "-"))
    return Line(source.framework, version, tally.row, theirs, *counts)


def lines(text: str) -> list[Line]:
    """Read the table of the page."""
    made = text.partition(BEGIN)[2].partition(END)[0]
    cells = [line.strip("| ").split(" | ") for line in made.splitlines() if line.startswith("| ")]
    return [Line(*row) for row in cells if tuple(row) != HEADER]


def merged(old: Iterable[Line], new: Sequence[Line], only: str = "") -> list[Line]:
    """Put new lines in place of the old ones of the same frameworks and kinds of sources.

    Args:
        old: The lines of the page.
        new: The lines of a run.
        only: The run's choice of rows: old lines whose name does not contain it stay.
    """
    run = {(line.framework, line.kind) for line in new}
    stay = [line for line in old if (line.framework, line.kind) not in run or only not in line.name]
    return sorted([*stay, *new], key=lambda line: (line.framework, line.kind))


def write(new: Sequence[Line], only: str = "") -> None:
    """Merge the lines of a run into the page, and make its list again."""
    text = PAGE.read_text(encoding="utf-8")
    made = merged(lines(text), new, only)
    cases = sum(int(line.cases) for line in made)
    head = f"{len(made)} rows, {cases:,} cases, seeds from 0; torch {torch.__version__.partition('+')[0]}."
    rows = [f"| {' | '.join(line)} |" for line in (HEADER, *made)]
    rows.insert(1, "|" + "---|" * len(HEADER))
    text = _between(text, BEGIN, END, "\n".join([head, "", *rows]))
    PAGE.write_text(_between(text, BEGIN_LIST, END_LIST, standing(made)), encoding="utf-8")


def standing(made: Sequence[Line]) -> str:
    """List by framework what the table's rows compare, and what only a test with a restated formula checks."""
    rows = ["| framework | beside its own code | a restated formula alone |", "|---|---|---|"]
    by_kind = {
        "preset": lookup.spec_names(),
        "recipe": lookup.recipe_names(),
        "configuration": sorted({*lookup.readable("read"), *lookup.readable("recipe")}),
    }
    compared = {(re.split(r"\W", line.ours)[0], line.name) for line in made}
    for framework in lookup.frameworks():
        sides: dict[bool, list[str]] = {True: [], False: []}
        for kind, names in by_kind.items():
            own = [name for name in names if name.partition(".")[0] == framework]
            for side, said in sides.items():
                held = [name for name in own if ((kind, name) in compared) == side]
                if held:
                    said.append(_said(kind, held, len(held) == len(own)))
        for kind in ("drop-in", "report"):
            held = sorted({line.name for line in made if line.framework == framework and line.ours.startswith(kind)})
            if held:
                sides[True].append(f"{len(held)} {kind}{'s' * (len(held) > 1)}")
        rows.append(f"| {framework} | {'; '.join(sides[True]) or '-'} | {'; '.join(sides[False]) or '-'} |")
    return "\n".join(rows)


def _said(kind: str, names: Sequence[str], every: bool) -> str:
    if kind == "configuration":
        return "its configuration"
    if every:
        return f"its {kind}" if len(names) == 1 else f"all {len(names)} {kind}s"
    return f"{kind}{'s' * (len(names) > 1)} {', '.join(f'`{name}`' for name in names)}"


def _between(text: str, begin: str, end: str, made: str) -> str:
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{made}\n\n{end}{rest.partition(end)[2]}"

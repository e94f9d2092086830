"""README.md here: what a run compared, by version, and what is recorded and what is only restated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from conformance import recording
from conformance.rows import Tally
from conformance.sources import Source
from rollout_corr.frameworks.shared import lookup

PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- begin: made by `make conformance ARGS=--write` -->", "<!-- end -->"
BEGIN_LIST, END_LIST = "<!-- begin: made by `make conformance ARGS=--list` -->", "<!-- end of the list -->"
HEADER = ("framework", "version", "rows", "cases", "agree", "differ as declared", "undeclared")


def write(found: Iterable[tuple[Source, Tally]] = ()) -> None:
    """Put the versions of a run into the table, in place of their older lines, and make the list again."""
    text = PAGE.read_text(encoding="utf-8")
    lines = {tuple(line[:2]): line for line in _lines(text)}
    by_version: dict[tuple[str, ...], list[Tally]] = {}
    for source, tally in found:
        by_version.setdefault((source.framework, f"{source.version} ({source.kind})"), []).append(tally)
    for key, tallies in by_version.items():
        declared = sum((tally.declared for tally in tallies), Counter[str]())
        names = "; ".join(f"{count} {name}" for name, count in sorted(declared.items()))
        counts = (len(tallies), *(sum(getattr(t, name) for t in tallies) for name in ("cases", "agreed")))
        undeclared = sum(len(tally.undeclared) for tally in tallies)
        lines[key] = [*key, *map(str, counts), names or "-", str(undeclared or "-")]
    made = sorted(lines.values())
    cases = sum(int(line[3]) for line in made)
    head = f"{sum(int(line[2]) for line in made)} rows, {cases:,} cases; torch {torch.__version__.partition('+')[0]}."
    rows = [f"| {' | '.join(line)} |" for line in (HEADER, *made)]
    rows.insert(1, "|" + "---|" * len(HEADER))
    text = _between(text, BEGIN, END, "\n".join([head, "", *rows]))
    PAGE.write_text(_between(text, BEGIN_LIST, END_LIST, standing()), encoding="utf-8")


def standing() -> str:
    """List by framework what is recorded, and what only a restated formula or Spec checks."""
    rows = ["| framework | recorded from | next to its own functions | restated alone |", "|---|---|---|---|"]
    own = {"preset": lookup.spec_names(), "recipe": lookup.recipe_names()}
    for framework in sorted({*lookup.frameworks(), *recording.frameworks()}):
        said = recording.described(framework)["sources"] if framework in recording.frameworks() else []
        recorded = [row["row"] for source in said for row in source["rows"]]
        names = {(row.partition(" ")[0], row.split("`")[1].partition(",")[0]) for row in recorded}
        if framework == "miles":
            names = {(kind, name) for kind, name in names if kind not in own}
        sides: list[list[str]] = [[], []]
        for kind, every in own.items():
            of_framework = [name for name in every if name.partition(".")[0] == framework]
            for side, here in enumerate((True, False)):
                listed = [name for name in of_framework if ((kind, name) in names) == here]
                if listed:
                    sides[side].append(_said(kind, listed, len(listed) == len(of_framework)))
        if any(kind == "configuration" for kind, _ in names):
            sides[0].append("its configuration")
        for kind in ("drop-in", "report"):
            if count := len({name for found, name in names if found == kind}):
                sides[0].append(f"{count} {kind}{'s' * (count > 1)}")
        versions = ", ".join(source["version"] for source in said)
        rows.append(f"| {framework} | {versions or '-'} | {' | '.join('; '.join(side) or '-' for side in sides)} |")
    return "\n".join(rows)


def _said(kind: str, names: Sequence[str], every: bool) -> str:
    if every:
        return f"its {kind}" if len(names) == 1 else f"all {len(names)} {kind}s"
    return f"{kind}{'s' * (len(names) > 1)} {', '.join(f'`{name}`' for name in names)}"


def _lines(text: str) -> list[list[str]]:
    made = text.partition(BEGIN)[2].partition(END)[0]
    cells = [line.strip("| ").split(" | ") for line in made.splitlines() if line.startswith("| ")]
    return [row for row in cells if tuple(row) != HEADER]


def _between(text: str, begin: str, end: str, made: str) -> str:
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{made}\n\n{end}{rest.partition(end)[2]}"

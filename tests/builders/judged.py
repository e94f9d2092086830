"""The judgement, measured: healthy engines of all kinds, and bugs of every size, in a small training loop.

`PYTHONPATH=tests:. python -m builders.judged` writes the tables of docs/doctor.md, in some ten minutes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import rollout_corr as rc
from builders.planted_loop import BUGS, Bug
from builders.small_loop import Columns, Loop
from rollout_corr.diagnose.show.content import tiles

PAGE = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
BEGIN = "<!-- made by `python -m builders.judged` -->"
END = "<!-- end of what it makes -->"

# Kinds of healthy engines: what is sampled, and how it is said.
HEALTHY = {
    f"{words}{kind}": (flavor, {"kind": kind})
    for flavor, words in (("plain", ""), ("peaky", "sure policy, "), ("routed", "mixture of experts, "))
    for kind in ("exact", "bf16", "fp8", "int8", "int4")
} | {
    "bf16 at temperature 0.7 on both sides": ("plain", {"kind": "bf16", "temperature": 0.7}),
    "bf16, one step old": ("plain", {"kind": "bf16", "age": 1}),
    "fp8 at temperature 1.3 on both sides": ("plain", {"kind": "fp8", "temperature": 1.3}),
}
BATCHES = 12
# Policies that bugs are planted in, as the table calls them.
POLICIES = {"plain": "unsure", "peaky": "sure"}

# What was said of a batch, the best first.
OUTCOMES = ("named", "warned", "silent")


class Verdict(NamedTuple):
    """The verdicts on a batch.

    Attributes:
        causes: The causes that `doctor` names, the gravest first, with their severities.
        warnings: The sentences of `warnings()`.
        tiles: The states of the report's tiles by metric.
    """

    causes: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    tiles: dict[str, str]

    @property
    def alarms(self) -> dict[str, str]:
        """The judges that do not call the batch healthy, with their reasons."""
        grave = ", ".join(name for name, severity in self.causes if severity != "note")
        seen = ", ".join(key for key, state in self.tiles.items() if state in ("watch", "alarm"))
        said = {"doctor": grave, "`warnings()`": "; ".join(self.warnings), "tiles": seen}
        return {name: words for name, words in said.items() if words}

    def outcome(self, bug: Bug) -> str:
        """Say whether the bug is named first, whether anything is said, or nothing."""
        first = next((name for name, severity in self.causes if severity != "note"), None)
        if (first or next((name for name, _ in self.causes), None)) in bug.causes:
            return "named"
        return "warned" if first or self.warnings else "silent"


def judge(columns: Columns) -> Verdict:
    """Ask all three about a batch, as a loop with a truncated token weight would."""
    columns = dict(columns)
    logps = columns.pop("train_logp"), columns.pop("rollout_logp")
    if "versions" in columns:
        versions = columns.pop("versions")
        batch = rc.Batch(**columns, versions=rc.Versions(versions, int(versions.max())))
    else:
        batch = rc.Batch(**columns)
    found = rc.doctor(*logps, batch)
    out = rc.correct(*logps, batch, spec=rc.Spec(rc.Weight.token(upper=2.0)))
    causes = tuple((one.name, one.severity) for one in found.findings)
    return Verdict(causes, tuple(out.warnings()), {tile.key: tile.state for tile in tiles(found)})


@functools.cache
def loop_of(flavor: str) -> Loop:
    return Loop(flavor)


def healthy_batches(batches: int = BATCHES) -> Iterator[tuple[str, Columns]]:
    """Sample batches of every healthy engine."""
    for name, (flavor, arguments) in HEALTHY.items():
        loop = loop_of(flavor)
        loop.generator.manual_seed(1_000_000)
        columns = loop.healthy(**arguments, rows=128 * batches)
        for pieces in zip(*(x.split(128) for x in columns.values()), strict=True):
            yield name, dict(zip(columns, pieces, strict=True))


def planted() -> Iterator[tuple[str, Bug, object, Columns]]:
    """Plant each bug at each size in a batch of each policy."""
    for flavor in POLICIES:
        for i, bug in enumerate(BUGS):
            for size in bug.sizes:
                loop_of(flavor).generator.manual_seed(2_000_000 + i)
                with torch.no_grad():
                    yield flavor, bug, size, bug.make(loop_of(flavor), size)


def healthy_table(judged: Sequence[tuple[str, Verdict]]) -> str:
    """Make a table of false alarms by the kind of engine."""
    who = ("`warnings()`", "doctor", "tiles")
    rows = [("healthy engine", "batches", *who), ("---",) * 5]
    for name in dict.fromkeys(name for name, _ in judged):
        of = [verdict for each, verdict in judged if each == name]
        rows.append((name, str(len(of)), *(str(sum(one in verdict.alarms for verdict in of)) for one in who)))
    wrong = [str(sum(one in verdict.alarms for _, verdict in judged)) for one in who]
    rows.append(("all", str(len(judged)), *wrong))
    return as_table(rows)


def bug_table(judged: Iterable[tuple[str, Bug, object, Verdict]]) -> str:
    """Make a table of the sizes at which each bug is named, only warned of, or passes in silence."""
    of: dict[Bug, dict[tuple[object, str], list[str]]] = {}
    for flavor, bug, size, verdict in judged:
        of.setdefault(bug, {}).setdefault((size, verdict.outcome(bug)), []).append(POLICIES[flavor])
    rows = [("bug", "sizes are", *OUTCOMES), ("---",) * 5]
    for bug, found in of.items():
        cells: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES}
        for (size, outcome), policies in sorted(found.items(), key=lambda one: bug.sizes.index(one[0][0])):
            some = f" ({', '.join(policies)})" if len(policies) < len(POLICIES) else ""
            cells[outcome].append(f"{said(size)}{some}")
        name = f"{bug.name} ({bug.blind})" if bug.blind else bug.name
        rows.append((name, bug.unit, *(", ".join(cells[outcome]) or "-" for outcome in OUTCOMES)))
    return as_table(rows)


def said(size: object) -> str:
    if isinstance(size, tuple):
        return ", ".join(f"`{name}`" if name else "all" for name in size)
    return str(size)


def as_table(rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join("|" + "|".join(row) + "|" if row[0] == "---" else "| " + " | ".join(row) + " |" for row in rows)


def totals(healthy: Sequence[tuple[str, Verdict]], bugs: Sequence[tuple[str, Bug, object, Verdict]]) -> str:
    """Say how many healthy batches are called ill, and how many bugs of full size are named."""
    full = [verdict.outcome(bug) for _, bug, size, verdict in bugs if size == bug.sizes[-1] and not bug.blind]
    wrong = sum(bool(verdict.alarms) for _, verdict in healthy)
    return (
        f"{wrong} of {len(healthy)} healthy batches are called ill by anyone. Of {len(BUGS)} bugs in both policies, "
        f"each of full size (the last of its sizes), `doctor` names {full.count('named')} of {len(full)} first, "
        f"{full.count('warned')} have another cause or a warning, and {full.count('silent')} pass in silence; "
        f"{sum(bool(bug.blind) for bug in BUGS)} cannot be seen in log-probs at all."
    )


def write(healthy: Sequence[tuple[str, Verdict]], bugs: Sequence[tuple[str, Bug, object, Verdict]]) -> None:
    """Write the tables into the page."""
    text = "\n\n".join([BEGIN, totals(healthy, bugs), healthy_table(healthy), bug_table(bugs), END])
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + text + rest.partition(END)[2], encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    healthy = [(name, judge(columns)) for name, columns in healthy_batches()]
    write(healthy, [(flavor, bug, size, judge(columns)) for flavor, bug, size, columns in planted()])


if __name__ == "__main__":
    main()

"""The judgement, measured: healthy engines of all kinds, and bugs of every size, in a small training loop.

`PYTHONPATH=tests:. python -m builders.judged` writes the tables of docs/mismatch.md, in some ten minutes.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import rollout_corr as rc
from builders.planted_loop import BUGS, Bug
from builders.small_loop import Columns, Loop
from rollout_corr.diagnose.show.content import tiles

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mismatch.md"
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
SEEDS = (0, 1)

# What was said of a batch, the best first.
OUTCOMES = ("named", "warned", "silent")


class Verdict(NamedTuple):
    """What is said of a batch.

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
        """What calls the batch other than healthy, by the one who does."""
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
    return Verdict(causes, tuple(out.warnings()), {tile.key: tile.state for tile in tiles(found.metrics())})


@functools.cache
def loop_of(flavor: str, seed: int) -> Loop:
    return Loop(flavor, seed)


def healthy_batches(batches: int = BATCHES) -> Iterator[tuple[str, Columns]]:
    """Sample batches of every healthy engine."""
    for name, (flavor, arguments) in HEALTHY.items():
        loop = loop_of(flavor, SEEDS[0])
        loop.generator.manual_seed(1_000_000)
        columns = loop.healthy(**arguments, rows=128 * batches)
        for pieces in zip(*(x.split(128) for x in columns.values()), strict=True):
            yield name, dict(zip(columns, pieces, strict=True))


def planted(bugs: Sequence[Bug] = BUGS, seeds: Sequence[int] = SEEDS) -> Iterator[tuple[Bug, object, Columns]]:
    """Plant each bug at each size in a batch of each policy."""
    for seed in seeds:
        loop = loop_of("plain", seed)
        for i, bug in enumerate(bugs):
            for size in bug.sizes:
                loop.generator.manual_seed(2_000_000 + 1000 * seed + i)
                with torch.no_grad():
                    yield bug, size, bug.make(loop, size)


def healthy_table(judged: Iterable[tuple[str, Verdict]]) -> str:
    """Make a table of false alarms by the kind of engine."""
    judged = list(judged)
    who = ("`warnings()`", "doctor", "tiles")
    rows = [("healthy engine", "batches", *who), ("---",) * 5]
    for name in dict.fromkeys(name for name, _ in judged):
        of = [verdict for each, verdict in judged if each == name]
        rows.append((name, str(len(of)), *(str(sum(one in verdict.alarms for verdict in of)) for one in who)))
    wrong = [str(sum(one in verdict.alarms for _, verdict in judged)) for one in who]
    rows.append(("all", str(len(judged)), *wrong))
    return as_table(rows)


def bug_table(judged: Iterable[tuple[Bug, object, Verdict]]) -> str:
    """Make a table of the sizes at which each bug is named, only warned of, or passes in silence."""
    judged = list(judged)
    rows = [("bug", "sizes are", *OUTCOMES), ("---",) * 5]
    for bug in dict.fromkeys(bug for bug, _, _ in judged):
        cells: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES}
        for size in bug.sizes:
            of = Counter(verdict.outcome(bug) for each, at, verdict in judged if each is bug and at == size)
            for outcome, count in of.items():
                some = f" ({count} of {of.total()})" if count < of.total() else ""
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


def main() -> None:
    torch.set_num_threads(1)
    healthy = [(name, judge(columns)) for name, columns in healthy_batches()]
    bugs = [(bug, size, judge(columns)) for bug, size, columns in planted()]
    text = "\n\n".join([BEGIN, healthy_table(healthy), bug_table(bugs), END])
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + text + rest.partition(END)[2], encoding="utf-8")
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()

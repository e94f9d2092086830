"""The figures of a campaign: the table of README.md, and what was wrong."""

from __future__ import annotations

import datetime
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

import rollout_corr as rc
from lab.attack.campaign import Figures

HEAD = ("area", "seeds", "tried", "right", "refused", "wrong", "seconds", "when, with")
# More than these are counted and not named.
SEEDS = 20


def table(found: Sequence[Figures]) -> str:
    """Lay out the figures, and the seeds of what was wrong."""
    with_ = [f"{name} {metadata.version(name)}" for name in ("torch", "triton", "numpy")]
    with_ = [f"rollout-corr {rc.__version__}", f"Python {platform.python_version()}", *with_]
    rows, more = [HEAD, ("---",) * len(HEAD)], []
    for one in found:
        name, start = one.area.name, one.seeds.start
        seeds = f"{start} to {start + one.tried - 1}" if one.tried else "-"
        tried, *counts = (f"{x:,}" for x in (one.tried, one.right, one.refused, len(one.wrong), round(one.seconds)))
        about = f"{datetime.date.today()}, {sys.platform}, {', '.join(with_)}"
        rows.append((f"`{name}`", seeds, f"{tried} {one.area.unit}", *counts, about))
        if one.wrong:
            named = sorted(one.wrong)
            others = f" and {len(named) - SEEDS} more" if len(named) > SEEDS else ""
            more.append(f"wrong in {name}: seeds {', '.join(map(str, named[:SEEDS]))}{others}")
        if one.tried < len(one.seeds):
            more.append(f"{name}: the time was up after {one.tried:,} of {len(one.seeds):,}")
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), *more])

"""Run the rows of frameworks."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Iterator
from multiprocessing import get_context
from typing import NamedTuple

import torch

from conformance import peers
from conformance.rows import Row, Tally, compared, keep_results
from conformance.sources import Source, found


class Compared(NamedTuple):
    """Outcome of one row of one source."""

    source: Source
    tally: Tally


def frameworks() -> list[str]:
    """The frameworks that have rows: the files of `peers`."""
    return sorted(module.name for module in pkgutil.iter_modules(peers.__path__))


def sources_of(framework: str) -> list[Source]:
    """The versions of a framework that can be had here."""
    module = importlib.import_module(f"conformance.peers.{framework}")
    return found(framework, module.DISTRIBUTION, module.PACKAGE, module.CHECKOUT, getattr(module, "UNDER", ""))


def rows_of(source: Source) -> list[Row]:
    """The comparisons that a version of a framework allows."""
    return list(importlib.import_module(f"conformance.peers.{source.framework}").rows(source))


def run(names: list[str], cases: int, seed: int, only: str = "") -> Iterator[Compared]:
    """Compare frameworks, each in a process of its own: their stand-ins for modules must not meet."""
    with get_context("spawn").Pool(min(2, len(names)), maxtasksperchild=1) as pool:
        for made in pool.imap(_framework, [(name, cases, seed, only) for name in names]):
            yield from made


def _framework(task: tuple[str, int, int, str]) -> list[Compared]:
    name, cases, seed, only = task
    torch.set_num_threads(1)
    logging.getLogger("rollout_corr").setLevel(logging.ERROR)
    made = []
    keep_results()
    for source in sources_of(name):
        for row in rows_of(source):
            if only in row.ours:
                made.append(Compared(source, compared(row, cases, seed)))
    return made

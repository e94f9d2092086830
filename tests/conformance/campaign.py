"""Run the rows of frameworks: on random batches, to record their results, or next to what was recorded."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from random import Random
from typing import NamedTuple

import torch

from conformance import peers, recording
from conformance.batches import batch
from conformance.rows import Row, Tally, expected
from conformance.sources import Source, found
from conformance.telling import aimed_batch


class Compared(NamedTuple):
    """Outcome of one row of one source."""

    source: Source
    tally: Tally


class Task(NamedTuple):
    """A framework to compare, and the number of cases."""

    framework: str
    cases: int
    seed: int
    only: str
    record: bool


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


def run(tasks: list[Task]) -> Iterator[list[Compared]]:
    """Compare frameworks, each in a process of its own: their stand-ins for modules must not meet."""
    with get_context("spawn").Pool(min(2, len(tasks)), maxtasksperchild=1) as pool:
        yield from pool.imap(_framework, tasks)


def compared(row: Row, cases: int, seed: int = 0) -> Tally:
    """Run a row on `cases` batches, which go around its kinds."""
    tally = Tally(row.title)
    for number in range(cases):
        kind = row.kinds[number % len(row.kinds)]
        settings = row.settings(Random(f"settings-{seed + number}"))
        given = aimed_batch(row, settings, seed + number) if kind == "aimed" else batch(kind, seed + number)
        tally.add(row, given, settings, expected(row, given, settings))
    return tally


def replayed(framework: str, wanted: Callable[[Row], bool] = lambda row: True) -> list[Compared]:
    """Compare a framework's rows with the results that are recorded, without its code."""
    made = []
    for recorded in recording.load(framework):
        rows = {row.key: row for row in rows_of(recorded.source)}
        for key, cases in recorded.rows.items():
            if not wanted(rows[key]):
                continue
            tally = Tally(rows[key].title)
            for case in cases:
                tally.add(rows[key], *case)
            made.append(Compared(recorded.source, tally))
    return made


def _framework(task: Task) -> list[Compared]:
    torch.set_num_threads(1)
    logging.getLogger("rollout_corr").setLevel(logging.ERROR)
    sources = sources_of(task.framework)
    if task.record and not sources:
        return []
    if task.record:
        recording.record(task.framework, [(source, rows_of(source)) for source in sources])
        return replayed(task.framework)
    return [
        Compared(source, compared(row, task.cases, task.seed))
        for source in sources
        for row in rows_of(source)
        if task.only in row.name
    ]

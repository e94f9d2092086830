"""The campaign of attack: areas, attempts in worker processes, and the figures of what happened.

An area is a module of this folder with `AREA = Area(...)`. Its `attempt(seed)` makes one attempt that its seed alone
decides, and says whether the answer was right, refused or wrong. The campaign makes attempts in processes of their own,
so that one that crashes or never ends is counted as wrong under its seed, and the others go on.
"""

from __future__ import annotations

import importlib
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lab.attack.worker import Lost, Worker

FOLDER = Path(__file__).resolve().parent
Verdict = Literal["right", "refused", "wrong"]


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended.

    Attributes:
        verdict: The answer was right; the attempt was refused in the way that is promised; or anything else.
        detail: The refusing line, or what was wrong.
    """

    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True)
class Area:
    """Something that is attacked.

    Attributes:
        name: Of the area and of its module.
        unit: What is counted, such as "files".
        attempt: Makes the attempt of a seed. A function at the top of a module, so that a worker can import it.
        count: Attempts of `make attack`.
        few: Attempts of `make test`, which see that the area still runs: at most 4 seconds on one busy core.
        limit: Seconds after which an attempt counts as hung.
    """

    name: str
    unit: str
    attempt: Callable[[int], Outcome]
    count: int
    few: int
    limit: float = 60.0


@dataclass
class Figures:
    """The findings of a campaign in one area.

    Attributes:
        seeds: Those that the area was given.
        tried: How many of them were tried: all, unless the time was up.
        right, refused: How many ended so.
        wrong: What was wrong, by seed.
        seconds: The time of the attempts, summed over the processes.
    """

    area: Area
    seeds: range
    tried: int = 0
    right: int = 0
    refused: int = 0
    wrong: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, seed: int, outcome: Outcome, seconds: float) -> None:
        """Add the outcome of a seed."""
        self.tried += 1
        self.seconds += seconds
        if outcome.verdict == "wrong":
            self.wrong[seed] = outcome.detail
        else:
            setattr(self, outcome.verdict, getattr(self, outcome.verdict) + 1)


# Is called with each outcome.
Each = Callable[[Area, int, Outcome], None]


def names(folder: Path = FOLDER) -> list[str]:
    """Name the areas: the modules that have an AREA. Nothing is imported."""
    has_area = re.compile(r"^AREA\b", re.MULTILINE)
    return sorted(path.stem for path in folder.glob("*.py") if has_area.search(path.read_text(encoding="utf-8")))


def load(name: str) -> Area:
    """Import an area."""
    area = importlib.import_module(f"lab.attack.{name}").AREA
    if area.name != name:
        raise ValueError(f"{name}.py: expected an area of this name, got {area.name!r}")
    return area


def outcome_of(answer: object) -> Outcome:
    """Make an outcome of what a process answered: a text is a traceback."""
    if isinstance(answer, Outcome):
        return answer
    return Outcome("wrong", answer if isinstance(answer, str) else f"attempt() returned {answer!r}")


def run(
    asked: Sequence[tuple[Area, range]],
    workers: int = 1,
    seconds: float | None = None,
    each: Each = lambda area, seed, outcome: None,
) -> list[Figures]:
    """Try the seeds of one area after another.

    Args:
        asked: Areas, and the seeds of each.
        workers: Processes at a time.
        seconds: No attempt starts after so many; each area gets an even share of what is left; those under way
            end by their area's limit. None: try all seeds.
        each: Called with every outcome, as it comes.
    """
    ends, found = math.inf if seconds is None else time.monotonic() + seconds, []
    for place, (area, seeds) in enumerate(asked):
        now = time.monotonic()
        found.append(_tried(Figures(area, seeds), workers, now + (ends - now) / (len(asked) - place), each))
    return found


def _tried(found: Figures, workers: int, ends: float, each: Each) -> Figures:
    """Try seeds of an area in order until the time is up; a process that is lost is replaced."""
    area, left, lock, stop = found.area, iter(found.seeds), threading.Lock(), threading.Event()

    def work() -> None:
        worker: Worker | None = None
        try:
            while time.monotonic() < ends and not stop.is_set():
                with lock:
                    seed = next(left, None)
                if seed is None:
                    return
                worker = worker or Worker()
                begun = time.monotonic()
                try:
                    outcome = outcome_of(worker.call(area.attempt, seed, area.limit))
                except Lost as error:
                    outcome, worker = Outcome("wrong", str(error)), None
                with lock:
                    found.count(seed, outcome, time.monotonic() - begun)
                    each(area, seed, outcome)
        finally:
            if worker is not None:
                worker.end()

    with ThreadPoolExecutor(workers) as threads:
        try:
            for done in [threads.submit(work) for _ in range(workers)]:
                done.result()
        finally:
            stop.set()
    return found

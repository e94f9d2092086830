"""The campaign of attack: areas, attempts in worker processes, and the figures of what happened.

An area is a module of this folder with `AREA = Area(...)`. Its `attempt(seed)` makes one attempt that its seed alone
decides, and says whether the answer was right, refused or wrong. The campaign makes attempts in processes of their own,
so that one that crashes or never ends is counted as wrong under its seed, and the others go on.
"""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from attack.worker import Lost, Worker

FOLDER = Path(__file__).resolve().parent
Verdict = Literal["right", "refused", "wrong"]

# Seconds that a process stays with one area while others wait. A change of area costs an import of torch.
TURN = 30.0


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended.

    Attributes:
        verdict: The answer was right; the attempt was refused in the way that is promised; or anything else.
        detail: The refusing line, or what was wrong.
    """

    verdict: Verdict
    detail: str = ""

    def __post_init__(self):
        if self.verdict not in get_args(Verdict):
            raise ValueError(f"verdict: expected one of {get_args(Verdict)}, got {self.verdict!r}")


@dataclass(frozen=True)
class Area:
    """Something that is attacked.

    Attributes:
        name: Of the area and of its module.
        unit: What is counted, such as "files".
        attempt: Makes the attempt of a seed. A function at the top of a module, so that a worker can import it.
        count: Attempts of `make attack`.
        few: Attempts of `make test`: at most 8 seconds on one busy core.
        limit: Seconds after which an attempt counts as hung, not counting those that it waits for a core.
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
    area = importlib.import_module(f"attack.{name}").AREA
    if area.name != name:
        raise ValueError(f"{name}.py: expected an area of this name, got {area.name!r}")
    return area


class _Campaign:
    """The seeds still to try, and the findings. Each process has a thread here that gives it seeds."""

    def __init__(self, asked: Iterable[tuple[Area, range]], workers: int, seconds: float | None, each: Each):
        self.figures = [Figures(area, seeds) for area, seeds in asked]
        self.left = {one.area.name: iter(one.seeds) for one in self.figures}
        self.busy = dict.fromkeys(self.left, 0)
        self.ends = float("inf") if seconds is None else time.monotonic() + seconds
        # In a short campaign every area has its turn too.
        self.turn_seconds = min(TURN, (seconds or float("inf")) * workers / (2 * max(len(self.figures), 1)))
        self.each = each
        self.workers: set[Worker] = set()
        self.lock = threading.Lock()

    def stop(self) -> None:
        """End every process, whatever it does."""
        self.ends = 0.0
        with self.lock:
            for worker in self.workers:
                worker.end()

    def over(self) -> bool:
        return time.monotonic() >= self.ends

    def neediest(self) -> Figures | None:
        """Find the area with the fewest processes and the least time; None: nothing is left to do."""
        waiting = [one for one in self.figures if one.area.name in self.left]
        if self.over() or not waiting:
            return None
        return min(waiting, key=lambda one: (self.busy[one.area.name], one.seconds))

    def work(self) -> None:
        """Try seeds of one area after another, each area in a process of its own."""
        while True:
            with self.lock:
                one = self.neediest()
                if one is None:
                    return
                self.busy[one.area.name] += 1
            try:
                self.turn(one)
            finally:
                with self.lock:
                    self.busy[one.area.name] -= 1

    def turn(self, one: Figures) -> None:
        """Try seeds of an area until they or the turn are over."""
        name, worker, ends = one.area.name, None, time.monotonic() + self.turn_seconds
        try:
            while not self.over():
                with self.lock:
                    seed = next(self.left.get(name, iter(())), None)
                    if seed is None:
                        self.left.pop(name, None)
                        return
                if worker is None:
                    worker = self.started()
                begun = time.monotonic()
                try:
                    outcome = outcome_of(worker.call(one.area.attempt, seed, one.area.limit))
                except Lost as error:
                    outcome = Outcome("wrong", str(error))
                    self.ended(worker)
                    worker = None
                with self.lock:
                    one.count(seed, outcome, time.monotonic() - begun)
                    self.each(one.area, seed, outcome)
                    if time.monotonic() > ends and len(self.left) > len(self.workers):
                        return
        finally:
            if worker is not None:
                self.ended(worker)

    def started(self) -> Worker:
        worker = Worker()
        with self.lock:
            self.workers.add(worker)
        return worker

    def ended(self, worker: Worker) -> None:
        with self.lock:
            self.workers.discard(worker)
        worker.end()


def outcome_of(answer: object) -> Outcome:
    """Make an outcome of what a process answered: a text is a traceback."""
    if isinstance(answer, Outcome):
        return answer
    return Outcome("wrong", answer if isinstance(answer, str) else f"attempt() returned {answer!r}")


def run(
    asked: Iterable[tuple[Area, range]],
    workers: int = 1,
    seconds: float | None = None,
    each: Each = lambda area, seed, outcome: None,
) -> list[Figures]:
    """Try the seeds of the areas in `workers` processes, which the areas share evenly.

    Args:
        asked: Areas, and the seeds of each.
        workers: Processes at a time.
        seconds: No attempt starts after so many; those under way end by their area's limit. None: try all seeds.
        each: Called with every outcome, as it comes.
    """
    campaign = _Campaign(asked, workers, seconds, each)
    with ThreadPoolExecutor(workers) as threads:
        try:
            for done in [threads.submit(campaign.work) for _ in range(workers)]:
                done.result()
        finally:
            campaign.stop()
    return campaign.figures

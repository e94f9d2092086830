"""Steps in processes of their own, each with its own time: one that fails or hangs loses nothing of the rest.

Steps are run in waves: those of a wave at the same time, one wave after the other. What a wave leaves of its time the
next one has too, and the report is saved while a step runs, not only behind it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import INCOMPLETE
from benchmarks.measure import Budget

ROOT = Path(__file__).resolve().parent.parent.parent

UNDER_WAY, PASSED, FAILED, OUT_OF_TIME, NOT_RUN = "under way", "passed", "failed", "out of time", "not run"
# The exit status of a command that ended as it should and says that something is wrong: it is not run again.
DOES_NOT_HOLD = INCOMPLETE

# Lines of output that are kept of a step that did not pass. Seconds that a process may take to end when told to,
# between two looks at the processes, and between two reports of what they have written so far.
KEPT_LINES, GRACE, LOOK, SHOW = 40, 3.0, 0.2, 10.0
# Seconds in which Python and torch start, which a command does not count that is told how many it has.
STARTS = 8.0

# A group of its own, so that what a step starts ends with it. Not a session where Python can do without: whoever ends
# all processes of our session shall find these too.
GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}


@dataclass(frozen=True)
class Step:
    """A part of the report.

    Args:
        name: What it is called, and the stem of its files.
        what: What it shows, in words.
        commands: Run at the same time; "{json}" in an argument is the file that a command may write, "{seconds}" the
            time that it has once it has started.
        limit: Seconds.
        program: Must be installed, or the step is not run.
        again: Added to a command that is run again because it ended with an error, or was ended because it hung, while
            time was left and its file had changed; None: never.
        patience: Seconds without a change of its file after which a command that can be run again counts as hung.
        environment: On top of that of the report.
    """

    name: str
    what: str
    commands: Sequence[Sequence[str]]
    limit: float
    program: str | None = None
    again: str | None = None
    patience: float = float("inf")
    environment: Mapping[str, str] = field(default_factory=dict)


Said = dict[str, Any]


class Part:
    """One command of a step: its process, its files, and how it ended."""

    def __init__(self, step: Step, which: int, folder: Path, budget: Budget) -> None:
        stem = step.name.replace(" ", "-") + (f"-{which}" if len(step.commands) > 1 else "")
        self.step, self.which, self.budget = step, which, budget
        self.json, self.log = folder / f"{stem}.json", folder / f"{stem}.log"
        self.json.unlink(missing_ok=True)
        self.status = UNDER_WAY
        self._ending: Budget | None = None
        self._start("wb")

    def _start(self, mode: str, *more: str) -> None:
        words = [*self.step.commands[self.which], *more]
        left = f"{max(1.0, self.budget.left() - STARTS):.0f}"
        command = [word.replace("{json}", str(self.json)).replace("{seconds}", left) for word in words]
        self._before = self._seen = self._stamp()
        self._changed, self._ending = Budget(self.step.patience), None
        with self.log.open(mode) as out:
            try:
                self._process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=os.environ | dict(self.step.environment),
                    **GROUP,
                )
            except OSError as problem:
                out.write(f"{problem}\n".encode())
                self.status = FAILED

    def _stamp(self) -> int | None:
        """Of what the file says: one that is written again as it was has got nowhere."""
        return zlib.crc32(self.json.read_bytes()) if self.json.exists() else None

    def look(self) -> bool:
        """See how it goes, end it when its time is over, run it again where that helps; True when it is over.

        It never waits: a process that takes its time to end holds up none of the others.
        """
        if self.status != UNDER_WAY:
            return True
        now = self._stamp()
        if now != self._seen:
            self._seen, self._changed = now, Budget(self.step.patience)
        code = self._process.poll()
        if code is None and self._ending is None:
            hangs = self.step.again is not None and self._changed.left() <= 0.0
            if hangs or self.budget.left() <= 0.0:
                self.tell(signal.SIGTERM)
                self._ending = Budget(GRACE)
        elif code is None and self._ending is not None:
            if self._ending.left() <= 0.0:
                # It may be left behind even so, waiting for a device that does not answer.
                self.tell(signal.SIGKILL)
                self._over(None)
        elif code == 0 and self._ending is None:
            self.status = PASSED
        else:
            # What it started may not have listened.
            self.tell(signal.SIGKILL)
            self._over(code)
        return self.status != UNDER_WAY

    def _over(self, code: int | None) -> None:
        """It failed, hung or was too slow: run it again, unless it would not get anywhere."""
        if self.budget.left() <= 0.0 and self._ending is not None:
            self.status = OUT_OF_TIME
            return
        moved = self._seen is not None and self._seen != self._before
        if self.step.again is not None and moved and code != DOES_NOT_HOLD and self.budget.left() >= 1.0:
            self._start("ab", self.step.again)
        else:
            self.status = FAILED

    def tell(self, how: signal.Signals) -> None:
        """Send a signal to the process and all that it started, unless it is over."""
        if self.status == UNDER_WAY:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, how)

    def wait(self, seconds: float) -> None:
        """Until it has ended, or the seconds are over."""
        if self.status == UNDER_WAY:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def said(self) -> Said:
        """What it wrote, and unless it passed the end of its output."""
        part: Said = {"found": read(self.json)}
        if self.status not in (PASSED, UNDER_WAY):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            part |= {"status": self.status, "output": lines[-KEPT_LINES:]}
        return part


class Running:
    """A step that has been started."""

    def __init__(self, step: Step, folder: Path, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.step, self._clock, self._from = step, clock, clock()
        self._took: float | None = None
        limit = min(step.limit, seconds)
        self._why: Said = {}
        self.parts: list[Part] = []
        if step.program is not None and shutil.which(step.program) is None:
            self._why = {"why": f"{step.program} is not installed"}
        elif limit < 1.0:
            self._why = {"why": "no time was left"}
        else:
            budget = Budget(limit, clock)
            self.parts = [Part(step, which, folder, budget) for which in range(len(step.commands))]

    def look(self) -> bool:
        """True when it is over."""
        over = sum(part.look() for part in self.parts) == len(self.parts)
        if over and self._took is None:
            self._took = self._clock() - self._from
        return over

    def said(self) -> Said:
        """What the report says of it.

        name, what, status, seconds, and of each command what it wrote to its file; of one that did not pass, the end
        of its output.
        """
        statuses = [part.status for part in self.parts]
        order = (UNDER_WAY, FAILED, OUT_OF_TIME, PASSED)
        status = next((one for one in order if one in statuses), NOT_RUN)
        taken = 0.0 if not self.parts else (self._clock() - self._from if self._took is None else self._took)
        said = {"name": self.step.name, "what": self.step.what, "status": status, "seconds": round(taken, 1)}
        return {**said, "parts": [part.said() for part in self.parts], **self._why}


def run_wave(
    steps: Sequence[Step],
    folder: Path,
    seconds: float,
    show: Callable[[list[Said]], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Said]:
    """Run steps at the same time.

    Args:
        steps: Which.
        folder: For their files.
        seconds: What is left for them; the limit of each holds too.
        show: Called with what they said so far, now and then and whenever one of them is over.
        clock: In seconds.

    Returns:
        What they said in the end, in order.
    """
    running: list[Running] = []
    try:
        running += [Running(step, folder, seconds, clock) for step in steps]
        over, shown = -1, Budget(0.0, clock)
        while True:
            now = sum(one.look() for one in running)
            if now != over or shown.left() <= 0.0:
                over, shown = now, Budget(SHOW, clock)
                show([one.said() for one in running])
            if now == len(running):
                return [one.said() for one in running]
            time.sleep(LOOK)
    finally:
        # Whoever ended us ends them: of what is over, nothing is left to end.
        parts = [part for one in running for part in one.parts]
        for how in (signal.SIGTERM, signal.SIGKILL):
            patience = Budget(GRACE)
            for part in parts:
                part.tell(how)
            for part in parts:
                part.wait(patience.left())


def read(path: Path) -> Any:
    """What a step wrote, None if that is nothing that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


Wave = Callable[[Sequence[Step], Path, float, Callable[[list[Said]], None]], list[Said]]


def run_all(
    waves: Sequence[Sequence[Step]],
    report: Said,
    folder: Path,
    budget: Budget,
    save: Callable[[Said], None],
    run: Wave = run_wave,
) -> None:
    """Run the waves in order, and save the report as they go on; what was not used of a limit the next ones may use."""
    spared, done = 0.0, []
    for wave in waves:
        longest, before = max(step.limit for step in wave), budget.left()

        def show(said: list[Said], done: list[Said] = done) -> None:
            report["steps"] = [*done, *said]
            save(report)

        said = run([_longer(step, spared) for step in wave], folder, before, show)
        done = [*done, *said]
        spared = max(0.0, spared + longest - (before - budget.left()))
    report["steps"] = done
    save(report)


def _longer(step: Step, seconds: float) -> Step:
    return replace(step, limit=step.limit + seconds)

"""Steps of the GPU report: each a process with a time limit, so one that fails or hangs loses nothing of the others.

Waves of steps run one after the other, the steps of a wave at the same time. A wave ends at the latest when the sum of
its seconds and of those before it is over, so it may use what the others left. What steps have written is saved while
they run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.__main__ import INCOMPLETE
from benchmarks.machine import ROOT

UNDER_WAY, PASSED, FAILED, OUT_OF_TIME, NOT_RUN = "under way", "passed", "failed", "out of time", "not run"

# Lines of output that are kept of a process that did not pass. Seconds that a process may take to end when told to,
# between two looks at the processes, and between two saves of what they have written so far.
KEPT_LINES, GRACE, LOOK, SHOW = 40, 3.0, 0.2, 10.0
# Seconds in which Python and torch start, subtracted from the time that a command is told.
STARTS = 8.0

# A group of its own, so that everything that a step starts ends with it; not a new session where Python allows it, so
# that ending our session ends the steps too.
GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}

Said = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A step of the report.

    Args:
        name: Its name, and the stem of its files.
        what: What it shows, in words.
        command: The command; the word "{json}" stands for the file that it may write, "{seconds}" for the time that it
            has once it has started, "{part}" for "I/N" of the I-th of N processes.
        needs: A program that must be installed, or the step is not run.
        processes: How many run the command at the same time.
        resumes: Run again with `--resume` when it died after its file had changed.
        environment: Added to that of the report.
    """

    name: str
    what: str
    command: Sequence[str]
    needs: str | None = None
    processes: int = 1
    resumes: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


Wave = tuple[float, Sequence[Step]]  # seconds, steps


class Process:
    """A process of a step, its files, and how it ended."""

    def __init__(self, step: Step, part: int, folder: Path, end: float) -> None:
        self.step, self.end, self.status = step, end, UNDER_WAY
        self.began = self.ended = time.monotonic()
        self.json, self.log = (folder / f"{step.name}-{part}.{kind}" for kind in ("json", "log"))
        self.words = {"{json}": str(self.json), "{part}": f"{part}/{step.processes}"}
        self.start()

    def start(self, *more: str) -> None:
        left = f"{max(1.0, self.end - time.monotonic() - STARTS):.0f}"
        words = self.words | {"{seconds}": left}
        self.before = self.written()
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [words.get(word, word) for word in (*self.step.command, *more)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(self.step.environment),
                **GROUP,
            )

    def written(self) -> bytes | None:
        return self.json.read_bytes() if self.json.exists() else None

    def look(self) -> None:
        """Note how the process ended, or run it again if that gets further."""
        code = self.process.poll()
        if self.status != UNDER_WAY or code is None:
            return
        self.signal(signal.SIGKILL)  # to its children, which may still run
        if self.step.resumes and code not in (0, INCOMPLETE) and self.written() != self.before:
            self.start("--resume")
            return
        self.status, self.ended = PASSED if code == 0 else FAILED, time.monotonic()

    def signal(self, which: signal.Signals) -> None:
        """Send a signal to the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, which)

    def said(self) -> Said:
        """Return what it wrote, and the end of its output unless it passed."""
        try:
            part: Said = {"found": json.loads(self.written() or b"null")}
        except ValueError:  # ended while it was writing
            part = {"found": None}
        if self.status not in (PASSED, UNDER_WAY):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            part |= {"status": self.status, "output": lines[-KEPT_LINES:]}
        return part


def stop(processes: Sequence[Process]) -> None:
    """End processes: first ask, then kill. A process may remain, waiting for a device that does not answer."""
    for which in (signal.SIGTERM, signal.SIGKILL):
        for one in processes:
            one.signal(which)
        patience = time.monotonic() + GRACE
        while time.monotonic() < patience and any(one.process.poll() is None for one in processes):
            time.sleep(LOOK / 10)


def said(step: Step, processes: Sequence[Process], why: str | None) -> Said:
    """Return the entry of a step in the report: name, what, status, seconds, and what each process wrote."""
    statuses = [one.status for one in processes]
    status = next((one for one in (UNDER_WAY, FAILED, OUT_OF_TIME, PASSED) if one in statuses), NOT_RUN)
    now = time.monotonic()
    taken = max(((now if one.status == UNDER_WAY else one.ended) - one.began for one in processes), default=0.0)
    entry = {"name": step.name, "what": step.what, "status": status, "seconds": round(taken, 1)}
    return {**entry, "parts": [one.said() for one in processes], **({} if why is None else {"why": why})}


def run_wave(steps: Sequence[Step], folder: Path, end: float, show: Callable[[list[Said]], None]) -> list[Said]:
    """Run steps at the same time, until `end` of the monotonic clock; return their entries in the report.

    `show` is called with the entries so far, every SHOW seconds and when a process has ended.
    """
    running: list[tuple[Step, list[Process], str | None]] = []
    everything: list[Process] = []

    def entries() -> list[Said]:
        return [said(*one) for one in running]

    try:
        for step in steps:
            why = f"{step.needs} is not installed" if step.needs and shutil.which(step.needs) is None else None
            why = why or ("no time was left" if end - time.monotonic() < 1.0 else None)
            running.append((step, [], why))
            for part in range(0 if why else step.processes):
                everything.append(Process(step, part, folder, end))
                running[-1][1].append(everything[-1])
        shown, seen = 0.0, None
        while any(one.status == UNDER_WAY for one in everything) and time.monotonic() < end:
            for one in everything:
                one.look()
            statuses = [one.status for one in everything]
            if statuses != seen or time.monotonic() > shown + SHOW:
                shown, seen = time.monotonic(), statuses
                show(entries())
            time.sleep(LOOK)
    finally:
        # Also when the report is ended from outside.
        stop([one for one in everything if one.status == UNDER_WAY])
    for one in everything:
        if one.status == UNDER_WAY:
            one.status, one.ended = OUT_OF_TIME, time.monotonic()
    return entries()


def run_all(waves: Sequence[Wave], report: Said, folder: Path, save: Callable[[Said], None]) -> None:
    """Run waves in order, and save the report with the steps' entries while they run."""
    done: list[Said] = []
    end = time.monotonic()
    for seconds, steps in waves:
        end += seconds

        def show(entries: list[Said], done: list[Said] = done) -> None:
            report["steps"] = [*done, *entries]
            save(report)

        done = [*done, *run_wave(steps, folder, end, show)]
    report["steps"] = done
    save(report)

"""Steps in processes of their own, each with its own time: one that fails or hangs loses nothing of the rest."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import Budget

ROOT = Path(__file__).resolve().parent.parent.parent

PASSED, FAILED, OUT_OF_TIME, NOT_RUN = "passed", "failed", "out of time", "not run"

# Lines of output that are kept of a step that did not pass, and seconds that a process may take to end when told to.
KEPT_LINES, GRACE = 40, 3.0


@dataclass(frozen=True)
class Step:
    """A part of the report.

    Args:
        name: What it is called, and the stem of its files.
        what: What it shows, in words.
        commands: Run at the same time; "{json}" in an argument is the file that a command may write, "{seconds}" the
            time that it has.
        limit: Seconds.
        program: Must be installed, or the step is not run.
        again: Added to a command that is run again because it ended with an error while time was left; None: never.
        environment: On top of that of the report.
    """

    name: str
    what: str
    commands: Sequence[Sequence[str]]
    limit: float
    program: str | None = None
    again: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Running:
    """A process and its files."""

    command: list[str]
    json: Path
    log: Path
    process: subprocess.Popen[bytes]


def run_step(step: Step, folder: Path, seconds: float, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """Run one step.

    Args:
        step: Which.
        folder: For its files.
        seconds: What is left for it; its own limit holds too.
        clock: In seconds.

    Returns:
        What the report says of it: name, what, status, seconds, and of each command what it wrote to its file; of one
        that did not pass, the end of its output.
    """
    said: dict[str, Any] = {"name": step.name, "what": step.what, "status": NOT_RUN, "seconds": 0.0, "parts": []}
    if step.program is not None and shutil.which(step.program) is None:
        return {**said, "why": f"{step.program} is not installed"}
    limit = min(step.limit, seconds)
    if limit < 1.0:
        return {**said, "why": "no time was left"}
    budget, start = Budget(limit, clock), clock()
    running = [_start(step, i, folder, budget, "") for i in range(len(step.commands))]
    statuses = [_finish(step, i, one, folder, budget) for i, one in enumerate(running)]
    said["status"] = next((bad for bad in (FAILED, OUT_OF_TIME) if bad in [status for status, _ in statuses]), PASSED)
    said["seconds"] = round(clock() - start, 1)
    for status, one in statuses:
        part: dict[str, Any] = {"found": read(one.json)}
        if status != PASSED:
            lines = one.log.read_text(encoding="utf-8", errors="replace").splitlines()
            part |= {"status": status, "output": lines[-KEPT_LINES:]}
        said["parts"].append(part)
    return said


def _start(step: Step, which: int, folder: Path, budget: Budget, more: str) -> Running:
    stem = step.name.replace(" ", "-") + (f"-{which}" if len(step.commands) > 1 else "")
    path, log = folder / f"{stem}.json", folder / f"{stem}.log"
    if not more:
        path.unlink(missing_ok=True)
    words = [*step.commands[which], *([more] if more else [])]
    command = [word.replace("{json}", str(path)).replace("{seconds}", f"{budget.left():.0f}") for word in words]
    with log.open("ab" if more else "wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | dict(step.environment),
            # A group of its own, so that what the step starts ends with it.
            start_new_session=True,
        )
    return Running(command, path, log, process)


def _finish(step: Step, which: int, one: Running, folder: Path, budget: Budget) -> tuple[str, Running]:
    while True:
        try:
            code = one.process.wait(budget.left())
        except subprocess.TimeoutExpired:
            _end(one.process)
            return OUT_OF_TIME, one
        if code == 0 or step.again is None or budget.left() < 1.0:
            return (PASSED if code == 0 else FAILED), one
        one = _start(step, which, folder, budget, step.again)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def read(path: Path) -> Any:
    """What a step wrote, None if that is nothing that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None


def run_all(
    steps: Sequence[Step],
    report: dict[str, Any],
    folder: Path,
    budget: Budget,
    save: Callable[[dict[str, Any]], None],
    run: Callable[[Step, Path, float], dict[str, Any]] = run_step,
) -> None:
    """Run the steps in order, and save the report after each."""
    for step in steps:
        report["under_way"] = step.name
        save(report)
        report["steps"].append(run(step, folder, budget.left()))
        report["under_way"] = None
        save(report)

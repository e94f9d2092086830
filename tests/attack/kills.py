"""Attack on `rc.dump`: processes that dump are killed, interrupted, forked or run out of disk, again and again.

One attempt is a file or folder, and processes that dump there one after another. Each tells by a pipe what it submitted
and what was answered, and ends in one of ENDS at a random moment. After each, the path is read by plain json or torch
and by the package's own reader: what was acknowledged is there, once and whole, and what failed is not.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import resource
import signal
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from attack.campaign import Area, Outcome
from builders.dump_calls import call, plain_numbers, read_numbers
from rollout_corr.diagnose.read.problems import DumpError

# How a process ends: by itself; killed or interrupted from outside at any moment; killed within its nth write.
ENDS = ("itself", "kill", "kill", "within a write", "within a write", "terminate", "interrupt")
OWN_NUMBERS = 10_000


@dataclass
class Plan:
    """The plan of a process: the disk takes `piecemeal` bytes at a time, and files of up to `full` bytes."""

    path: Path
    first: int
    calls: int
    end: str
    seed: int
    piecemeal: int | None
    full: int | None
    forks: bool


@dataclass
class Told:
    """The numbers of sequences that processes told of: given to a call, and how it was answered; errors; children."""

    submitted: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    left_out: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    children: list[int] = field(default_factory=list)

    def hear(self, line: str) -> None:
        what, first, count, text = json.loads(line)
        if what == "child":
            self.children.append(first)
        else:
            getattr(self, what).update(range(first, first + count))
        if what == "failed":
            self.errors.append(text)


def process(plan: Plan, pipe: int) -> None:
    """Dump, in a process of its own."""
    warnings.simplefilter("ignore")
    rng, write = random.Random(plan.seed), os.write
    fatal = rng.randrange(1, plan.calls + 1) if plan.end == "within a write" else 0
    writes = 0

    def tell(what: str, first: int, count: int, text: str = "") -> None:
        write(pipe, (json.dumps([what, first, count, text]) + "\n").encode())

    def disk(file: int, data: bytes) -> int:
        nonlocal writes
        writes += 1
        if writes == fatal:
            write(file, data[: rng.randrange(len(data) + 1)])
            os.kill(os.getpid(), signal.SIGKILL)
        if plan.piecemeal is None:
            return write(file, data)
        time.sleep(0.0005)
        return write(file, data[: plan.piecemeal])

    os.write = disk
    first = plan.first
    fork_at = rng.randrange(plan.calls) if plan.forks else -1
    tell("child", os.getpid(), 0)
    forked = 0
    for i in range(plan.calls):
        if i == fork_at:
            forked = os.fork()
            if forked == 0:
                tell("child", os.getpid(), 0)
                first, fatal = plan.first + OWN_NUMBERS // 2, 0
        if plan.full is not None:
            limit = plan.full if rng.random() < 0.5 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        count, tokens = rng.randrange(1, 12), rng.choice((2, 7, 200, 1500))
        tell("submitted", first, count)
        future = call(plan.path, first=first, count=count, tokens=tokens, step=i)

        def answered(future, first=first, count=count):
            error = future.exception()
            what = "failed" if error is not None else "acknowledged" if future.result() else "left_out"
            tell(what, first, count, str(error))

        future.add_done_callback(answered)
        first += count
        if rng.random() < 0.5:
            future.exception(30)
    if forked:
        os.waitpid(forked, 0)


def run(plan: Plan, told: Told, rng: random.Random) -> str | None:
    """Run a process and end it; return what was wrong with the way it ended, or None."""
    ours, theirs = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=process, args=(plan, theirs))
    child.start()
    os.close(theirs)
    begun = time.monotonic()
    how = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}.get(plan.end)
    with os.fdopen(ours, encoding="utf-8") as pipe:
        told.hear(pipe.readline())
        if how is not None:
            time.sleep(rng.uniform(0, 0.03))
            with contextlib.suppress(ProcessLookupError):
                os.kill(told.children[-1], how)
        torn = ""
        for line in pipe:  # to the end of the last process that has the other end
            if line.endswith("\n"):
                told.hear(line)
            else:
                torn = line
    child.join(30)
    if child.exitcode is None:
        child.kill()
        return f"a process that was to end by {plan.end} did not"
    if torn:
        return f"half a line on the pipe: {torn!r}"
    if plan.end == "itself" and child.exitcode != 0:
        return f"a process ended with {child.exitcode}"
    if time.monotonic() - begun > 25:
        return "a process took more than 25 s"
    return None


def judge(path: Path, told: Told, may_be_torn: bool) -> str | None:
    """Return what is wrong with what is at the path, or None."""
    if not path.exists() or (path.is_dir() and not list(path.glob("*.pt"))):
        return "an acknowledged call is not there" if told.acknowledged else None
    if path.suffix == ".jsonl":
        data = path.read_bytes()
        tail = data[data.rfind(b"\n") + 1 :]
        if tail and not may_be_torn:
            return f"half a line: {tail[:40]!r}"
        numbers = [json.loads(line)["which"] for line in data[: len(data) - len(tail)].splitlines()]
        with contextlib.suppress(ValueError):  # whole but for its line break
            numbers += [json.loads(tail)["which"]] if tail else []
        problems = 1 if tail else 0
    else:
        numbers, problems = plain_numbers(path), 0
        if not may_be_torn and list(path.glob("*.part")):
            return f"a part stays: {list(path.glob('*.part'))}"
    found = set(numbers)
    for name, wrong in (
        ("twice", {number for number in found if numbers.count(number) > 1} if len(found) < len(numbers) else set()),
        ("acknowledged and not there", told.acknowledged - found),
        ("failed and there", told.failed & found),
        ("left out and there", told.left_out & found),
        ("there, and never submitted", found - told.submitted),
    ):
        if wrong:
            return f"{name}: {sorted(wrong)[:10]}"
    try:
        read, said = read_numbers(path)
    except DumpError as error:
        return None if not numbers else f"the reader: {error}"
    if sorted(read) != sorted(numbers) or len(said) > problems:
        return f"the reader found {len(read)} of {len(numbers)} sequences; {said[:3]}"
    return None


def attempt(seed: int) -> Outcome:
    """Let up to four processes dump to one path, one after another; the last one ends by itself."""
    torch.set_num_threads(1)  # threads of OpenMP do not outlive a fork
    rng, told = random.Random(seed), Told()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        path = Path(folder) / rng.choice(("x.jsonl", "x.jsonl", "shards"))
        turns = rng.randrange(2, 5)
        for turn in range(turns):
            last = turn == turns - 1
            end = "itself" if last else rng.choice(ENDS)
            size = path.stat().st_size if path.is_file() else 0
            plan = Plan(
                path=path,
                first=turn * OWN_NUMBERS,
                calls=rng.randrange(1, 9),
                end=end,
                seed=rng.randrange(2**32),
                piecemeal=rng.choice((None, None, 4096, 100_000)),
                full=rng.choice((None, None, size + rng.randrange(100_000))),
                forks=rng.random() < 0.25,
            )
            for part in path.glob("*.part"):
                # As if a minute had passed.
                step, _, rest = part.name.split("-")
                part.rename(path / f"{step}-1600000000000000000-{rest}")
            before = set(path.glob("*.part"))
            wrong = run(plan, told, rng) or judge(path, told, may_be_torn=end != "itself")
            mute = told.submitted - told.acknowledged - told.failed - told.left_out
            if wrong is None and plan.end == "itself" and max(mute, default=-1) >= plan.first:
                wrong = f"not answered: {sorted(mute)[-10:]}"
            # A process removes them with its first call.
            mine = {number for number in told.acknowledged if plan.first <= number < plan.first + OWN_NUMBERS}
            if wrong is None and mine and before & set(path.glob("*.part")):
                wrong = f"parts of dead processes stay: {sorted(before)}"
            if wrong is not None:
                return Outcome("wrong", f"process {turn + 1}, {plan}: {wrong}")
    return Outcome("refused", told.errors[0]) if told.errors else Outcome("right")


AREA = Area(name="kills", unit="processes that dump", attempt=attempt, count=500, few=4)

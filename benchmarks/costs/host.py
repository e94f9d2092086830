"""Host time of the calls, on 256 short sequences: of ours over a driver that does nothing, of the frameworks on a CPU.

CPU time of the thread, the least of several rounds. A framework's operations compute on the CPU, which takes 1 to 2 us
each for so few tokens. Only the framework's functions are timed, and the backward.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch

from benchmarks.cases.batches import Batch, both_layouts
from benchmarks.costs import driver, ours, peers
from benchmarks.machine import ROOT

SHAPE = (256, 8)
ROUNDS, CALLS_IN_A_ROW = 15, 20


class Stopwatch:
    """Adds up the time within functions of a framework, and within autograd's backward."""

    def __init__(self, found: peers.Found, what: str) -> None:
        self.root, self.entries = f"{found.root}/", found.peer.asked[what].entries
        self.spent = self.start = 0
        self.within = False

    def _begin(self) -> None:
        self.within, self.start = True, time.thread_time_ns()

    def _end(self) -> None:
        self.spent += time.thread_time_ns() - self.start
        self.within = False

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if self.within or code.co_name not in self.entries or not code.co_filename.startswith(self.root):
            return None
        frame.f_trace_lines = False
        self._begin()
        return self._returned

    def _returned(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._end()
        return self._returned

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch what is called."""
        grad, before = torch.autograd.grad, sys.gettrace()

        def timed(*given: Any, **named: Any) -> Any:
            self._begin()
            try:
                return grad(*given, **named)
            finally:
                self._end()

        with mock.patch.object(torch.autograd, "grad", timed):
            sys.settrace(self._called)
            try:
                yield
            finally:
                sys.settrace(before)


def of_framework(found: peers.Found, what: str, batch: Batch) -> float:
    """Microseconds of a framework's call."""
    given = peers.batch_of(batch, found.peer.packed)
    least = float("inf")
    for _ in range(ROUNDS):
        watch = Stopwatch(found, what)
        with watch.running():
            found.call(what, given)
        least = min(least, watch.spent / 1000)
    return least


def of_ours() -> dict[str, float]:
    """Microseconds of our calls on the kernels, by CORRECTION, LOSS or BOTH; in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.costs.host"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    """Time ours over a driver that does nothing. Metrics are of numbers from plain torch: the kernels leave none."""
    driver.install()
    torch.set_num_threads(1)
    batch = both_layouts(*SHAPE)["packed"]
    read = {what: call()[0].metrics for what, call in ours.calls_of(batch, "torch").items()}
    calls = ours.calls_of(batch, "triton", metrics=False)
    print(json.dumps({what: least_of(call) + least_of(read[what]) for what, call in calls.items()}))


def least_of(call: Callable[[], object]) -> float:
    """Microseconds of a call, the least of the means of some rounds."""
    least = float("inf")
    for _ in range(ROUNDS):
        call()
        start = time.thread_time_ns()
        for _ in range(CALLS_IN_A_ROW):
            call()
        least = min(least, (time.thread_time_ns() - start) / CALLS_IN_A_ROW / 1000)
    return least


if __name__ == "__main__":
    main()

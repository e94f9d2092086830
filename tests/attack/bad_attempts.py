"""Attempts that end in every wrong way, for the test of the campaign itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from attack.campaign import Outcome

# The seed that goes wrong; the others are right.
BAD = 3


def says_wrong(seed: int) -> Outcome:
    return Outcome("wrong", "1 is not 2") if seed == BAD else Outcome("right")


def raises(seed: int) -> Outcome:
    if seed == BAD:
        raise KeyError("a name")
    return Outcome("refused", "a line")


def exits(seed: int) -> Outcome:
    if seed == BAD:
        sys.exit(0)
    return Outcome("right")


def dies(seed: int) -> Outcome:
    if seed == BAD:
        os.kill(os.getpid(), signal.SIGSEGV)
    return Outcome("right")


def leaves(seed: int) -> Outcome:
    if seed == BAD:
        os._exit(0)
    return Outcome("right")


def takes_its_time(seed: int) -> Outcome:
    time.sleep(0.05)
    return Outcome("right")


def hangs(seed: int) -> Outcome:
    while seed == BAD:
        time.sleep(0.1)
    return Outcome("right")


def hangs_deaf(seed: int) -> Outcome:
    """Hang with a child, and ignore every signal that can be ignored."""
    if seed == BAD:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["ATTACK_TEST_CHILD"]).write_text(str(child.pid), encoding="utf-8")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(600)
    return Outcome("right")


def returns_nothing(seed: int) -> Outcome | None:
    return None if seed == BAD else Outcome("right")

"""Attempts that end in every wrong way, for the test of the campaign itself."""

from __future__ import annotations

import os
import signal
import time

from attack.campaign import Outcome

# The seed that goes wrong; the others are right.
BAD = 3


def says_wrong(seed: int) -> Outcome:
    return Outcome("wrong", "1 is not 2") if seed == BAD else Outcome("right")


def raises(seed: int) -> Outcome:
    if seed == BAD:
        raise KeyError("a name")
    return Outcome("refused", "a line")


def dies(seed: int) -> Outcome:
    if seed == BAD:
        os.kill(os.getpid(), signal.SIGSEGV)
    return Outcome("right")


def hangs(seed: int) -> Outcome:
    while seed == BAD:
        time.sleep(0.1)
    return Outcome("right")

"""The campaign finds every way to be wrong under its seed, and an attempt can be repeated alone."""

from __future__ import annotations

import math
import os
import signal
import time

import pytest

from lab.attack import __main__, campaign
from lab.attack.campaign import Area, Outcome

RIGHT, WRONG = Outcome("right"), Outcome("wrong", "1 is not 2")


def area(attempt, limit=60.0):
    return Area("tried", "attempts", attempt, count=4, few=1, limit=limit)


@pytest.mark.parametrize(
    ("attempt", "seed", "said"),
    [
        (math.sqrt, -1, "ValueError: "),
        (signal.raise_signal, signal.SIGSEGV, "the process ended\nFatal Python error: Segmentation fault"),
        (os._exit, 3, "the process ended"),
        (time.sleep, 60, "the process ended\nTimeout (0:00:01)!"),
    ],
)
def test_what_is_wrong_is_found_under_its_seed(attempt, seed, said):
    """The seed after it is tried too: a process that has died is replaced."""
    (found,) = campaign.run([(area(attempt, 1.0), range(seed, seed + 2))])
    assert said in found.wrong[seed] and found.tried == 2


def test_exit_codes_and_replay(monkeypatch, capsys):
    monkeypatch.setattr(campaign, "names", lambda: ["tried"])
    monkeypatch.setattr(campaign, "load", lambda name: area({2: RIGHT, 3: WRONG, 4: RIGHT}.get))
    assert __main__.main(["tried", "--seed", "4"]) == 0
    assert "tried --seed 4: right" in capsys.readouterr().out
    assert __main__.main(["--seed", "2", "--count", "2"]) == 1
    assert "tried --seed 3: wrong: 1 is not 2" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["others"])

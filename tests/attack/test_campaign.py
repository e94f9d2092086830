"""The campaign finds every way to be wrong under its seed, and an attempt can be repeated alone."""

from __future__ import annotations

import pytest

from attack import __main__, bad_attempts, campaign
from attack.campaign import Area

SEEDS = range(2, 6)


def area(attempt, limit=60.0):
    return Area("tried", "attempts", attempt, count=4, few=1, limit=limit)


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (bad_attempts.raises, "KeyError: 'a name'"),
        (bad_attempts.dies, "the process ended by SIGSEGV"),
        (bad_attempts.hangs, "no answer within 1 s"),
    ],
)
def test_what_is_wrong_is_found_under_its_seed(attempt, said):
    """The seeds after it are tried too: a process that has died is replaced."""
    (found,) = campaign.run([(area(attempt, limit=1.0 if attempt is bad_attempts.hangs else 60.0), SEEDS)])
    assert list(found.wrong) == [bad_attempts.BAD] and said in found.wrong[bad_attempts.BAD]
    assert (found.tried, found.right + found.refused) == (4, 3)


def test_exit_codes_and_replay(monkeypatch, capsys):
    monkeypatch.setattr(campaign, "names", lambda: ["tried"])
    monkeypatch.setattr(campaign, "load", lambda name: area(bad_attempts.says_wrong))
    assert __main__.main(["tried", "--seed", "4"]) == 0
    assert "tried --seed 4: right" in capsys.readouterr().out
    assert __main__.main(["--seed", "2", "--count", "2"]) == 1
    assert "tried --seed 3: wrong: 1 is not 2" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["others"])

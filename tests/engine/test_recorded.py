"""Dumps of a real engine and a real trainer, recorded by `make engine ARGS=--record`: what doctor says of each."""

from functools import cache

import pytest

import rollout_corr as rc
from engine import recorded
from engine.verdicts import ACCEPTED, HEALTHY, arguments, diagnose, verdict

# What doctor does not get right, by model, with what it says instead. A line that is right again has to go.
MISSES: dict[tuple[str, str], str] = {}

CASES = [(model, mode) for mode in ACCEPTED for model in (["moe"] if mode.startswith("moe") else ["flat", "peaky"])]
dumps = cache(recorded.read)


@pytest.mark.parametrize(("model", "mode"), CASES)
def test_doctor_names_the_cause(model, mode):
    said = verdict(diagnose(dumps(model)[mode]))
    if (model, mode) in MISSES:
        assert said == MISSES[model, mode], "no longer this miss: remove it from MISSES, or say what it is now"
        assert said not in ACCEPTED[mode]
    else:
        assert said in ACCEPTED[mode]


@pytest.mark.parametrize(("model", "mode"), [case for case in CASES if ACCEPTED[case[1]] == HEALTHY])
def test_healthy_modes_raise_no_warning(model, mode):
    given = arguments(dumps(model)[mode])
    out = rc.correct(given["train_logp"], given["rollout_logp"], given["batch"], spec=rc.Spec())
    assert out.warnings() == []

"""Dumps of a real engine and a real trainer, recorded by `make engine ARGS=--record`: what doctor says of each."""

from functools import cache

import pytest

import rollout_corr as rc
from lab.engine import page, recorded
from lab.engine.verdicts import ACCEPTED, HEALTHY, arguments, diagnose, outcome, verdict

CASES = [(model, mode) for mode in ACCEPTED for model in (["moe"] if mode.startswith("moe") else ["flat", "peaky"])]
dumps = cache(recorded.read)


def shown(model, mode):
    """What README.md shows of a mode: its cells of that model, "moe" with the flat one."""
    row = page.PAGE.read_text(encoding="utf-8").partition(f"| `{mode}` |")[2].partition("\n")[0]
    return row.split(" | ")[4 if model == "peaky" else 2].strip("*| ")


# Neighbors share nearly all of their code: `make test` has one in three.
@pytest.mark.parametrize(
    ("model", "mode"), [pytest.param(*case, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, case in enumerate(CASES, 1)]
)
def test_doctor_names_the_cause(model, mode):
    diagnosis = diagnose(dumps(model)[mode])
    said, judged = verdict(diagnosis), outcome(mode, diagnosis)
    assert judged != "wrong", (said, ACCEPTED[mode])
    told = said if judged != "too small" else judged
    assert told == shown(model, mode), "README.md is older than doctor: PYTHONPATH=tests:. python -m lab.engine.page"


@pytest.mark.parametrize(("model", "mode"), [case for case in CASES if ACCEPTED[case[1]] == HEALTHY])
def test_healthy_modes_raise_no_warning(model, mode):
    given = arguments(dumps(model)[mode])
    out = rc.correct(given["train_logp"], given["rollout_logp"], given["batch"], spec=rc.Spec())
    assert out.warnings() == []

"""What warnings(), doctor and tiles say of a small training loop, healthy and with planted bugs; docs/doctor.md."""

from __future__ import annotations

import re

import pytest
import torch

from builders import judged
from builders.diagnose_cases import causes_of
from builders.planted_dumps import Model
from builders.planted_loop import BUGS
from builders.small_loop import Loop

pytestmark = pytest.mark.usefixtures("one_thread")

# Cheap ones of every family; the slow test has the others.
SOME = {
    "mask forgotten, padding 0 on both sides",
    "prompt in the mask",
    "engine one late",
    "temperature in the engine alone",
    "top-p",
    "weights not loaded",
    "negative log-likelihoods",
    "NaN in the engine",
}


def rows_of_the_page():
    text = judged.PAGE.read_text(encoding="utf-8").partition(judged.BEGIN)[2].partition(judged.END)[0]
    return {row[0]: row for row in (re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if line[:1] == "|")}


@pytest.fixture(scope="module")
def loop():
    return Loop(seed=5, lessons=30, steps=1)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4"])
def test_nobody_complains_of_a_healthy_engine(loop, kind):
    loop.generator.manual_seed(1)
    assert judged.judge(loop.healthy(kind)).alarms == {}


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.name in SOME], ids=lambda bug: bug.name)
def test_a_bug_of_full_size_is_named(loop, bug):
    loop.generator.manual_seed(1)
    with torch.no_grad():
        verdict = judged.judge(bug.make(loop, bug.sizes[-1]))
    assert verdict.outcome(bug) == "named", verdict
    # Nobody calls it healthy who can see it.
    assert verdict.warnings
    assert "alarm" in verdict.tiles.values() or "healthy" not in verdict.tiles.values(), verdict.tiles


def test_the_page_has_every_engine_and_every_bug():
    rows = rows_of_the_page()
    assert rows["all"][1:] == [str(len(judged.HEALTHY) * judged.BATCHES), "0", "0", "0"]
    for bug in BUGS:
        name, column = (f"{bug.name} ({bug.blind})", 4) if bug.blind else (bug.name, 2)
        assert re.search(rf"{re.escape(judged.said(bug.sizes[-1]))}(,|$)", rows[name][column]), bug.name


@pytest.mark.slow
def test_the_page_is_true():
    """No false alarm, and every bug of full size is named; other sizes may hang on how a CPU rounds."""
    assert [one for one in ((name, judged.judge(x).alarms) for name, x in judged.healthy_batches(2)) if one[1]] == []
    for flavor, bug, size, columns in judged.planted():
        if size == bug.sizes[-1]:
            assert judged.judge(columns).outcome(bug) == ("silent" if bug.blind else "named"), (flavor, bug.name)


def test_sure_tokens_under_a_temperature_are_no_multiples():
    """In a tenth of the sequences one side is a multiple of the other, by factors of 0.8 to 1.5."""
    model = Model(sequences=120, median=20, sure=2.8)
    rollout = model.engine.log_softmax(1)
    columns = model.columns(model.sample(rollout), (model.logits / 0.7).log_softmax(1), rollout)
    assert causes_of(columns)[:1] == ["temperature"]


def test_sequences_with_one_unsure_token_are_not_swapped():
    """Sequences whose unsure tokens stand at one place correlate by 0.95, whoever they are."""
    generator = torch.Generator().manual_seed(0)
    rollout, train = -0.05 * torch.rand(2, 64, 32, generator=generator)
    row = torch.arange(64)
    rollout[row, 5 * (row % 4)] -= 4.0
    train[row, 5 * ((row + 1) % 4)] -= 4.0
    train[row, torch.randint(16, 32, (64,), generator=generator)] -= 1.3
    assert "swapped" not in causes_of({"train_logp": train, "rollout_logp": rollout})

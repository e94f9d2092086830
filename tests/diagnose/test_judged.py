"""What warnings(), doctor and tiles say of a small training loop, healthy and with planted bugs; docs/mismatch.md."""

from __future__ import annotations

import pytest
import torch

from builders import judged
from builders.planted_loop import BUGS
from builders.small_loop import Loop

pytestmark = pytest.mark.usefixtures("one_thread")

# Cheap ones of every family.
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


@pytest.fixture(scope="module")
def loop():
    return Loop(seed=5, lessons=30, steps=1)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_nobody_complains_of_a_healthy_engine(loop, kind):
    loop.generator.manual_seed(1)
    assert judged.judge(loop.healthy(kind)).alarms == {}


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.name in SOME], ids=lambda bug: bug.name)
def test_a_bug_of_full_size_is_named(loop, bug):
    loop.generator.manual_seed(1)
    with torch.no_grad():
        verdict = judged.judge(bug.make(loop, bug.sizes[-1]))
    assert verdict.outcome(bug) == "named", verdict

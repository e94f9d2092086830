"""Random calls on plain torch, in every way to run it, judged by the plain loops of tests/oracles."""

from __future__ import annotations

import pytest

from builders import judges
from frozen.generator import SURROGATES, UNITS
from frozen.runners import run_as

pytestmark = pytest.mark.usefixtures("one_thread")

WAYS = ("blocks", "small blocks", "whole")
# `make test-all` has as many again, twenty times.
BLOCKS = [*range(6), *(pytest.param(block, marks=pytest.mark.slow) for block in range(6, 120))]
ROUNDS = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 20))]


@pytest.mark.parametrize("block", BLOCKS)
def test_corrections(block):
    for seed in range(20 * block, 20 * block + 20):
        call = judges.correction(f"judged {seed}")
        given = call.digest()
        with run_as(WAYS[seed % 3]):
            judges.judge_correction(call, call.corrected(call.spec, "torch"))
        assert call.digest() == given, "inputs are left as they are"


@pytest.mark.parametrize("number", ROUNDS)
@pytest.mark.parametrize("name", SURROGATES)
def test_losses(name, number):
    for seed in range(20 * number, 20 * number + 20):
        with run_as(WAYS[seed % 3]):
            judges.judge_loss(judges.loss(f"judged {name} {seed}", name, seed % 2 == 1), "torch")


@pytest.mark.parametrize("number", ROUNDS)
@pytest.mark.parametrize("name", SURROGATES)
def test_steps(name, number):
    """A Spec inside of a loss."""
    for seed in range(20 * number, 20 * number + 20):
        with run_as(WAYS[seed % 3]):
            judges.judge_loss(judges.loss(f"step {name} {seed}", name, seed % 2 == 1, UNITS), "torch")

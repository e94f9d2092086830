"""Random calls on the kernels, between fences, judged by the plain loops of tests/oracles.

Interpreted on a CPU, compiled on a GPU. `backend="triton"` never falls back, so whatever passes here has run a kernel.
"""

from __future__ import annotations

import pytest

from builders import judges
from builders.kernel_cases import FEW, INTERPRETED, MIDDLE, NARROW, WIDE, shaped, unchecked, watched
from frozen.generator import SURROGATES

pytestmark = INTERPRETED

SHAPES = (FEW, NARROW, MIDDLE, WIDE)
UNITS = ("token", "sequence", "sequence", "turn")
# A call takes a sixth of a second; `make test-all` has as many again, twenty times.
BLOCKS = [*range(4), *(pytest.param(block, marks=pytest.mark.slow) for block in range(4, 80))]
ROUNDS = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 20))]


@pytest.mark.parametrize("block", BLOCKS)
def test_corrections(block, device):
    for seed in range(6 * block, 6 * block + 6):
        call = judges.for_kernels(
            lambda text, seed=seed: judges.correction(text, UNITS[seed % 2 :]), f"interpreted {seed}"
        )
        call = judges.between_fences(call, device)
        with shaped(SHAPES[seed % 4]), unchecked(), watched(seed=seed):
            judges.judge_correction(call, call.corrected(call.spec, "triton"))


def judge_loss(seed, device, name, *units):
    """Judge a loss that the kernels take, with a Spec over some units or without one."""
    call = judges.for_kernels(lambda text: judges.loss(text, name, seed % 2 == 1, *units), f"interpreted {name} {seed}")
    with shaped(SHAPES[seed % 4]), unchecked(), watched(seed=seed):
        judges.judge_loss(judges.between_fences(call, device), "triton")


# Averages of two ratios and contrasts of groups run on plain torch.
NAMES = [name for name in SURROGATES if name not in ("AveragePPO", "REAL")]


@pytest.mark.parametrize("number", ROUNDS)
@pytest.mark.parametrize("name", NAMES)
def test_losses(name, number, device):
    # REC masks tokens in three ways, and weighs them in two of two kinds.
    some = 24 if name == "REC" else 6
    for seed in range(some * number, some * number + some):
        judge_loss(seed, device, name)


@pytest.mark.parametrize("number", ROUNDS)
@pytest.mark.parametrize("name", NAMES)
def test_steps(name, number, device):
    """A Spec inside of a loss: in one pass, in two, or as a correction and a loss."""
    for seed in range(3 * number, 3 * number + 3):
        judge_loss(seed, device, name, UNITS[seed % 2 :])

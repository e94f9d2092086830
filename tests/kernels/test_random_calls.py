"""Random calls on the kernels, between fences, judged by the plain loops of tests/oracles.

Interpreted on a CPU, compiled on a GPU. `backend="triton"` never falls back, so whatever passes here has run a kernel.
"""

from __future__ import annotations

import pytest
import torch

from builders import judges
from builders.kernel_cases import FEW, INTERPRETED, MIDDLE, NARROW, WIDE, shaped, unchecked, watched
from frozen.generator import SURROGATES
from rollout_corr.backends.loss_task import beyond_kernels

pytestmark = INTERPRETED

SHAPES = (FEW, NARROW, MIDDLE, WIDE)
UNITS = ("token", "sequence", "sequence", "turn")
# A call takes a sixth of a second; `make test-all` has as many again, twenty times.
BLOCKS = [*range(4), *(pytest.param(block, marks=pytest.mark.slow) for block in range(4, 80))]
ROUNDS = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 20))]


def runs_on_kernels(call):
    """Whether a call computes below float64, which is left to plain torch."""
    return call.drawn.computes != torch.float64


@pytest.mark.parametrize("block", BLOCKS)
def test_corrections(block, device):
    for seed in range(6 * block, 6 * block + 6):
        drawn = (judges.correction(f"interpreted {seed} {i}", UNITS[seed % 2 :]) for i in range(99))
        call = judges.between_fences(next(one for one in drawn if runs_on_kernels(one)), device)
        with shaped(SHAPES[seed % 4]), unchecked(), watched(seed=seed):
            judges.judge_correction(call, call.corrected(call.spec, "triton"))


# Averages of two ratios and contrasts of groups run on plain torch.
@pytest.mark.parametrize("number", ROUNDS)
@pytest.mark.parametrize("name", [name for name in SURROGATES if name not in ("AveragePPO", "REAL")])
def test_losses(name, number, device):
    # REC masks tokens in three ways, and weighs them in two of two kinds.
    some = 24 if name == "REC" else 6
    for seed in range(some * number, some * number + some):
        drawn = (judges.loss(f"interpreted {name} {seed} {i}", name, seed % 2 == 1) for i in range(99))
        call = next(
            one for one in drawn
            if runs_on_kernels(one) and beyond_kernels(one.loss.surrogate, "scale" in one.given) is None
        )  # fmt: skip
        with shaped(SHAPES[seed % 4]), unchecked(), watched(seed=seed):
            judges.judge_loss(judges.between_fences(call, device), "triton")

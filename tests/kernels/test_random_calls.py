"""Random calls on the kernels, between fences, judged by the plain loops of tests/oracles.

Interpreted on a CPU, compiled on a GPU. `backend="triton"` never falls back, so whatever passes here has run a kernel.
"""

from __future__ import annotations

import random

import pytest

import rollout_corr as rc
from builders import judges
from builders.kernel_cases import (
    FEW,
    INTERPRETED,
    MIDDLE,
    NARROW,
    REAL,
    WIDE,
    assert_loss_like_reference,
    between_fences,
    shaped,
    unchecked,
    watched,
)
from frozen.calls import loss_call
from frozen.cases import of_variant
from frozen.generator import SURROGATES, Layout
from lab.aot.step_variants import STEP_VARIANTS

pytestmark = INTERPRETED

SHAPES = (FEW, NARROW, MIDDLE, WIDE)
UNITS = ("token", "sequence", "sequence", "turn")
# A call takes a sixth of a second; `make test-all` has as many again, twenty times.
BLOCKS = [*range(8), *(pytest.param(block, marks=pytest.mark.slow) for block in range(8, 160))]
ROUNDS = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 20))]


def judge_correction(call, device, shapes, seed=0):
    call = between_fences(call, device)
    before = call.digest()
    with shaped(shapes), unchecked(), watched(seed=seed):
        judges.judge_correction(call, call.corrected(call.spec, "triton"))
    assert call.digest() == before, "the inputs are left as they are"


@pytest.mark.parametrize("block", BLOCKS)
def test_corrections(block, device):
    for seed in range(6 * block, 6 * block + 6):
        call = judges.for_kernels(
            lambda text, seed=seed: judges.correction(text, UNITS[seed % 2 :]), f"interpreted {seed}"
        )
        judge_correction(call, device, SHAPES[seed % 4], seed)


@pytest.mark.parametrize(("shape", "layout"), list(zip(REAL, ("gaps", "right", "packed"), strict=True)))
def test_real_tiles(shape, layout, device):
    """Of 512 and 256 tokens: sequences of a tile, of one token less and more."""
    of_batch = {"kind": (255, 256, 1, 1, 0, 257, 511), "layout": Layout(layout), "extras": 0.0}
    call = judges.for_kernels(lambda text: judges.correction(text, UNITS[:3], **of_batch), f"real tiles {layout}")
    judge_correction(call, device, ((0, shape[1]),))


def judge_loss(seed, device, name, *units):
    """Judge a loss that the kernels take, with a Spec over some units or without one."""
    call = judges.for_kernels(lambda text: judges.loss(text, name, seed % 2 == 1, *units), f"interpreted {name} {seed}")
    call = between_fences(call, device)
    before = call.digest()
    with shaped(SHAPES[seed % 4]), unchecked(), watched(seed=seed):
        judges.judge_loss(call, "triton")
    assert call.digest() == before, "the inputs are left as they are"


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


# Where NaN propagates the oracle has no sums: such a step is in test_step.py.
@pytest.mark.parametrize("name", [name for name in STEP_VARIANTS if name != "tis_propagate"])
def test_declared_steps(name, device):
    """Steps of variants that are compiled ahead of time: in one pass, and those that decide about sequences first."""
    call = of_variant(STEP_VARIANTS[name], "interpreted", (5, 1, 0, 26, 3))
    call = between_fences(call, device)
    with shaped(MIDDLE), unchecked(), watched():
        judges.judge_loss(call, "triton")


@pytest.mark.parametrize("number", [*range(5), *(pytest.param(n, marks=pytest.mark.slow) for n in range(5, 40))])
def test_losses_over_turns(number, device):
    """GSPO over turns, which has no oracle, as plain torch has it: its means, and terms that train by the token."""
    mean = (
        rc.Mean(),
        rc.Mean("sequence"),
        rc.Mean("sequence_sum", "kept"),
        rc.Mean("sequence", "rows"),
        rc.Mean("sum"),
    )
    kl = rc.KL("k3", 0.5, mean=rc.Mean("sequence", ("original", "rows")[number % 2])) if number > 2 else None
    loss = rc.Loss(rc.GSPO(0.05, 0.1, through=("sequence", "token")[number % 2], over="turn"), mean[number % 5], kl)

    def drawn(text):
        call = loss_call(random.Random(text), loss, None, "decoupled")
        call.drawn.batch["turns"] = call.drawn.laid.turn_offsets()
        return call

    call = judges.for_kernels(drawn, f"turns {number}")
    with shaped(SHAPES[number % 4]), unchecked(), watched(seed=number):
        assert_loss_like_reference(between_fences(call, device))

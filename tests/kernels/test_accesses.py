"""Races between programs in the interpreter: planted ones are found, and accesses that an atomic orders are none."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import rollout_corr as rc
from builders.accesses import observed
from builders.batches import lay_out
from builders.kernel_cases import (
    INTERPRETED,
    SEQUENCES,
    TOKENS,
    WIDE,
    assert_like_reference,
    batch,
    fitted,
    same_bits,
    shaped,
)
from builders.launches import launch_of
from builders.rounding import assert_near, near
from builders.turns import loss_of
from rollout_corr.kernels import partials

pytestmark = INTERPRETED


@triton.jit
def neighbors_kernel(out, x, n: tl.int64, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Write a tile, and read the element that lies so far behind it."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(x + at, at, mask=at < n)
    beside = at + SHIFT
    tl.store(out + at, tl.load(x + beside, mask=(beside >= 0) & (beside < n), other=0), mask=at < n)


@triton.jit
def last_adds_up_kernel(
    out, partials, counter, programs: tl.int64, SEM: tl.constexpr, EVERY: tl.constexpr, TILE: tl.constexpr
):
    """Write a partial result, count, and let the last program that counts add them up."""
    tl.store(partials + tl.program_id(0), tl.program_id(0).to(tl.float32))
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem=SEM)
    if EVERY or before == programs - 1:
        at = tl.arange(0, TILE)
        tl.store(out, tl.sum(tl.load(partials + at, mask=at < programs, other=0.0)))
        tl.store(counter, 0)


def neighbors(shift):
    return launch_of(
        neighbors_kernel,
        4,
        32,
        {
            "out": torch.zeros(32, dtype=torch.int32),
            "x": torch.zeros(32, dtype=torch.int32),
            "n": 32,
            "SHIFT": shift,
            "TILE": 8,
        },
    )


def adding_up(sem, every=False):
    return launch_of(
        last_adds_up_kernel,
        5,
        32,
        {
            "out": torch.zeros(1),
            "partials": torch.full((5,), torch.nan),
            "counter": torch.zeros(1, dtype=torch.int32),
            "programs": 5,
            "SEM": sem,
            "EVERY": every,
            "TILE": 8,
        },
    )


@pytest.mark.parametrize("seed", range(2))
def test_the_last_program_may_read_what_all_have_written(quick_interpreter, seed):
    with observed(seed):
        launch = adding_up("acq_rel")
        launch.run()
        assert launch.arguments["out"].item() == 10.0 and launch.arguments["counter"].item() == 0
        neighbors(0).run()


@pytest.mark.parametrize(
    ("launch", "found"),
    [
        (neighbors(1), r"neighbors_kernel: program (\d) (reads|writes) x\[(8|16|24)\], and program (?!\1)\d \w+ it"),
        (adding_up("relaxed"), r"program \d (reads|writes) partials\[\d\], and program \d \w+ it"),
        (adding_up("acq_rel", every=True), r"last_adds_up_kernel: program \d \w+ \w+\[\d\], and program \d \w+ it"),
    ],
    ids=["ahead", "relaxed", "every"],
)
def test_a_planted_race_is_found(quick_interpreter, launch, found):
    with observed(), pytest.raises(AssertionError, match=found):
        launch.run()


@pytest.mark.parametrize("spec", [TOKENS, SEQUENCES], ids=["tokens", "sequences"])
def test_no_bit_depends_on_the_order_of_programs(quick_interpreter, spec):
    sequences = batch(9)
    laid, results = lay_out(sequences, "packed", torch.float32), []
    for seed in (0, 1):
        with shaped(WIDE), observed(seed):
            results.append(laid.correct(fitted(spec, sequences), backend="triton"))
    assert same_bits(*results)


@pytest.mark.parametrize(
    ("spec", "surrogate"), [(TOKENS, rc.PPO()), (SEQUENCES, rc.GSPO(0.05, 0.1))], ids=["one pass", "two passes"]
)
def test_neighbors_add_up_many_rows(quick_interpreter, spec, surrogate, monkeypatch):
    """Rows of more programs than one group: those of `decide`, and of a loss."""
    monkeypatch.setattr(partials.ROW_GROUP, "value", 2)
    sequences = batch(9, (3, 1, 0, 5, 2) * 3)
    laid, found = lay_out(sequences, "packed", torch.float32), []
    spec = fitted(spec, sequences)
    given = {"surrogate": surrogate, "mean": rc.Mean("sequence")}
    for seed in (0, 1):
        with shaped(WIDE), observed(seed):
            found.append(laid.correct(spec, backend="triton"))
    assert_like_reference(found[0], laid.correct(spec))
    assert same_bits(*found)
    with shaped(WIDE), observed():
        loss, slope = loss_of(laid, "triton", **given)
    wanted, wanted_slope = loss_of(laid, "torch", **given)
    assert_near(loss.value, wanted.value, torch.float32)
    assert_near(slope, wanted_slope, torch.float32)
    assert loss.metrics() == near(wanted.metrics(), torch.float32)

"""Races between programs in the interpreter: planted ones are found, and accesses that an atomic orders are none."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from builders.accesses import observed
from builders.batches import lay_out
from builders.kernel_cases import INTERPRETED, SEQUENCES, TOKENS, WIDE, batch, fitted, same_bits, shaped
from builders.launches import launch_of

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


@triton.jit
def counting_kernel(counts, x, READS: tl.constexpr):
    """Count in a bin, without an order; then look at it, where asked to."""
    at = tl.load(x + tl.program_id(0))
    tl.atomic_add(counts + at, 1, sem="relaxed")
    if READS:
        tl.store(x + tl.program_id(0), tl.load(counts + at))


@triton.jit
def rank_kernel(out, counter):
    """Number the programs as they come."""
    tl.store(out + tl.program_id(0), tl.atomic_add(counter, 1))


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


def counting(reads):
    counted = {"counts": torch.zeros(4, dtype=torch.int32), "x": torch.tensor([1, 3, 1], dtype=torch.int32)}
    return launch_of(counting_kernel, 3, 32, {**counted, "READS": reads})


def ranks():
    return launch_of(
        rank_kernel,
        20,
        32,
        {"out": torch.zeros(20, dtype=torch.int32), "counter": torch.zeros(1, dtype=torch.int32)},
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_last_program_may_read_what_all_have_written(quick_interpreter, seed):
    with observed(seed):
        launch = adding_up("acq_rel")
        launch.run()
        assert launch.arguments["out"].item() == 10.0 and launch.arguments["counter"].item() == 0
        neighbors(0).run()
        counting(False).run()


@pytest.mark.parametrize(
    ("launch", "found"),
    [
        (neighbors(1), r"neighbors_kernel: program (\d) (reads|writes) x\[(8|16|24)\], and program (?!\1)\d \w+ it"),
        (neighbors(-1), r"neighbors_kernel: program (\d) (reads|writes) x\[(7|15|23)\], and program (?!\1)\d \w+ it"),
        (adding_up("relaxed"), r"program \d (reads|writes) partials\[\d\], and program \d \w+ it"),
        (adding_up("release"), r"program \d (reads|writes) partials\[\d\], and program \d \w+ it"),
        (adding_up("acquire"), r"program \d (reads|writes) partials\[\d\], and program \d \w+ it"),
        (adding_up("acq_rel", every=True), r"last_adds_up_kernel: program \d \w+ \w+\[\d\], and program \d \w+ it"),
        (counting(True), r"counting_kernel: program \d (reads|adds to) counts\[1\], and program \d (reads|adds to) it"),
    ],
    ids=["ahead", "behind", "relaxed", "release", "acquire", "every", "counts"],
)
def test_a_planted_race_is_found(quick_interpreter, launch, found):
    with observed(), pytest.raises(AssertionError, match=found):
        launch.run()


def test_an_access_beside_every_tensor_is_found(quick_interpreter):
    launch = counting(False)
    launch.arguments["x"][1] = 4
    with observed(), pytest.raises(Exception, match="counting_kernel: program 1 adds to bytes outside of every tensor"):
        launch.run()


def test_programs_run_in_the_order_of_the_seed(quick_interpreter):
    """The counter before each program's own addition is its place in the order."""
    orders = []
    for seed in (0, 0, 1):
        launch = ranks()
        with observed(seed):
            launch.run()
        orders.append(launch.arguments["out"].tolist())
    assert orders[0] == orders[1] != orders[2] and sorted(orders[2]) == list(range(20))
    assert list(range(20)) not in orders


@pytest.mark.parametrize("spec", [TOKENS, SEQUENCES], ids=["tokens", "sequences"])
def test_no_bit_depends_on_the_order_of_programs(quick_interpreter, spec):
    sequences = batch(9)
    laid, results = lay_out(sequences, "packed", torch.float32), []
    for seed in (0, 1, 2):
        with shaped(WIDE), observed(seed):
            results.append(laid.correct(fitted(spec, sequences), backend="triton"))
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])

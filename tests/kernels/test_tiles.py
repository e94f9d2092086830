"""Tiles by the size of a batch, caps of registers, shares of what is zeroed, and crowds of empty sequences."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import triton

import rollout_corr as rc
from aot.ahead_of_time import TARGETS
from aot.loss_variants import LOSS_VARIANTS
from aot.variants import VARIANTS
from builders.batches import lay_out, random_sequences
from builders.kernel_cases import INTERPRETED, bits, check, fitted, over, shaped
from rollout_corr.kernels import grid
from rollout_corr.kernels.correct.read import moves
from rollout_corr.kernels.grid import SHAPES, Shape, grid_for, tile_for

pytestmark = INTERPRETED

# Options of a kernel of one warp without a cap.
PLAIN = {"num_warps": 1, "enable_fp_fusion": True}
LONGEST, LONG, SHORT = (shape for _, shape in SHAPES)


@pytest.mark.parametrize(
    ("tokens", "shape", "tile"),
    [
        (0, LONG, 512), (1 << 15, LONG, 512), (1 << 20, LONG, 512), ((1 << 20) + 2048, LONG, 1024),
        (1 << 22, LONG, 2048), (1 << 40, LONG, 2048), (1 << 15, SHORT, 256), (1 << 19, SHORT, 256),
        (1 << 22, LONGEST, 2048),
    ],
)  # fmt: skip
def test_small_batches_have_short_tiles(tokens, shape, tile):
    """So that 32,768 tokens are more than 16 programs; in float64 a sum of D is plain, and its tile is always one."""
    assert 1 << tile_for(tokens, shape, double=False) == tile
    assert tile_for(tokens, shape, double=True) == 11


def test_a_tile_decides_nothing():
    """Weights, masks and `keep` have the same bits whatever the tile, and the number of programs is as asked for."""
    sequences = random_sequences(4, (40, 0, 3, 50), advantages=None, external=False)
    spec = fitted(rc.Spec(rc.Weight.geometric(lower=0.5, upper=1.5), (over("k3", "mean"),), "both"), sequences)
    laid = lay_out(sequences, "packed_gaps", torch.float32)
    shape = Shape(tile=128, lanes=4, sequences=8, chunk=2, parts=2, least=32)
    found = []
    for programs, tile in ((1, 128), (1 << 20, 32)):
        with shaped(((0, replace(shape)),)), mock.patch.object(grid, "PROGRAMS", programs):
            of = grid_for(len(sequences), None, [laid.train], 4)
            assert 1 << of.tile_bits == tile and of.token_programs == of.tokens // tile + 1
            out = laid.correct(spec, backend="triton")
        found.append([bits(x) for x in (out.weights, out.mask, out.keep)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("layout", ["packed_gaps", pytest.param("padded_left", marks=pytest.mark.slow)])
def test_programs_share_what_is_zeroed(layout):
    """Several programs come to one decision; each zeroes its part, and one alone reports."""
    sequences = random_sequences(5, (600, 0, 20), invalid=0.1, advantages=None, external=False)
    spec = rc.Spec(rc.Weight.token(upper=1.5), (over("abs", "mean", upper=1e-30),), "both")
    few = mock.patch.multiple(grid, MOST_ZEROED=8, SHARE=64)
    with few, shaped(((0, replace(LONG, sequences=2, tile=512, least=0)),)):
        laid = lay_out(sequences, layout, torch.float32)
        width = None if laid.cu_seqlens is not None else laid.train.shape[1]
        assert grid_for(len(sequences), width, [laid.train], 4).shares > 1
        out, _ = check(sequences, spec, layout, "cpu")
    assert not out.weights.any() and not out.mask.any()


def test_few_long_sequences_have_many_programs():
    """One sequence of four million tokens is not zeroed by one program; a thousand of 4,096 need no help."""
    meta = torch.empty(1 << 22, device="meta")
    one = grid_for(1, None, [meta], 4)
    assert one.sequence_programs * one.shares * grid.SHARE >= 1 << 22
    assert grid_for(1024, None, [meta], 4).shares == 1


def test_a_crowd_of_empty_sequences():
    """More in one place than a step of the search looks at: before, between and behind others."""
    lengths = (0,) * 520 + (9, 30) + (0,) * 3 + (1,)
    sequences = random_sequences(0, lengths, advantages=None, external=False)
    with shaped(((0, replace(SHORT, tile=16, least=0, lanes=4, sequences=256)),)):
        check(sequences, rc.Spec(), "packed_gaps", "cpu")


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("metrics_packed", 128), ("token_bf16", 128), ("skyrl.tldr", 128), ("product_geometric_padded", None),
        ("xtuner.agentic", 128), ("full_packed", 168), ("token_unaligned", 128), ("token_fp64", None),
        ("geometric_mixed", None),
    ],
)  # fmt: skip
def test_registers_are_capped_where_that_spills_nothing(name, most):
    """16 warps of a multiprocessor, or 12; the compiler's choice elsewhere, on AMD, and over sequences."""
    read, decide, *apply = VARIANTS[name].launches()
    assert read.options(32, nvidia=True).get("maxnreg") == most
    assert "maxnreg" not in decide.options(32, nvidia=True)
    assert all(launch.options(32, nvidia=True).get("maxnreg") == most for launch in apply)
    assert read.options(64, nvidia=False) == PLAIN


@pytest.mark.parametrize(
    ("name", "stays"),
    [("late_after_tokens", True), ("skyrl.tldr", False), ("geometric_mixed", False), ("xtuner.agentic", False),
     ("metrics_packed", False)],
)  # fmt: skip
def test_a_branch_where_sums_over_tokens_kept_wait_for_ends_of_sequences(name, stays):
    """In packed batches on NVIDIA, and with no weights of sequences: elsewhere it costs more than it saves."""
    arguments = VARIANTS[name].launches()[0].arguments
    plan, tiling = arguments["PLAN"], arguments["TILING"]
    assert moves(plan, tiling) == (not stays)
    assert moves(plan, replace(tiling, lanes=64))


@pytest.mark.parametrize("layout", ["packed_gaps", "padded_right"])
@pytest.mark.parametrize("weight", [None, rc.Weight.token(upper=1.5)])
def test_d_rounded_once_for_both_its_sums(weight, layout):
    """A token criterion drops tokens, and the mean over the rest decides; with no weights, or with those of tokens."""
    sequences = random_sequences(3, (90, 0, 20, 41, 7), invalid=0.1, advantages=None, external=False)
    criteria = (rc.Criterion("abs", upper=0.2, drop="token"), over("ratio", "mean", lower=0.97, upper=1.03))
    check(sequences, rc.Spec(weight, criteria, "both", sums_over="kept"), layout, "cpu")


@pytest.mark.parametrize("name", ["ppo_packed", "gspo_padded"])
def test_registers_of_a_loss_are_the_compiler_s(name):
    assert all(launch.options(32, nvidia=True) == PLAIN for launch in LOSS_VARIANTS[name].launches())


@pytest.mark.parametrize(("name", "tokens"), [("ppo_fp64", 2), ("gspo_fp64", 4), ("ppo_packed", 4)])
def test_tokens_of_float64_are_half_as_many_where_no_sum_decides(name, tokens):
    """What GSPO writes hangs on float64 sums of sequences, whose order is that of the tokens of a thread."""
    tiling = LOSS_VARIANTS[name].launches()[0].arguments["TILING"]
    assert tiling.parts * tiling.vec == tokens


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_environment_does_not_decide_what_is_contracted(target, monkeypatch):
    """TRITON_DEFAULT_FP_FUSION=0 would change bits; Triton 3.9 warns about a kernel that leaves it to that."""
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    backend = triton.compiler.make_backend(TARGETS[target])
    for launch in VARIANTS["metrics_packed"].launches():
        options = launch.options(TARGETS[target].warp_size, nvidia=target == "sm_90")
        assert backend.parse_options(options).enable_fp_fusion

"""Tiles by the size of a batch, caps of registers, shares of what is zeroed, and crowds of empty sequences."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import triton

import rollout_corr as rc
from builders.batches import lay_out, random_sequences
from builders.kernel_cases import (
    INTERPRETED,
    SEQUENCES,
    TOKENS,
    WIDE,
    assert_like_reference,
    batch,
    bits,
    check,
    fitted,
    over,
    same_bits,
    shaped,
    shuffled,
)
from builders.rounding import assert_near, near
from builders.turns import loss_of
from lab.aot.ahead_of_time import TARGETS
from lab.aot.variants import VARIANTS
from rollout_corr.kernels import grid, partials
from rollout_corr.kernels.grid import SHAPES, Shape, grid_for, tile_for

pytestmark = INTERPRETED

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
    """So that 32,768 tokens are more than 16 programs."""
    assert 1 << tile_for(tokens, shape) == tile


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


def test_programs_share_what_is_zeroed():
    """Several programs come to one decision; each zeroes its part, and one alone reports."""
    sequences = random_sequences(5, (600, 0, 20), invalid=0.1, advantages=None, external=False)
    spec = rc.Spec(rc.Weight.token(upper=1.5), (over("abs", "mean", upper=1e-30),), "both")
    few = mock.patch.multiple(grid, MOST_ZEROED=8, SHARE=64)
    with few, shaped(((0, replace(LONG, sequences=2, tile=512, least=0)),)):
        laid = lay_out(sequences, "packed_gaps", torch.float32)
        assert grid_for(len(sequences), None, [laid.train], 4).shares > 1
        out, _ = check(sequences, spec, "packed_gaps", "cpu")
    assert not out.weights.any() and not out.mask.any()


@pytest.mark.parametrize(("layout", "weight"), [("packed_gaps", None), ("padded_right", rc.Weight.token(upper=1.5))])
def test_d_rounded_once_for_both_its_sums(weight, layout):
    """A token criterion drops tokens, and the mean over the rest decides; with no weights, or with those of tokens."""
    sequences = random_sequences(3, (90, 0, 20, 41, 7), invalid=0.1, advantages=None, external=False)
    criteria = (rc.Criterion("abs", upper=0.2, drop="token"), over("ratio", "mean", lower=0.97, upper=1.03))
    check(sequences, rc.Spec(weight, criteria, "both", sums_over="kept"), layout, "cpu")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_environment_does_not_decide_what_is_contracted(target, monkeypatch):
    """TRITON_DEFAULT_FP_FUSION=0 would change bits; Triton 3.9 warns about a kernel that leaves it to that."""
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    backend = triton.compiler.make_backend(TARGETS[target])
    for launch in VARIANTS["metrics_packed"].launches():
        options = launch.options(TARGETS[target].warp_size, nvidia=target == "sm_90")
        assert backend.parse_options(options).enable_fp_fusion


@pytest.mark.parametrize(
    ("spec", "surrogate"), [(TOKENS, rc.PPO()), (SEQUENCES, rc.GSPO(0.05, 0.1))], ids=["one pass", "two passes"]
)
def test_neighbors_add_up_many_rows_in_any_order(quick_interpreter, spec, surrogate, monkeypatch):
    """Rows of more programs than one group: those of `decide`, and of a loss; no bit depends on who comes first."""
    monkeypatch.setattr(partials.ROW_GROUP, "value", 2)
    sequences = batch(9, (3, 1, 0, 5, 2) * 2)
    laid, found = lay_out(sequences, "packed", torch.float32), []
    spec = fitted(spec, sequences)
    given = {"surrogate": surrogate, "mean": rc.Mean("sequence")}
    for seed in (0, 1):
        with shaped(WIDE), shuffled(seed):
            found.append(laid.correct(spec, backend="triton"))
    assert_like_reference(found[0], laid.correct(spec))
    assert same_bits(*found)
    with shaped(WIDE), shuffled(0):
        loss, slope = loss_of(laid, "triton", **given)
    wanted, wanted_slope = loss_of(laid, "torch", **given)
    assert_near(loss.value, wanted.value, torch.float32)
    assert_near(slope, wanted_slope, torch.float32)
    assert loss.metrics() == near(wanted.metrics(), torch.float32)

"""Tiles by the size of a batch, caps of registers, shares of what is zeroed, and crowds of empty sequences."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import triton

import rollout_corr as rc
from builders.kernel_cases import (
    INTERPRETED,
    WIDE,
    assert_loss_like_reference,
    between_fences,
    bits,
    check,
    given,
    same_bits,
    shaped,
    shuffled,
)
from lab.aot.ahead_of_time import TARGETS
from lab.aot.variants import VARIANTS
from rollout_corr.kernels import grid, partials
from rollout_corr.kernels.grid import SHAPES, Shape, grid_for, tile_for

pytestmark = INTERPRETED

C = rc.Criterion
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


def drawn(spec, *lengths, packed=True):
    """A call of sequences of some lengths, packed between other tokens, or in rows."""
    generator, s = torch.Generator().manual_seed(0), len(lengths)
    shape = (5 + sum(lengths),) if packed else (s, max(lengths) + 2)
    rollout = -torch.rand(shape, generator=generator)
    train = rollout + 0.3 * torch.randn(shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.9
    if not packed:
        mask &= torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    batch = {"cu_seqlens": 3 + torch.tensor([0, *lengths]).cumsum(0)} if packed else {}
    return given(spec, train, rollout, torch.where(mask, 0.5, -1.0), mask=mask, **batch)


def test_a_tile_decides_nothing():
    """Weights, masks and `keep` have the same bits whatever the tile, and the number of programs is as asked for."""
    k3 = C("k3", "sequence", "mean", upper=0.02)
    call = drawn(rc.Spec(rc.Weight.geometric(lower=0.95, upper=1.05), (k3,), "both"), 40, 0, 3, 50)
    shape = Shape(tile=128, lanes=4, sequences=8, chunk=2, parts=2, least=32)
    found = []
    for programs, tile in ((1, 128), (1 << 20, 32)):
        with shaped(((0, replace(shape)),)), mock.patch.object(grid, "PROGRAMS", programs):
            of = grid_for(4, None, [call.drawn.tensors["train"]], 4)
            assert 1 << of.tile_bits == tile and of.token_programs == of.tokens // tile + 1
            out = call.corrected(call.spec, "triton")
        found.append([bits(x) for x in (out.weights, out.mask, out.keep)])
    assert all(map(torch.equal, *found)) and 0 < out.keep.sum() < 4


def test_programs_share_what_is_zeroed():
    """Several programs come to one decision; each zeroes its part, and one alone reports."""
    rejects = C("abs", "sequence", "mean", upper=1e-30)
    call = drawn(rc.Spec(rc.Weight.token(upper=1.5), (rejects,), "both"), 600, 0, 20)
    shapes = ((0, replace(LONG, sequences=2, tile=512, least=0)),)
    with mock.patch.multiple(grid, MOST_ZEROED=8, SHARE=64):
        with shaped(shapes):
            assert grid_for(3, None, [call.drawn.tensors["train"]], 4).shares > 1
        out, _ = check(call, shapes=shapes)
    assert not out.weights.any() and not out.mask.any()


@pytest.mark.parametrize(("packed", "weight"), [(True, None), (False, rc.Weight.token(upper=1.5))])
def test_d_rounded_once_for_both_its_sums(packed, weight):
    """A token criterion drops tokens, and the mean over the rest decides; with no weights, or with those of tokens."""
    criteria = C("abs", upper=0.2, drop="token"), C("ratio", "sequence", "mean", lower=0.99, upper=1.01)
    out, _ = check(drawn(rc.Spec(weight, criteria, "both", sums_over="kept"), 90, 0, 20, 41, 7, packed=packed))
    assert 0 < out.keep.sum() < 5


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_environment_does_not_decide_what_is_contracted(target, monkeypatch):
    """TRITON_DEFAULT_FP_FUSION=0 would change bits; Triton 3.9 warns about a kernel that leaves it to that."""
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    backend = triton.compiler.make_backend(TARGETS[target])
    for launch in VARIANTS["metrics_packed"].launches():
        options = launch.options(TARGETS[target].warp_size, nvidia=target == "sm_90")
        assert backend.parse_options(options).enable_fp_fusion


@pytest.mark.parametrize("surrogate", [rc.PPO(), rc.GSPO(0.05, 0.1)], ids=["one pass", "two passes"])
def test_neighbors_add_up_many_rows_in_any_order(quick_interpreter, surrogate, monkeypatch):
    """Rows of more programs than one group: those of `decide`, and of a loss; no bit depends on who comes first."""
    monkeypatch.setattr(partials.ROW_GROUP, "value", 2)
    criteria = C("k1", lower=0.1, upper=1.0), C("abs", "sequence", "sum", upper=1.0, when="outward", drop="token")
    call = drawn(rc.Spec(rc.Weight.token(lower=0.8, upper=1.2), criteria, "both"), *(3, 1, 0, 5, 2) * 2)
    found = [check(call, shapes=WIDE)[0]]
    for seed in (1, 2):
        with shaped(WIDE), shuffled(seed):
            found.append(call.corrected(call.spec, "triton"))
    assert same_bits(*found[:2]) and same_bits(*found[1:])
    call.spec, call.loss = None, rc.Loss(surrogate, rc.Mean("sequence"))
    call.drawn.tensors["new"] = call.drawn.tensors["rollout"]
    with shaped(WIDE), shuffled(0):
        assert_loss_like_reference(between_fences(call, "cpu"))

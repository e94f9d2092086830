"""Corrections that random calls do not draw: batches of nothing, odd masks, dtypes of callers, old versions."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import INTERPRETED, bits, check, fenced, given

pytestmark = INTERPRETED

C, W = rc.Criterion, rc.Weight
NOTHING = rc.Spec(
    W.geometric(lower=0.5, upper=2.0, normalize="batch"),
    (C("ratio", "sequence", "max", upper=1.0), C("k3", "sequence", "mean", upper=1.0), C("tv", upper=1.0)),
    "both",
)


@pytest.mark.parametrize(("begin", "outside"), [(0, 8), (1, 9)])
def test_tokens_behind_the_last_sequence_of_one_tile_are_counted(begin, outside, device):
    """Of a batch that begins with its first sequence, the part of the tile before it has no slot."""
    x = -torch.rand(148, device=device)
    found = rc.correct(x, x - 0.01, cu_seqlens=torch.tensor([begin, 37, 140]), backend="triton").metrics()
    assert (found["tokens_outside"], found["tokens"]) == (outside, 148 - outside)


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [((0, 0), None), ((0, 7), None), ((3, 0), None), ((1, 1), None), ((0,), [0]), ((9,), [5]), ((9,), [2, 2, 2])],
)
def test_sizes_of_zero(shape, offsets, device):
    """No rows, no columns, no tokens; no sequence at all, which leaves every token outside; nothing valid."""
    x, offsets = torch.zeros(shape), {} if offsets is None else {"cu_seqlens": torch.tensor(offsets)}
    for mask in (None, torch.ones(shape), torch.zeros(shape)):
        out, _ = check(given(NOTHING, x, x, mask=mask, **offsets), device)
        assert all(out.keep.tolist()) and all(math.isfinite(value) for value in out.metrics().values())


# --- masks ---


@pytest.mark.parametrize("rejected", ["mask", "both"])
def test_odd_masks(rejected, device):
    """A bool whose byte is 2, a mask value that is NaN or a denormal number, a 0 with a sign."""
    train, rollout = torch.tensor([[-1.0, -2.0, -0.5, -9.0]] * 3), torch.full((3, 4), -1.0)
    spec = rc.Spec(W.token(upper=2.0), (C("abs", upper=2.0),), rejected)
    byte = torch.tensor([[0, 1, 2, 2], [255, 0, 2, 1], [2, 2, 0, 128]], dtype=torch.uint8).view(torch.bool)
    odd = torch.tensor([[math.nan, -0.0, 0.0, math.nan], [-1.0, math.inf, 1e-45, 0.3], [0.0, -0.0, -math.inf, 1.0]])
    for mask in (byte, odd, odd.double(), odd.bfloat16()):
        reference = rc.correct(train, rollout, mask=mask, spec=spec)
        here = fenced([train, rollout, mask], device)
        out = rc.correct(*here[:2], mask=here[2], spec=spec, backend="triton")
        assert out.mask.dtype == mask.dtype
        assert out.weights.cpu().ne(0).tolist() == reference.weights.ne(0).tolist()
        # As bytes: what is kept comes back as it was given, what is not as a plain 0. torch.where of torch 2.11 makes a
        # bool of 2 one of 1.
        kept = bits(reference.mask).view(mask.shape) != 0 if mask.dtype == torch.bool else reference.mask != 0
        expected = bits(mask).view(*mask.shape, -1) * kept[..., None]
        assert torch.equal(bits(out.mask.cpu()), expected.flatten())


@pytest.mark.parametrize("offsets", [None, [0, 9, 9, 60], [5, 9, 50, 60]])
def test_tokens_that_are_dropped_without_a_mask(offsets, device):
    """Early, and late; the mask that comes back is bool, and False at what belongs to no sequence."""
    train = torch.linspace(0.0, 0.6, 60) * torch.randn(60, generator=torch.Generator().manual_seed(0)) - 1.0
    train, batch = (train.view(3, 20), {}) if offsets is None else (train, {"cu_seqlens": torch.tensor(offsets)})
    for criterion in (C("abs", upper=0.3), C("abs", "sequence", "mean", upper=0.2, drop="token")):
        out, _ = check(given(rc.Spec(W.token(), (criterion,), "both"), train, train * 0.0 - 1.0, **batch), device)
        assert out.mask.dtype == torch.bool and 0 < out.mask.sum() < 60


# --- dtypes ---


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.int64, (3, 9)), (torch.bfloat16, (3,)), (torch.float64, (3, 1))], ids=str
)
def test_dtypes_of_advantages_and_of_external_values(dtype, shape, device):
    generator = torch.Generator().manual_seed(0)
    train, external = -torch.rand(3, 9, generator=generator), torch.randint(-3, 4, (3, 9), generator=generator)
    advantages = (torch.arange(math.prod(shape)) % 3 - 1).view(shape)
    criteria = (
        C("abs", upper=0.3, when="outward"), C("k2", "sequence", "mean", upper=0.01, when="negative_advantage"),
        C("external", "sequence", "mean", name="entropy", upper=0.2),
    )  # fmt: skip
    call = given(
        rc.Spec(criteria=criteria), train, train * 0.7, advantages.to(dtype), external={"entropy": external.to(dtype)}
    )
    out, _ = check(call, device)
    assert 0 < out.mask.sum() < 27


@pytest.mark.parametrize("offsets", [None, [2, 7, 20, 25]])
def test_ages_of_tokens_and_of_sequences(offsets, device):
    """Of versions that float64 would round, and of a filler."""
    x, far = torch.full((27,), -1.0), 2**60
    x, batch = (x.view(3, 9), {}) if offsets is None else (x, {"cu_seqlens": torch.tensor(offsets)})
    spec = rc.Spec(criteria=(C("age", upper=4), C("age", "sequence", "mean", upper=4)))
    of_tokens = (torch.arange(27) // 4).view(x.shape) + far
    of_tokens.view(-1)[12] = -(2**63)
    of_sequences = torch.tensor([3, 1, 7])
    for versions, current in ((of_tokens, far + 7), (of_sequences.to(torch.int16), 7), (of_sequences + far, far + 7)):
        out, _ = check(given(spec, x, x, versions=rc.Versions(versions, current), **batch), device)
        assert 0 < out.keep.sum() < 3

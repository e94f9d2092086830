"""Self-normalized weights: means of 1, means near 0, calls without sequences, and errors.

test_random_calls.py holds them against loops, test_invariance.py to the bit.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out, random_sequences, run_as
from builders.rounding import assert_near, margin, near
from builders.weights import weight_of

pytestmark = pytest.mark.usefixtures("one_thread")

CRITERIA = (rc.Criterion("ratio", lower=0.6), rc.Criterion("k3", over="sequence", reduce="mean", upper=0.09))


def test_means_are_1():
    generator = torch.Generator().manual_seed(1)
    train, rollout = (-torch.rand(12, 40, generator=generator) for _ in range(2))
    mask = torch.rand(12, 40, generator=generator) < 0.7
    by_sequence = rc.correct(train, rollout, mask=mask, spec=rc.Spec(rc.Weight.token(normalize="sequence"))).weights
    assert (by_sequence.double().sum(1) / mask.sum(1) - 1.0).abs().max() < margin(torch.float32)
    tokens = rc.correct(
        train, rollout, rc.Batch(mask=mask, groups=rc.Groups(size=4)), spec=rc.Spec(rc.Weight.token(normalize="group"))
    )
    sums = tokens.weights.double().view(3, -1).sum(1)
    assert (sums / mask.view(3, -1).sum(1) - 1.0).abs().max() < margin(torch.float32)
    # SNIS: the weight of a sequence over the sum of its group's, times their number.
    product = rc.correct(
        train,
        rollout,
        rc.Batch(mask=mask, groups=rc.Groups(size=4)),
        spec=rc.Spec(rc.Weight.product(normalize="group")),
    )
    ratio = torch.where(mask, train - rollout, 0.0).double().sum(1).exp().view(3, 4)
    expected = 4.0 * ratio / ratio.sum(1, keepdim=True)
    assert_near(product.weights.amax(1).double().view(3, 4), expected, torch.float32)


def test_a_mean_near_0_divides_nothing():
    d = torch.tensor([[-19.0, -19.5], [0.5, 0.0], [-18.0, -19.0], [-17.0, -17.0]])
    zeros = torch.zeros_like(d)
    found = rc.correct(d, zeros, spec=rc.Spec(rc.Weight.token(normalize="sequence")))
    assert torch.equal(found.weights[0], d[0].exp())
    assert (found.weights[1:].sum(1) - 2.0).abs().max() < margin(torch.float32)
    metrics = found.metrics()
    assert metrics["sequences_undivided"] == 1.0
    assert metrics["sequence_weight_divisor_max"] == near((math.exp(0.5) + 1.0) / 2.0, torch.float32)
    least = (math.exp(-18.0) + math.exp(-19.0)) / 2.0
    assert metrics["sequence_weight_divisor_min"] == near(least, torch.float32, size=0.0)
    every = rc.correct(
        d, zeros, rc.Batch(groups=rc.Groups(size=1)), spec=rc.Spec(rc.Weight.geometric(normalize="group"))
    ).weights
    assert every[:, 0].tolist() == [d[0].mean().exp().item(), 1.0, d[2].mean().exp().item(), 1.0]


@pytest.mark.parametrize("normalize", ["batch", "group", "sequence"])
@pytest.mark.parametrize("way", ["blocks", "whole"])
def test_tokens_of_no_sequence_alone_weigh_0(normalize, way):
    x, spec = torch.zeros(5), rc.Spec(rc.Weight.token(normalize=normalize), CRITERIA)
    with run_as(way):
        found = rc.correct(x, x, rc.Batch(cu_seqlens=torch.tensor([3]), groups=rc.Groups(size=2)), spec=spec)
    assert found.weights.tolist() == [0.0] * 5 and found.keep.shape == (0,)
    assert all(math.isfinite(value) for value in found.metrics().values())


def test_statistics_merge_over_micro_batches_of_whole_groups():
    spec = rc.Spec(rc.Weight.token(upper=2.0, normalize="group"), CRITERIA, "both")
    batch = random_sequences(5, (4, 3, 6, 2, 5, 1))
    laid = [lay_out(part, "packed") for part in (batch, batch[:2], batch[2:])]
    whole, *parts = [one.correct(spec, group_size=2) for one in laid]
    merged = rc.Statistics.sum(
        [rc.Statistics.nothing(spec, extra=whole.statistics.extra), *(p.statistics for p in parts)]
    )
    assert merged.metrics() == near(whole.metrics())
    assert torch.equal(torch.cat([p.weights for p in parts]), whole.weights)


def test_a_dry_run_and_a_call_without_sequences():
    spec = rc.Spec(rc.Weight.token(normalize="group"), apply=False)
    x = torch.zeros(2, 3)
    assert rc.correct(x, x, rc.Batch(groups=rc.Groups(size=2)), spec=spec).weights is None
    for shape in ((0, 3), (2, 0)):
        nothing = torch.zeros(shape)
        out = rc.correct(nothing, nothing, rc.Batch(groups=rc.Groups(size=2)), spec=replace(spec, apply=True))
        assert out.weights.shape == shape and all(map(math.isfinite, out.metrics().values()))


# --- compiled functions ---


@pytest.mark.slow  # the compiler takes seconds
@pytest.mark.parametrize("level", ["token", "product", "prefix"])
def test_compiled(level):
    spec = rc.Spec(weight_of(level, upper=2.0, normalize="group"), CRITERIA, "both")
    laid = lay_out(random_sequences(10), "padded_right", torch.float32)
    index = torch.tensor([0, 1, 0, 1, 0, 1])

    def call(train, rollout, mask, index):
        out = rc.correct(train, rollout, rc.Batch(mask=mask, groups=rc.Groups(index=index)), spec=spec)
        return out.weights, out.mask, out.statistics.sums

    wanted = call(laid.train, laid.rollout, laid.mask, index)
    found = torch.compile(call, fullgraph=True, backend="eager")(laid.train, laid.rollout, laid.mask, index)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert_near(found[2], wanted[2], torch.float32)


# --- errors ---


def test_what_has_no_mean_of_a_group():
    with pytest.raises(ValueError, match=r"Weight\.normalize: expected 'batch', 'group' or None with over='sequence'"):
        rc.Weight.product(normalize="sequence")
    with pytest.raises(ValueError, match=r"Spec.report: expected \('native',\) with normalize='group'"):
        rc.Spec(rc.Weight.token(normalize="group"), report=("verl",))
    # A loss without a Spec and a surrogate of groups does not read them.
    x = torch.zeros(4, 3)
    out = rc.policy_loss(x, torch.ones(4), rc.Batch(groups=rc.Groups(size=2)))
    assert torch.equal(out.value, rc.policy_loss(x, torch.ones(4)).value)


@pytest.mark.parametrize("normalize", ["sequence", "group"])
@pytest.mark.parametrize("rejected", ["mask", "both"])
def test_a_dry_run_reports_by_what_weights_would_be_divided(normalize, rejected):
    """And hands nothing back, in any layout."""
    spec = rc.Spec(rc.Weight.token(upper=1.5, normalize=normalize), (rc.Criterion("abs", upper=0.2),), rejected)
    groups = torch.tensor([0, 1, 0, 1])
    for layout in ("packed_gaps", "padded_left"):
        laid = lay_out(random_sequences(2, (5, 1, 7, 4)), layout)
        options = {"group_index": groups} if normalize == "group" else {}
        out, dry = (laid.correct(replace(spec, apply=apply), **options) for apply in (True, False))
        assert dry.weights is None and dry.mask is laid.mask
        found = dry.metrics()
        assert found == out.metrics() and found["sequence_weight_divisor_max"] > 0.0

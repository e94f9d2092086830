"""Invariance of results under permutation, splitting, padding, moving, empty rows and garbage.

Weights, masks and decisions are equal to the bit below fp64. Of the statistics, counts, extrema and the histogram are
equal and float sums agree to rounding.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_corr as rc
from builders.batches import GARBAGE, LAYOUTS, lay_out
from builders.same_bits import assert_same_results, assert_same_statistics, outcome, pick
from builders.strategies import sequences, specs
from oracles.correction import Sequence
from rollout_corr.specs.choices import NONFINITE

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
SPECS = specs(prefixes=True)
FILLS = st.sampled_from((*GARBAGE, 3.4e38, -3.4e38))
# The gaps of one batch are there again in each of its chunks.
WITHOUT_GAPS = [layout for layout in LAYOUTS if layout != "packed_gaps"]
CASES = settings(max_examples=30)


def run(batch, spec, dtype, layout="packed"):
    laid = lay_out(batch, layout, dtype)
    return outcome(laid, laid.correct(spec))


@CASES
@given(sequences(), SPECS, DTYPES, st.randoms(use_true_random=False))
def test_order_of_sequences_does_not_matter(batch, spec, dtype, random):
    order = list(range(len(batch)))
    random.shuffle(order)
    whole, shuffled = run(batch, spec, dtype), run([batch[s] for s in order], spec, dtype)
    assert_same_results(shuffled, whole, order)
    assert_same_statistics(shuffled[3], whole[3])


@CASES
@given(sequences(), SPECS, DTYPES, st.lists(st.integers(0, 6), max_size=3), st.sampled_from(WITHOUT_GAPS))
def test_chunks_merge_to_the_whole(batch, spec, dtype, cuts, layout):
    whole = run(batch, spec, dtype, layout)
    edges = [0, *sorted(min(cut, len(batch)) for cut in cuts), len(batch)]
    parts = []
    for start, end in itertools.pairwise(edges):
        part = run(batch[start:end], spec, dtype, layout)
        assert_same_results(part, whole, range(start, end))
        parts.append(part[3])
    # Where all of a chunk is finite, token weights are summed in float64, and a sequence's mean is a little nearer.
    assert_same_statistics(rc.Statistics.sum(parts), whole[3], rounds_means=True)
    assert_same_statistics(rc.Statistics.sum(reversed(parts)), whole[3], rounds_means=True)


@CASES
@given(sequences(), specs(nonfinite=NONFINITE, prefixes=True), DTYPES, st.sampled_from(LAYOUTS))
def test_layout_does_not_matter(batch, spec, dtype, layout):
    packed, other = run(batch, spec, dtype), run(batch, spec, dtype, layout)
    assert_same_results(other, packed)
    if spec.nonfinite != "propagate" and layout != "packed_gaps":
        assert_same_statistics(other[3], packed[3])


@CASES
@given(
    sequences(),
    specs(prefixes=True, normalize=(None, "batch")),
    DTYPES,
    st.sampled_from(LAYOUTS),
    st.lists(st.integers(0, 6), max_size=4),
)
def test_empty_sequences_change_nothing(batch, spec, dtype, layout, places):
    more, order = list(batch), list(range(len(batch)))
    for length, place in enumerate(places):
        at = min(place, len(more))
        empty = Sequence(
            [math.nan] * length, [1.0] * length, [0] * length, [-9.0] * length, {"entropy": [math.inf] * length},
            versions=[-1] * length, current_version=7,
        )  # fmt: skip
        more.insert(at, empty)
        order = [s + (s >= at) for s in order]
    few, many = run(batch, spec, dtype, layout), run(more, spec, dtype, layout)
    if spec.weight is None or spec.weight.normalize is None:
        assert_same_results(tuple(pick(part, order) for part in many[:3]), few)
    assert_same_statistics(many[3], few[3])
    assert all(keep for s, keep in enumerate(many[2]) if s not in order)


@CASES
@given(sequences(), specs(prefixes=True, normalize=(None, "batch")), DTYPES, st.sampled_from(LAYOUTS), FILLS, FILLS)
def test_what_stands_at_invalid_tokens_does_not_matter(batch, spec, dtype, layout, one, other):
    def filled(value):
        return [
            Sequence(
                [x if m else value for x, m in zip(q.train, q.mask, strict=True)],
                [x if m else other for x, m in zip(q.rollout, q.mask, strict=True)],
                q.mask,
                [x if m else value for x, m in zip(q.advantages, q.mask, strict=True)],
                {"entropy": [x if m else value for x, m in zip(q.external["entropy"], q.mask, strict=True)]},
                versions=[x if m else -1 for x, m in zip(q.versions, q.mask, strict=True)],
                current_version=q.current_version,
            )
            for q in batch
        ]

    zeros, garbage = run(filled(0.0), spec, dtype, layout), run(filled(one), spec, dtype, layout)
    assert_same_results(garbage, zeros)
    assert garbage[3].metrics_async().values() == zeros[3].metrics_async().values()


@CASES
@given(
    sequences(impossible=True),
    specs(prefixes=True, nonfinite=("reject", "neutral"), normalize=(None, "batch")),
    st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
)
def test_no_log_prob_makes_nan_or_raises(batch, spec, dtype):
    laid = lay_out(batch, "packed", dtype)
    out = laid.correct(spec)
    assert out.weights is None or bool(out.weights.isfinite().all())
    for key, value in out.metrics().items():
        assert math.isfinite(value), (key, value)
    assert all(isinstance(text, str) for text in out.warnings())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 3, 16, 17, 100, 1000])
def test_long_sequences_keep_their_bits_wherever_they_start(dtype, length):
    """Sums of many tokens: a plain float sum would change with the start and with the neighbors."""
    generator = torch.Generator().manual_seed(length)
    train = (-torch.rand(length, generator=generator) * 9).to(dtype)
    rollout = (train.float() + 0.3 * torch.randn(length, generator=generator)).to(dtype)
    mask = torch.rand(length, generator=generator) < 0.8
    spec = rc.Spec(
        rc.Weight.product(), (rc.Criterion("k3", over="sequence", reduce="sum", upper=length * 0.045),), "both"
    )
    alone = rc.correct(train, rollout, mask=mask, cu_seqlens=torch.tensor([0, length]), spec=spec)
    for start in (1, 2, 3, 5, 64):
        pad, tail = torch.randn(start, generator=generator).to(dtype), torch.zeros(7, dtype=dtype)
        packed = rc.correct(
            torch.cat([pad, train, tail]),
            torch.cat([-pad, rollout, tail]),
            mask=torch.cat([torch.ones(start, dtype=torch.bool), mask, torch.ones(7, dtype=torch.bool)]),
            cu_seqlens=torch.tensor([0, start, start + length, start + length + 7]),
            spec=spec,
        )
        assert torch.equal(packed.weights[start : start + length], alone.weights)
        assert torch.equal(packed.mask[start : start + length], alone.mask)
        assert packed.keep[1] == alone.keep[0]
    order = torch.randperm(length, generator=generator)
    mixed = rc.correct(train[order], rollout[order], mask=mask[order], cu_seqlens=torch.tensor([0, length]), spec=spec)
    assert torch.equal(mixed.weights, alone.weights[order])

"""Invariance of results under order, splits, layouts, empty sequences and garbage.

Weights, masks and decisions are equal to the bit below float64, and so are gradients of a loss. Of the statistics,
counts, extrema and the histogram are equal and float sums agree to rounding.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders import invariance
from builders.invariance import behind_garbage, odd, run
from builders.rounding import FORMULA, assert_near, near
from builders.same_bits import assert_same_results, assert_same_statistics, pick
from frozen.generator import Layout

pytestmark = pytest.mark.usefixtures("one_thread")

# `make test-all` has as many again, ten times.
SEEDS = [*range(3), *(pytest.param(block, marks=pytest.mark.slow) for block in range(3, 30))]
GAPS = Layout("gaps", "step", torch.int64)


def seeds(block):
    return range(12 * block, 12 * block + 12)


@pytest.mark.parametrize("block", SEEDS)
def test_order_and_layout_do_not_matter(block):
    for seed in seeds(block):
        drawn = invariance.correction(seed)
        whole, order = run(drawn.call()), drawn.order()
        shuffled = run(drawn.call(drawn.tokens.sequences(order)))
        assert_same_results(shuffled, whole, order)
        for layout in (drawn.layout, GAPS):
            other = run(drawn.call(layout=layout, garbage=seed))
            assert_same_results(other, whole)
            if drawn.spec.nonfinite != "propagate" and layout != GAPS:
                assert_same_statistics(other[3], whole[3])
                assert_same_statistics(shuffled[3], whole[3])


@pytest.mark.parametrize("block", SEEDS)
def test_parts_merge_to_the_whole(block):
    for seed in seeds(block):
        drawn = invariance.correction(seed, normalize=(None, "sequence"))
        whole, parts = run(drawn.call()), []
        for places in drawn.parts():
            layout = drawn.layout if places else invariance.PACKED
            parts.append(run(drawn.call(drawn.tokens.sequences(places), layout)))
            assert_same_results(parts[-1], whole, places)
        if drawn.spec.nonfinite != "propagate":
            # Where all of a part is finite, token weights are summed in float64, and a mean is a little nearer.
            for some in (parts, parts[::-1]):
                assert_same_statistics(rc.Statistics.sum(part[3] for part in some), whole[3], rounds_means=True)


@pytest.mark.parametrize("block", SEEDS)
def test_neither_garbage_nor_empty_sequences_matter(block):
    for seed in seeds(block):
        drawn = invariance.correction(seed, normalize=(None, "sequence", "group", "batch"))
        whole = run(drawn.call())
        other = run(drawn.call(behind_garbage(drawn.tokens, random.Random(seed)), garbage=seed + 1))
        assert_same_results(other, whole)
        more, order = drawn.with_empty_ones()
        found = run(drawn.call(more, drawn.layout))
        assert all(keep for s, keep in enumerate(found[2]) if s not in order)
        if drawn.spec.weight is None or drawn.spec.weight.normalize != "batch":
            assert_same_results(tuple(pick(part, order) for part in found[:3]), whole)
        if drawn.spec.nonfinite != "propagate":
            assert other[3].metrics_async().values() == whole[3].metrics_async().values()
            assert_same_statistics(found[3], whole[3])


@pytest.mark.parametrize("block", SEEDS)
def test_no_log_prob_makes_nan_or_raises(block):
    for seed in seeds(block):
        drawn = invariance.correction(seed, normalize=(None, "sequence", "group", "batch"))
        drawn.spec = replace(drawn.spec, nonfinite=("reject", "neutral")[seed % 2])
        drawn.dtype = (torch.float64, drawn.dtype)[seed % 3 > 0]
        call = drawn.call(odd(drawn.tokens, drawn.rng))
        out = call.corrected(drawn.spec, "torch")
        assert out.weights is None or bool(out.weights.isfinite().all())
        assert all(map(math.isfinite, out.metrics().values())), seed
        assert all(isinstance(text, str) for text in out.warnings())


# --- losses ---


def lost(drawn, tokens=None, layout=invariance.PACKED, garbage=0, **given):
    """Value and gradient by sequence, and the result."""
    call = drawn.call(tokens, layout, garbage, **given)
    out, new, _ = call.lost("torch", call.loss)
    rows = new if isinstance(new, list) else [new]
    found = torch.autograd.grad(out.value, rows) if rows else []
    return out.value.item(), call.drawn.laid.read(list(found) if isinstance(new, list) else found[0]), out


def assert_same_slopes(drawn, found, wanted):
    if isinstance(drawn.loss.surrogate, rc.SAPO):
        # Its sigmoid may have other last bits at the end of a vector: docs/loss_math.md excepts it on a CPU.
        assert [len(row) for row in found] == [len(row) for row in wanted]
        found, wanted = ([x for row in rows for x in row] for rows in (found, wanted))
        wanted = near(wanted, drawn.dtype, FORMULA, 0.0)
    assert found == wanted


def assert_alike(drawn, one, other, order=None):
    assert other[0] == near(one[0])
    assert_same_slopes(drawn, other[1], one[1] if order is None else [one[1][s] for s in order])
    assert torch.equal(one[2].statistics.maxima, other[2].statistics.maxima)
    assert_near(one[2].statistics.sums, other[2].statistics.sums)


@pytest.mark.parametrize("block", SEEDS)
def test_a_loss(block):
    """In another order or layout, behind other garbage, among empty sequences; and its parts add up."""
    for seed in seeds(block):
        drawn = invariance.loss(seed)
        given = {"scale": True} if seed % 3 == 0 else {}
        whole, order = lost(drawn, **given), drawn.order()
        assert math.isfinite(whole[0]) and all(map(math.isfinite, whole[2].metrics().values())), seed
        assert_alike(drawn, whole, lost(drawn, layout=drawn.layout, **given))
        assert_alike(drawn, whole, lost(drawn, drawn.tokens.sequences(order), **given), order)
        assert_alike(drawn, whole, lost(drawn, behind_garbage(drawn.tokens, random.Random(seed)), GAPS, seed, **given))
        if drawn.loss.mean.over != "rows" and (drawn.loss.kl is None or drawn.loss.kl.mean is None):
            more, places = drawn.with_empty_ones()
            value, slopes, out = lost(drawn, more, drawn.layout, **given)
            assert_alike(drawn, whole, (value, [slopes[s] for s in places], out))
        if drawn.loss.kl is not None and drawn.loss.kl.mean is not None:
            continue
        drawn.loss = replace(drawn.loss, mean=replace(drawn.loss.mean, over="original"))
        given |= {} if drawn.loss.mean.of == "sum" else {"total": 13.0}
        whole = lost(drawn, **given)
        parts = [lost(drawn, drawn.tokens.sequences(places), **given) for places in drawn.parts()]
        assert sum(part[0] for part in parts) == near(whole[0])
        assert_same_slopes(drawn, [row for part in parts for row in part[1]], whole[1])


@pytest.mark.parametrize("name", invariance.LOOKING)
@pytest.mark.parametrize("block", SEEDS)
def test_a_loss_that_looks(block, name):
    """A surrogate that looks at the batch decides the same in any order and layout: slopes are equal as float32."""
    for seed in seeds(block):
        drawn = invariance.loss(seed, (name,), torch.float32)
        drawn.loss = replace(drawn.loss, mean=rc.Mean("sum"))
        whole, order = lost(drawn), drawn.order()
        other = lost(drawn, drawn.tokens.sequences(order), drawn.layout)
        assert other[1] == [whole[1][s] for s in order], seed
        one, two = (
            {key: x for key, x in out.metrics().items() if "cov_chosen_f" in key} for out in (whole[2], other[2])
        )
        assert one == two


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

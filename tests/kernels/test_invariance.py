"""Invariance of the kernels: bits of weights, masks and decisions, whatever lies around a sequence."""

from __future__ import annotations

import math
import random

import pytest
import torch

from builders import invariance
from builders.invariance import PACKED, behind_garbage
from builders.kernel_cases import FEW, INTERPRETED, NARROW, WIDE, Shape, between_fences, same_bits, shaped, watched
from builders.same_bits import assert_same_results, assert_same_statistics, outcome
from frozen.generator import Layout

pytestmark = INTERPRETED

# A call takes a sixth of a second; `make test-all` has as many again, twenty times.
SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 120))]
LONG = ((0, Shape(tile=32, lanes=4, sequences=1, chunk=4)),)


def corrected(call, device, shapes, fence=math.nan, filling=0xFF):
    call = between_fences(call, device, fence)
    with shaped(shapes), watched(filling):
        out = call.corrected(call.spec, "triton")
    return outcome(call.drawn.laid, out), out


@pytest.mark.parametrize("seed", SEEDS)
def test_order_neighbors_layout_and_tiles_do_not_matter(seed, device):
    drawn = invariance.correction(seed, (None,), ("token", "turn", "sequence"))
    (whole, _), order = corrected(drawn.call(), device, WIDE), drawn.order()
    more = invariance.random_tokens(random.Random(seed))
    before = len(more.lengths)
    packed = drawn.call(invariance.joined(more, drawn.tokens.sequences(order)), Layout("gaps"), seed)
    found, _ = corrected(packed, device, FEW)
    assert_same_results(tuple(part and part[before:] for part in found[:3]), whole, order)
    for layout, shapes in ((PACKED, LONG), (drawn.layout, NARROW)):
        other, _ = corrected(drawn.call(layout=layout), device, shapes)
        assert_same_results(other, whole)
        if drawn.spec.nonfinite != "propagate":
            assert_same_statistics(other[3], whole[3], rounds_means=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_lies_around_and_behind_the_mask_does_not_matter(seed, device):
    """A repeated call gives the same bits, also with other garbage at invalid tokens, around tensors, in memory."""
    drawn = invariance.correction(1000 + seed, (None, "batch"), ("token", "turn", "sequence"))
    layout, other = drawn.layout, behind_garbage(drawn.tokens, random.Random(seed))
    # The seed of garbage draws where holes are, too.
    apart = int(layout.kind != "holes")
    one, again, changed = (
        corrected(drawn.call(tokens, layout, garbage), device, FEW, fence, filling)
        for tokens, garbage, fence, filling in (
            (drawn.tokens, 0, math.nan, 0xFF), (drawn.tokens, 0, math.nan, 0xFF), (other, apart, 1e4, 0x00)
        )
    )  # fmt: skip
    assert_same_results(changed[0], one[0])
    assert same_bits(one[1], again[1])
    for name in ("sums", "maxima"):
        a, b = (getattr(out.statistics, name).view(torch.int64) for _, out in (one, changed))
        assert torch.equal(a, b)

"""Invariance of the kernels: bits of weights, masks and decisions, whatever lies around a sequence.

The interpreter is slow, so `make test` sees a few batches of each; `make test-all` many, and Specs of every kind.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from aot.variants import VARIANTS
from builders.batches import LAYOUTS, lay_out, spoil, wild
from builders.kernel_cases import (
    FEW,
    INTERPRETED,
    NARROW,
    WIDE,
    Shape,
    batch,
    between_fences,
    same_bits,
    shaped,
    watched,
)
from builders.same_bits import assert_same_results, assert_same_statistics, outcome
from builders.strategies import specs
from oracles.correction import Sequence

pytestmark = INTERPRETED

EXAMPLES = pytest.mark.parametrize("examples", [2, pytest.param(100, marks=pytest.mark.slow)])
DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
SHAPES = st.sampled_from((NARROW, ((0, Shape(tile=32, lanes=4, sequences=1, chunk=4)),)))
# The gaps of one batch are there again in each of its chunks.
WITHOUT_GAPS = st.sampled_from([layout for layout in LAYOUTS if layout != "packed_gaps"])
# The bounds of these cut random batches. What other schemes report does not come from the kernels.
RICH = [
    replace(variant.spec, report=("native",))
    for variant in VARIANTS.values()
    if variant.spec.weight or variant.spec.criteria
]


@st.composite
def batches(draw, least=2):
    """Some sequences of lengths that matter to tiles of 8 and of 16; ordinary, odd and broken tokens."""
    lengths = draw(st.lists(st.sampled_from((0, 1, 5, 7, 8, 9, 16, 17, 33)), min_size=least, max_size=5))
    seed = draw(st.integers(0, 2**20))
    made = batch(seed, lengths, advantages=draw(st.sampled_from(("token", "token", "sequence"))))
    made = wild(made) if seed % 3 == 0 else made
    return spoil(made, seed) if seed % 4 == 0 else made


def some_specs(examples, normalize=(None,)):
    """Those that reach every branch; among many examples all that can be made, which mostly do little."""
    rich = st.sampled_from([s for s in RICH if s.weight is None or s.weight.normalize in normalize])
    return rich | specs(normalize=normalize) if examples > 10 else rich


def run(sequences, spec, dtype, device, layout="packed", shapes=FEW):
    laid = between_fences(lay_out(sequences, layout, dtype), device)
    with shaped(shapes), watched():
        return outcome(laid, laid.correct(spec, backend="triton"))


def holds(examples, *drawn):
    """Run the property that is decorated, on so many examples. At half a second a call, nothing is shrunk."""
    how = settings(max_examples=examples, phases=(Phase.generate,))
    return lambda test: how(given(*drawn)(test))()


@EXAMPLES
def test_order_and_neighbors_do_not_matter(examples, device):
    """A sequence has its bits in any order, behind any others, and starting anywhere."""

    @holds(examples, batches(), batches(least=0), some_specs(examples), DTYPES, st.randoms(use_true_random=False))
    def property(sequences, before, spec, dtype, random):
        if any(isinstance(q.advantages, list) for q in sequences) != any(
            isinstance(q.advantages, list) for q in before
        ):
            before = []
        order = list(range(len(sequences)))
        random.shuffle(order)
        wanted = run(sequences, spec, dtype, device)
        packed = run([*before, *(sequences[s] for s in order)], spec, dtype, device, "packed_gaps")
        packed = tuple(None if part is None else part[len(before) :] for part in packed[:3])
        assert_same_results(packed, wanted, order)


@EXAMPLES
def test_layout_does_not_matter(examples, device):
    """Padded on either side, with holes, with strides, as rows of a nested tensor or of a list."""

    @holds(examples, batches(), some_specs(examples), DTYPES, WITHOUT_GAPS)
    def property(sequences, spec, dtype, layout):
        packed, other = (run(sequences, spec, dtype, device, of) for of in ("packed", layout))
        assert_same_results(other, packed)
        if spec.nonfinite != "propagate":
            assert_same_statistics(other[3], packed[3], rounds_means=True)


@EXAMPLES
def test_shape_of_tiles_does_not_matter(examples, device):
    @holds(examples, batches(), some_specs(examples), DTYPES, SHAPES, st.sampled_from(LAYOUTS))
    def property(sequences, spec, dtype, shapes, layout):
        wide, other = (run(sequences, spec, dtype, device, layout, of) for of in (WIDE, shapes))
        assert_same_results(other, wide)
        if spec.nonfinite != "propagate":
            assert_same_statistics(other[3], wide[3], rounds_means=True)


@EXAMPLES
def test_what_lies_around_and_behind_the_mask_does_not_matter(examples, device):
    """A repeated call gives the same bits, also with other garbage at invalid tokens, around tensors, in memory."""

    @holds(examples, batches(), some_specs(examples, (None, "batch")), DTYPES, st.sampled_from(LAYOUTS))
    def property(sequences, spec, dtype, layout):
        found = []
        # The seed draws what stands where no sequence is, and where holes are.
        other = int(layout != "padded_holes")
        for values, seed, fence, filling in (
            (sequences, 0, math.nan, 0xFF),
            (sequences, 0, math.nan, 0xFF),
            (filled(sequences, 0.0), other, 1e4, 0x00),
        ):
            laid = between_fences(lay_out(values, layout, dtype, seed=seed), device, fence)
            with shaped(FEW), watched(filling):
                found.append((laid, laid.correct(spec, backend="triton")))
        assert_same_results(*(outcome(*one) for one in (found[2], found[0])))
        assert same_bits(found[0][1], found[1][1])
        for one in ("sums", "maxima"):
            a, b = (getattr(found[i][1].statistics, one).view(torch.int64) for i in (0, 2))
            assert torch.equal(a, b)


def filled(sequences, value):
    """Copy sequences with one value at every invalid token."""

    def at_invalid(xs, mask):
        return [x if m else value for x, m in zip(xs, mask, strict=True)] if isinstance(xs, list) else xs

    return [
        Sequence(
            at_invalid(q.train, q.mask),
            at_invalid(q.rollout, q.mask),
            q.mask,
            at_invalid(q.advantages, q.mask),
            {name: at_invalid(x, q.mask) for name, x in q.external.items()},
        )
        for q in sequences
    ]

"""Weights and criteria of prefixes to the bit against what sequences aggregate.

test_random_calls.py holds them against loops; test_invariance.py draws them too: order, parts, layouts, garbage.
"""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.rounding import assert_near
from builders.weights import weight_of
from rollout_corr.backends import operators
from rollout_corr.backends.registration import flat
from rollout_corr.specs.encode import encode

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("reduce", "level"), [("sum", "product"), ("mean", "geometric")])
def test_the_last_prefix_has_the_bits_of_its_sequence(dtype, reduce, level):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 2, 700, 0, 63, 64, 65, 4000])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rollout = (-9 * torch.rand(int(offsets[-1]), generator=generator)).to(dtype)
    train = (rollout.float() + 0.1 * torch.randn(rollout.shape, generator=generator)).to(dtype)
    bounds = {"lower": 0.8, "upper": 1.25}
    prefix, whole = (
        rc.correct(train, rollout, cu_seqlens=offsets, spec=rc.Spec(weight)).weights
        for weight in (rc.Weight("prefix", **bounds, reduce=reduce), weight_of(level, **bounds))
    )
    last = (offsets[1:] - 1)[lengths > 0]
    assert torch.equal(prefix[last], whole[last])
    assert not torch.equal(prefix, whole)


def test_a_prefix_of_no_survivor_is_that_of_its_sequence():
    """Where a token criterion takes a sequence and sums run over survivors, product and prefix are both of none."""
    train = torch.tensor([0.5, 2.0, -0.5, 0.25, 0.5])
    taken = rc.Criterion("ratio", upper=4.0, drop="sequence")

    def run(weight, *more):
        spec = rc.Spec(weight, (taken, *more), sums_over="kept")
        return rc.correct(train, torch.zeros(5), cu_seqlens=torch.tensor([0, 3, 5]), spec=spec)

    assert run(rc.Weight.product(normalize="batch")).weights[0] < 1.0
    for growth in (None, "sqrt"):
        prefix = run(rc.Weight("prefix", upper=9.0, growth=growth)).weights
        assert prefix[:3].tolist() == [1.0] * 3 and prefix[4] == torch.tensor(0.75).exp()
    late = run(None, rc.Criterion("ratio", "prefix", "sum", upper=1.1, drop="rest", label="late")).metrics()
    assert late["late/sequences_rejected_fraction"] == 0.5 and late["late/tokens_rejected_fraction"] == 0.4


# --- where it runs ---


SPEC = rc.Spec(rc.Weight("prefix", upper=1.5, growth="sqrt"), (rc.Criterion("tv", "prefix", "mean", upper=0.2),))


def test_the_operator_has_prefixes():
    generator = torch.Generator().manual_seed(0)
    rollout, offsets = -torch.rand(40, generator=generator), torch.tensor([0, 7, 7, 30, 40])
    train = rollout + 0.2 * torch.randn(40, generator=generator)
    operands = operators.CorrectOperands(train, rollout, None, offsets, None, False, [], None, None, False)
    given = flat(operators.OPERANDS, operands)
    weights, mask, keep, statistics, _ = torch.ops.rollout_corr.correct(*given, *encode(SPEC))
    out = rc.correct(train, rollout, cu_seqlens=offsets, spec=SPEC)
    assert all(torch.equal(*pair) for pair in ((weights, out.weights), (mask, out.mask), (keep, out.keep)))
    assert_near(statistics[: len(out.statistics.sums)], out.statistics.sums, torch.float32)


def test_the_kernels_say_what_they_have_not():
    words = "weights and criteria over prefixes run on plain torch"
    for spec in (rc.Spec(rc.Weight("prefix")), rc.Spec(criteria=(rc.Criterion("k1", "prefix", "sum", upper=1),))):
        with pytest.raises(ValueError, match=f"backend: expected 'auto' or 'torch', got 'triton': {words}"):
            rc.correct(torch.zeros(1, 2), torch.zeros(1, 2), spec=spec, backend="triton")
    with pytest.raises(ValueError, match=r"Criterion.within: expected 'sequence' unless over='prefix', got 'turn'"):
        rc.Criterion("k1", upper=1, within="turn")
    with pytest.raises(ValueError, match=r"Spec.report: expected .'native',. with prefixes"):
        rc.Spec(rc.Weight("prefix"), report=("verl",))

"""Weights and criteria of prefixes by hand, and to the bit against what sequences aggregate.

test_units.py holds them against loops; test_properties.py draws them too: order, chunks, layouts, neighbors, garbage.
"""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.rounding import assert_near, near
from builders.weights import weight_of
from rollout_corr.backends import operators
from rollout_corr.specs.choices import PREFIX_REDUCTIONS
from rollout_corr.specs.encode import encode

pytestmark = pytest.mark.usefixtures("one_thread")

ROLLOUT = [-1.0, -2.0, -0.5, -3.0, -1.0]
D = [0.25, -0.5, 0.5, 0.125, -0.25]


def of(weight=None, *criteria, d=D, mask=None, **settings):
    rollout = torch.tensor([ROLLOUT[: len(d)]], dtype=torch.float64)
    spec = rc.Spec(weight, criteria, **settings)
    return rc.correct(rollout + torch.tensor([d]), rollout, mask=mask, spec=spec)


# --- by hand ---


def test_weights_by_hand():
    sums = [0.25, -0.25, 0.25, 0.375, 0.125]
    for reduce, logs in {
        "sum": sums,
        "mean": [x / (i + 1) for i, x in enumerate(sums)],
        "min": [0.25, -0.25, 0.0, -0.375, -0.75],
    }.items():
        got = of(rc.Weight("prefix", reduce=reduce)).weights[0]
        assert_near(got, torch.tensor(logs, dtype=torch.float64).exp())


def test_an_invalid_token_is_neither_a_place_nor_a_factor():
    mask = torch.tensor([[1, 0, 1, 1, 0]])
    got = of(rc.Weight("prefix", upper=math.e**0.3, growth="sqrt"), mask=mask).weights[0]
    logs = [0.25, None, 0.3 * math.sqrt(2), 0.3 * math.sqrt(3), None]
    assert got.tolist() == near([0.0 if x is None else math.exp(x) for x in logs])


def test_bounds_that_grow_count_what_they_bound():
    out = of(rc.Weight("prefix", lower=0.9, upper=1.2, outside="zero", growth="sqrt"))
    inside = [math.log(0.9) * math.sqrt(t) <= x <= math.log(1.2) * math.sqrt(t) for t, x in enumerate(
        [0.25, -0.25, 0.25, 0.375, 0.125], 1
    )]  # fmt: skip
    assert inside == [False, False, True, False, True]
    assert (out.weights[0] != 0).tolist() == inside
    metrics = out.metrics()
    assert (metrics["weight_above_upper_fraction"], metrics["weight_below_lower_fraction"]) == (0.4, 0.2)


def test_first_divergence():
    """drop="rest" with the running maximum keeps what comes before the first token beyond a bound."""
    d = [0.0, 0.1, 0.9, 0.0, 0.1]
    cut = rc.Criterion("abs", "prefix", "max", upper=0.5)
    assert of(None, cut, d=d).mask.tolist() == [[True, True, False, False, False]]
    back = {"stat": "ratio", "over": "prefix", "reduce": "sum", "upper": math.exp(0.95)}
    d = [0.0, 0.1, 0.9, -0.8, 0.1]
    assert of(None, rc.Criterion(**back), d=d).mask.tolist() == [[True, True, False, True, True]]
    assert of(None, rc.Criterion(**back, drop="rest"), d=d).mask.tolist() == [[True, True, False, False, False]]
    assert not of(None, rc.Criterion(**back, drop="sequence"), d=d).keep.item()


def test_rejected_tokens_are_counted():
    out = of(None, rc.Criterion("abs", "prefix", "max", upper=0.3, drop="rest", label="cut"))
    metrics = out.metrics()
    assert (metrics["cut/tokens_rejected_fraction"], metrics["cut/sequences_rejected_fraction"]) == (0.8, 1.0)
    assert (metrics["tokens_kept"], metrics["cut/max"], metrics["cut/mean"]) == (1.0, 0.5, near(0.45))


# --- within turns ---


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_within_turns_is_what_turns_alone_would_give(layout):
    """Turns given as sequences have the prefixes that turns of sequences have; an empty turn changes nothing."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(60, generator=generator)
    train = rollout + 0.3 * torch.randn(60, generator=generator)
    mask = torch.rand(60, generator=generator) < 0.8
    turns = torch.tensor([0, 4, 4, 11, 20, 21, 37, 40, 60])
    weight = {"lower": 0.8, "upper": 1.3, "growth": "sqrt"}
    tested = {"stat": "abs", "over": "prefix", "reduce": "sum", "upper": 0.9, "drop": "rest", "growth": "sqrt"}
    for reduce in PREFIX_REDUCTIONS:
        spec, alone = (
            rc.Spec(
                rc.Weight("prefix", **weight, reduce=reduce, within=over),
                (rc.Criterion(**tested, within=over, label="rest"),),
            )
            for over in ("turn", "sequence")
        )
        if layout == "packed":
            batch = rc.Batch(mask=mask, turns=turns, cu_seqlens=torch.tensor([0, 20, 40, 60]))
            given = train, rollout
        else:
            batch = rc.Batch(mask=mask.view(3, 20), turns=turns)
            given = train.view(3, 20), rollout.view(3, 20)
        of_turns = rc.correct(*given, batch, spec=spec)
        wanted = rc.correct(train, rollout, mask=mask, cu_seqlens=turns, spec=alone)
        assert torch.equal(of_turns.weights.view(-1), wanted.weights)
        assert torch.equal(of_turns.mask.view(-1), wanted.mask)
        assert 0 < wanted.mask.sum() < mask.sum()
        keys = [k for k in wanted.metrics() if k.startswith(("rest/mean", "rest/max", "weight_", "tokens_kept"))]
        found, plain = of_turns.metrics(), wanted.metrics()
        assert {k: found[k] for k in keys} == near({k: plain[k] for k in keys})
        assert found["sequence_mean_weight_mean"] != plain["sequence_mean_weight_mean"]
    with pytest.raises(ValueError, match="turns"):
        rc.correct(train, rollout, cu_seqlens=turns, spec=spec)
    with pytest.raises(ValueError, match=r"Criterion.within: expected its default unless over='prefix', got 'turn'"):
        rc.Criterion("k1", upper=1, within="turn")


# --- exact ---


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


def test_float64_has_running_sums_to_a_rounding():
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(3, 500, generator=generator, dtype=torch.float64) * torch.tensor([[1e-9], [0.1], [100.0]])
    spec = rc.Spec(criteria=(rc.Criterion("k1", "prefix", "sum", upper=1e9, label="k1"),), detail="full")
    flat = rc.correct(d.view(-1), torch.zeros(1500).double(), cu_seqlens=torch.arange(4) * 500, spec=spec)
    row = [-math.fsum(d[s, : t + 1].tolist()) for s in range(3) for t in range(500)]
    assert flat.metrics()["k1/max"] == near(max(row), terms=1, size=0.0)
    tiny = rc.correct(d[:1], torch.zeros(1, 500).double(), spec=spec).metrics()
    assert tiny["k1/max"] == near(max(row[:500]), size=2.0**-9)


def test_nan_stays_behind_its_token():
    d = [0.25, math.nan, 0.5, 0.0]
    spoiled = of(rc.Weight("prefix"), d=d, nonfinite="propagate").weights[0]
    assert spoiled[0].item() == near(math.exp(0.25)) and bool(spoiled[1:].isnan().all())
    assert of(rc.Weight("prefix"), d=d).keep.tolist() == [False]
    neutral = of(rc.Weight("prefix"), d=d, nonfinite="neutral").weights[0]
    assert neutral.tolist() == near([math.exp(x) for x in (0.25, 0.25, 0.75, 0.75)])


# --- where it runs ---


SPEC = rc.Spec(rc.Weight("prefix", upper=1.5, growth="sqrt"), (rc.Criterion("tv", "prefix", "mean", upper=0.2),))


def test_the_operator_has_prefixes():
    generator = torch.Generator().manual_seed(0)
    rollout, offsets = -torch.rand(40, generator=generator), torch.tensor([0, 7, 7, 30, 40])
    train = rollout + 0.2 * torch.randn(40, generator=generator)
    operands = operators.CorrectOperands(train, rollout, None, offsets, None, False, [], None, None, False)
    weights, mask, keep, statistics, _ = torch.ops.rollout_corr.correct(*operands, *encode(SPEC))
    out = rc.correct(train, rollout, cu_seqlens=offsets, spec=SPEC)
    assert all(torch.equal(*pair) for pair in ((weights, out.weights), (mask, out.mask), (keep, out.keep)))
    assert_near(statistics[: len(out.statistics.sums)], out.statistics.sums, torch.float32)


def test_the_kernels_say_what_they_have_not():
    words = "weights and criteria over prefixes run on plain torch"
    for spec in (rc.Spec(rc.Weight("prefix")), rc.Spec(criteria=(rc.Criterion("k1", "prefix", "sum", upper=1),))):
        with pytest.raises(ValueError, match=f"backend: expected 'auto' or 'torch', got 'triton': {words}"):
            rc.correct(torch.zeros(1, 2), torch.zeros(1, 2), spec=spec, backend="triton")
    with pytest.raises(ValueError, match=r"Spec.report: expected .'native',. beside prefixes"):
        rc.Spec(rc.Weight("prefix"), report=("verl",))

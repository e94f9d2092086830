"""The kernels where values are odd, as random ones are not: not finite, at the ends of ranges, on a bound."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import INTERPRETED, REAL, check, given, shaped
from builders.rounding import assert_near, near
from oracles import correction as oracle
from rollout_corr.specs.choices import REDUCTIONS, WHEN

pytestmark = INTERPRETED

C, W = rc.Criterion, rc.Weight


@pytest.mark.parametrize(("train", "rollout", "valid"), [(-math.inf, -1.0, 1), (-1.0, -math.inf, 1), (-1.0, -1.0, 0)])
@pytest.mark.parametrize("outside", ["clamp", "zero"])
def test_extrema_of_weights_where_every_gap_is_infinite(outside, train, rollout, valid, device):
    """Under "propagate" an infinite D has a weight, and extrema of such weights are not those of no token at all."""
    shape = (2, 17)
    for bounds in ({}, {"lower": 0.5, "upper": 2.0}):
        spec = rc.Spec(W.token(**bounds, outside=outside), nonfinite="propagate")
        call = given(spec, torch.full(shape, train), torch.full(shape, rollout), mask=torch.full(shape, valid))
        a, b = (x.statistics.maxima.cpu() for x in check(call, device))
        assert_near(a, b, torch.float32, size=0.0)


def test_whom_a_criterion_of_sequences_tests(device):
    """Every pair of signs of D and of advantages, one of them no number; all of them fail, if they are tested."""
    each = list(itertools.product((0.5, -0.5, 0.0), (0.25, -0.25, -0.0, math.nan)))
    rows = [[one] for one in each] + [list(pair) for pair in itertools.product(each, repeat=2)]
    d, advantages = (torch.tensor([token[i] for row in rows for token in row]) for i in (0, 1))
    offsets = torch.tensor([0, *itertools.accumulate(map(len, rows))])
    criteria = tuple(
        C("ratio", "sequence", "mean", lower=99.0, when=when, drop=drop, label=f"{when} {drop}")
        for when, drop in itertools.product(WHEN, ("unit", "token"))
    )
    for tested in (criteria, criteria[-2:]):
        check(given(rc.Spec(criteria=tested), d - 1.0, d * 0.0 - 1.0, advantages, cu_seqlens=offsets), device, REAL)


@pytest.mark.parametrize("odd", [math.copysign(math.nan, -1.0), math.inf, -math.inf])
def test_odd_external_values(odd, device):
    """A NaN of the caller's own statistic passes no bound, an infinity only an open one."""
    x, external = torch.full((2, 9), -1.0), torch.zeros(2, 9)
    external[1, 8] = odd
    # Other tokens decide: infinity is not the smallest of its sequence, nor minus infinity the largest.
    neutral = {"min": math.inf, "max": -math.inf}
    criteria, passes = [], []
    for side, bound, open_to in (("upper", 0.5, -math.inf), ("lower", -0.5, math.inf)):
        for reduce in (None, *REDUCTIONS):
            unit = {} if reduce is None else {"over": "sequence", "reduce": reduce}
            criteria.append(C("external", name="x", **unit, **{side: bound}, label=str(len(criteria))))
            passes.append(odd in (open_to, neutral.get(reduce)))
    for nonfinite in ("reject", "propagate"):
        spec = rc.Spec(criteria=tuple(criteria), nonfinite=nonfinite)
        out, _ = check(given(spec, x, x, external={"x": external}), device)
        lost = [out.statistics.metrics_async().values()[f"{one.label}/tokens"] for one in criteria]
        assert [n == 0 for n in lost] == passes


def test_log_probs_above_0(device):
    """They are none: their probability is read as 1."""
    train, rollout = torch.tensor([[3.0, -1.0, -0.2, 3.0]]), torch.tensor([[-1.0, 0.5, -0.3, 0.5]])
    criteria = (C("tv", upper=0.3), C("prob_diff", "sequence", "mean", upper=0.1), C("binary_kl", upper=0.1, eps=0.1))
    check(given(rc.Spec(None, criteria, detail="full"), train, rollout), device)


def test_ranges_of_what_is_summed(device):
    """D enters sums within +-1024, other statistics within +-2^37; extrema and tokens are compared as they are."""
    train, rollout = torch.tensor([3000.0, -500.0, -(2.0**70), 0.0, -0.3, -0.4]), torch.zeros(6)
    rollout[3:] = torch.tensor([-20.0, -0.1, -0.2])  # on the clamp, not beyond it
    external = torch.tensor([2.0**39, -(2.0**38), 2.0**36, 0.0, 0.5, 1.0])
    open_ended = {"lower": -1e99, "upper": None}
    sums = [C("k1", "sequence", reduce, **open_ended, label=reduce) for reduce in REDUCTIONS]
    sums += [C(stat, "sequence", "sum", upper=1e99, label=stat) for stat in ("ratio", "abs", "k2", "k3")]
    sums += [C("external", "sequence", "sum", name="x", upper=1e99, label="x"), C("k2", upper=1e99)]
    sums.append(C("k2", "sequence", "max", upper=1e99, label="largest k2"))
    of_tokens = C("external", name="x", **open_ended)
    batch = {"cu_seqlens": torch.tensor([0, 3, 3, 4, 6]), "external": {"x": external}}
    for spec in (
        rc.Spec(W.product(), tuple(sums)),
        rc.Spec(W.geometric(token_clamp=5000.0), (of_tokens, *sums), sums_over="kept", clamp=40.0),
    ):
        out, _ = check(given(spec, train, rollout, **batch), device)
        metrics = out.metrics()
        assert metrics["sum/max"] == -1024.0 + 500.0 + 1024.0
        assert metrics["x/max"] == 2.0**37 - 2.0**37 + 2.0**36


@pytest.mark.parametrize("d", [0.3, -1e-2, 1e-4, -1e-5, 1e-6])
def test_k3_of_a_small_step_does_not_cancel(d, device):
    train = torch.tensor([[d]], device=device)
    stats = {"k3": oracle.k3(train.item()), "k3_reverse": oracle.k3(-train.item())}
    spec = rc.Spec(criteria=tuple(C(stat, upper=1.0, label=stat) for stat in stats))
    metrics = rc.correct(train, torch.zeros_like(train), spec=spec, backend="triton").metrics()
    assert [metrics[f"{stat}/max"] for stat in stats] == near(list(stats.values()), torch.float32, size=0.0)


@pytest.mark.parametrize(("p", "q"), [(0.9, 0.05), (0.05, 0.9)])
def test_the_symmetric_divergence_is_the_larger_of_two(p, q, device):
    train, rollout = (torch.tensor([[math.log(x)]], device=device) for x in (q, p))
    spec = rc.Spec(criteria=(C("binary_kl_symmetric", upper=9.0, label="symmetric"),))
    metrics = rc.correct(train, rollout, spec=spec, backend="triton").metrics()
    both = [a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p))]
    assert metrics["symmetric/max"] == near(max(both), torch.float32)


@pytest.mark.parametrize(("scale", "clamp"), [(1e-4, 20.0), (1e-2, 22.0), (1.0, 40.0), (40.0, 40.0)])
def test_divergences_neither_cancel_nor_overflow(scale, clamp, device):
    """Next to D = 0, where log cosh(D / 2) is D^2 / 8, and where every token of a thread lies at the clamp."""
    d = [scale * x for x in (1.0, -1.0, 0.5, -0.25, 0.0, 0.75, -0.5, 1.0)] * 2
    train = torch.tensor([d], device=device)
    at = [max(-clamp, min(clamp, x)) for x in train[0].tolist()]
    spec = rc.Spec(detail="full", clamp=clamp)
    metrics = rc.correct(train, torch.zeros_like(train), spec=spec, backend="triton").metrics()
    expected = {
        "js_divergence": sum(math.log1p(math.sinh(x / 2) ** 2) / 2 for x in at) / len(at),
        "kl_train_rollout_k3": sum(oracle.k3(-x) for x in at) / len(at),
        "ratio_error_mean": 1.0 + sum(math.expm1(abs(x)) for x in at) / len(at),
    }
    assert {key: metrics[key] for key in expected} == near(expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce", [None, "sum", "max"])
def test_bounds_are_inclusive_to_the_bit(dtype, reduce, device):
    """A value on the bound passes, and fails a bound that float32 would round to it."""
    d = 0.5 + 2.0**-7
    train = torch.tensor([[d]], dtype=dtype, device=device)
    unit = {} if reduce is None else {"over": "sequence", "reduce": reduce}
    criteria, expected = [], []
    for stat, value in {"k1": -d, "abs": d, "external": d}.items():
        named = {"name": "entropy"} if stat == "external" else {}
        for side, bound, passes in (
            ("lower", value, True),
            ("lower", math.nextafter(value, math.inf), False),
            ("upper", value, True),
            ("upper", math.nextafter(value, -math.inf), False),
        ):
            criteria.append(C(stat, **unit, **named, **{side: bound}, label=str(len(criteria))))
            expected.append(0.0 if passes else 1.0)
    spec = rc.Spec(criteria=tuple(criteria))
    out = rc.correct(train, torch.zeros_like(train), rc.Batch(external={"entropy": train}), spec=spec, backend="triton")
    values = out.statistics.metrics_async().values()
    assert [values[f"{i}/tokens"] for i in range(len(criteria))] == expected


@pytest.mark.parametrize(("stat", "grid"), [("k1", 2.0**-28), ("external", 2.0**-38)])
def test_sums_that_decide_are_rounded_to_the_nearest_step(stat, grid, device):
    """On either side of 0 what falls between two steps is rounded, not cut off."""
    name = {"name": "x"} if stat == "external" else {}
    for quarters, nearest in (((1, -1), 0), ((3, 5), 1), ((-3, -5), -1)):
        x = torch.tensor(quarters)[:, None].expand(2, 4).to(device) * (grid / 4)
        total = 4 * nearest * grid * (-1 if stat == "k1" else 1)
        criterion = C(stat, "sequence", "sum", lower=total - 0.4 * grid, upper=total + 0.4 * grid, **name)
        spec = rc.Spec(criteria=(criterion,))
        out = rc.correct(x, torch.zeros_like(x), rc.Batch(external={"x": x}), spec=spec, backend="triton")
        assert out.keep.tolist() == [True, True], (quarters, nearest)


@pytest.mark.parametrize("of_sequences", [False, True])
def test_an_advantage_of_0_has_no_sign(of_sequences, device):
    """Of either zero, of 1 and of -1, where D is 0.5: whom each choice of tokens leaves alone."""
    d = torch.full((4, 1) if of_sequences else (1, 4), 0.5, device=device)
    advantages = torch.tensor([0.0, -0.0, 1.0, -1.0], device=device).view(d.shape)
    unit = {"over": "sequence", "reduce": "mean"} if of_sequences else {}
    wanted = {"positive_advantage": [1, 1, 0, 1], "negative_advantage": [1, 1, 1, 0], "outward": [1, 1, 0, 1]}
    for when, mask in wanted.items():
        spec = rc.Spec(criteria=(C("abs", upper=0.1, when=when, **unit),))
        out = rc.correct(d - 1.0, torch.full_like(d, -1.0), spec=spec, advantages=advantages, backend="triton")
        assert out.mask.int().flatten().tolist() == mask, when


@pytest.mark.parametrize("outside", ["clamp", "zero"])
def test_token_weights_near_0(outside, device):
    """Mean, spread and sample size to float32's rounding of their own size, as on plain torch; divided by that mean."""
    d = -12.0 + 0.3 * torch.randn(6, 90, generator=torch.Generator().manual_seed(0))
    weight = W.token(upper=math.exp(-11.5), outside=outside, normalize="batch", token_clamp=13.0)
    mask = torch.ones(6, 90, dtype=torch.bool)
    mask[:, ::7] = False
    call = d.to(device), torch.zeros(6, 90, device=device)
    with shaped(REAL):
        out = rc.correct(*call, rc.Batch(mask=mask.to(device)), spec=rc.Spec(weight), backend="triton")
    raw = d.double().clamp(min=-13.0).exp()
    inside = raw <= math.exp(-11.5)
    bounded = torch.where(inside, raw, 0.0 if outside == "zero" else math.exp(-11.5))
    found = out.metrics()
    for key, x in (("weight_before_bounds", raw), ("weight", bounded)):
        of_rows = torch.where(mask, x, 0.0).sum(1) / mask.sum(1)
        for name, some in ((key, x[mask]), (f"sequence_mean_{key}", of_rows)):
            wanted = {"mean": some.mean(), "std": some.std(correction=0), "min": some.min(), "max": some.max()}
            wanted["ess"] = some.sum() ** 2 / (some.numel() * some.square().sum())
            got = {part: found[f"{name}_{part}"] for part in wanted}
            assert got == near({part: x.item() for part, x in wanted.items()}, torch.float32, size=0.0), name
    divided = torch.where(mask, bounded / bounded[mask].mean(), 0.0)
    assert_near(out.weights.cpu().double(), divided, torch.float32, size=0.0)

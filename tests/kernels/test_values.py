"""The kernels where values are odd: not finite, at the ends of ranges, on a bound.

Interpreted on a CPU, compiled on a GPU, as in test_correct.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out, random_sequences, rounded
from builders.kernel_cases import (
    BOTH,
    FEW,
    INTERPRETED,
    REAL,
    assert_like_reference,
    batch,
    check,
    fit_and_check,
    fitted,
    over,
    shaped,
    tokens,
)
from builders.rounding import assert_near, near
from oracles import correction as oracle
from rollout_corr.specs.choices import REDUCTIONS, WHEN

pytestmark = INTERPRETED

W = rc.Weight


@pytest.mark.parametrize(
    ("broken", "outside"),
    [(("train",), "clamp"), (("rollout",), "zero"), (("train", "rollout"), "zero"), ((), "clamp")],
)
def test_extrema_of_weights_where_every_gap_is_infinite(outside, broken, device):
    """Under "propagate" an infinite D has a weight, and extrema of such weights are not those of no token at all.

    Whose log-probs are -inf, one sequence after the other; nobody's, but no token is valid.
    """
    sequences = batch(10, (3, 9, 17), invalid=0.3)
    for q, whose in zip(sequences, itertools.cycle(broken or ("",))):
        q.train, q.rollout = ([-math.inf if name == whose else -1.0] * len(q) for name in ("train", "rollout"))
        q.mask = q.mask if broken else [0] * len(q)
    for bounds in ({}, {"lower": 0.5, "upper": 2.0}):
        spec = rc.Spec(W.token(**bounds, outside=outside), nonfinite="propagate")
        laid = lay_out(sequences, "packed_gaps", torch.float32)
        reference = laid.correct(spec)
        with shaped(FEW):
            out = laid.to(device).correct(spec, backend="triton")
        assert_like_reference(out, reference)
        a, b = (x.statistics.maxima.cpu() for x in (out, reference))
        assert_near(a, b, torch.float32, size=0.0)


def test_odd_advantages(device):
    """One that is NaN selects nothing, nor does a 0 of either sign; in a mean only those that are finite count."""
    sequences = batch(4)
    late = [over("abs", "mean", when=when, drop="token", label=when) for when in ("negative_advantage", "outward")]
    spec = fitted(rc.Spec(W.token(), (tokens("abs", when="outward"), *late), "both"), sequences)
    # These fail wherever they test.
    all_of = [over("k2", "sum", upper=1e-12, when=f"{sign}_advantage", label=sign) for sign in ("positive", "negative")]
    spec = replace(spec, criteria=(*spec.criteria, *all_of))
    odd = itertools.cycle((math.nan, -0.0, -math.inf, 0.0, math.inf))
    for s, q in enumerate(sequences):
        q.advantages = [next(odd) if t % 3 == 0 else (0.25, -0.25)[s % 2] for t in range(len(q))]
    laid = lay_out(sequences, "packed_gaps", torch.float32)
    reference = laid.correct(spec)
    with shaped(FEW):
        assert_like_reference(laid.to(device).correct(spec, backend="triton"), reference)


def test_whom_a_criterion_of_sequences_tests(device):
    """Every pair of signs of D and of advantages; all of them fail, if they are tested."""
    each = list(itertools.product((0.5, -0.5), (0.25, -0.25, 0.0)))
    made = [[one] for one in each] + [list(pair) for pair in itertools.product(each, repeat=2)]
    sequences = [
        oracle.Sequence([d - 1.0 for d, _ in q], [-1.0] * len(q), [1] * len(q), [a for _, a in q]) for q in made
    ]
    criteria = tuple(
        over("abs", "mean", upper=0.25, when=when, drop=drop, label=f"{when} {drop}")
        for when, drop in itertools.product(WHEN, ("unit", "token"))
    )
    for tested in (criteria, criteria[-2:]):
        with shaped(FEW):
            check(sequences, rc.Spec(criteria=tested), "packed_gaps", device)


@pytest.mark.parametrize("odd", [math.copysign(math.nan, -1.0), math.inf, -math.inf])
def test_odd_external_values(odd, device):
    """A NaN of the caller's own statistic passes no bound, an infinity only an open one."""
    sequences = batch(5, (3, 9, 17, 8), invalid=0.0)
    sequences[1].external["entropy"][8] = odd
    of = {"name": "entropy", "upper": 0.5}
    tests = (tokens("external", **of), *(over("external", reduce, **of, label=reduce) for reduce in REDUCTIONS))
    low = (tokens("external", name="entropy", lower=-0.5, upper=None, label="low"),)
    low += tuple(over("external", r, name="entropy", lower=-0.5, upper=None, label=f"low {r}") for r in REDUCTIONS)
    laid = lay_out(sequences, "packed_gaps", torch.float32)
    for nonfinite in ("reject", "propagate"):
        spec = rc.Spec(criteria=tests + low, nonfinite=nonfinite)
        reference = laid.correct(spec)
        with shaped(FEW):
            out = laid.to(device).correct(spec, backend="triton")
        assert_like_reference(out, reference)
        expected = oracle.correct(rounded(sequences, torch.float32), spec)
        assert [laid.read(out.mask), out.keep.tolist()] == [expected.mask, expected.keep]


def test_log_probs_above_0(device):
    """They are none: their probability is read as 1."""
    sequences = batch(6, invalid=0.1)
    for q in sequences:
        q.train[::3] = [3.0 if m else x for x, m in zip(q.train[::3], q.mask[::3], strict=True)]
        q.rollout[::4] = [0.5 if m else x for x, m in zip(q.rollout[::4], q.mask[::4], strict=True)]
    spec = rc.Spec(None, (tokens("tv"), over("prob_diff", "mean", **BOTH), tokens("binary_kl", eps=0.1)), detail="full")
    fit_and_check(sequences, spec, "packed_gaps", device)


def test_statistics_of_tokens_beyond_the_clamp(device):
    """What is made of exp is reported of the clamped D."""
    train, rollout = torch.tensor([[-200.0, -1.0, -1.0]]), torch.tensor([[-1.0, -200.0, -1.5]])
    stats = ("k3", "k3_reverse", "ratio_error", "ratio_deviation")
    spec = rc.Spec(criteria=tuple(tokens(stat, upper=2.0) for stat in stats))
    out = rc.correct(train.to(device), rollout.to(device), spec=spec, backend="triton")
    assert_like_reference(out, rc.correct(train, rollout, spec=spec))


def test_ranges_of_what_is_summed(device):
    """D enters sums within +-1024, other statistics within +-2^37; extrema and tokens are compared as they are."""
    sequences = random_sequences(0, (3, 17, 0, 1), invalid=0.0)
    sequences[0].train[:], sequences[0].rollout[:] = [3000.0, -500.0, 2.0**40], [0.0] * 3
    sequences[3].train[:], sequences[3].rollout[:] = [0.0], [-20.0]  # on the clamp, not beyond it
    sequences[0].external["entropy"] = [2.0**39, -(2.0**38), 2.0**36]
    open_ended = {"lower": -1e99, "upper": None}
    sums = [over("k1", reduce, **open_ended, label=reduce) for reduce in REDUCTIONS]
    sums += [over(stat, "sum", upper=1e99, label=stat) for stat in ("ratio", "abs", "k2", "k3")]
    sums += [over("external", "sum", name="entropy", upper=1e99, label="entropy"), tokens("k2", upper=1e99)]
    sums.append(over("k2", "max", upper=1e99, label="largest k2"))
    for spec in (
        rc.Spec(W.product(), tuple(sums)),
        rc.Spec(
            W.geometric(token_clamp=5000.0),
            (tokens("external", name="entropy", **open_ended), *sums),
            sums_over="kept",
            clamp=40.0,
        ),
    ):
        with shaped(FEW):
            check(sequences, spec, "packed_gaps", device)


@pytest.mark.parametrize("d", [0.3, -1e-2, 1e-4, -1e-5, 1e-6])
def test_k3_of_a_small_step_does_not_cancel(d, device):
    train = torch.tensor([[d]], device=device)
    stats = {"k3": oracle.k3(train.item()), "k3_reverse": oracle.k3(-train.item())}
    spec = rc.Spec(criteria=tuple(tokens(stat, label=stat) for stat in stats))
    metrics = rc.correct(train, torch.zeros_like(train), spec=spec, backend="triton").metrics()
    assert [metrics[f"{stat}/max"] for stat in stats] == near(list(stats.values()), torch.float32)


@pytest.mark.parametrize(("p", "q"), [(0.9, 0.05), (0.05, 0.9)])
def test_the_symmetric_divergence_is_the_larger_of_two(p, q, device):
    train, rollout = (torch.tensor([[math.log(x)]], device=device) for x in (q, p))
    spec = rc.Spec(criteria=(rc.Criterion("binary_kl_symmetric", upper=9.0, label="symmetric"),))
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
            criteria.append(rc.Criterion(stat, **unit, **named, **{side: bound}, label=str(len(criteria))))
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
        criterion = over(stat, "sum", lower=total - 0.4 * grid, upper=total + 0.4 * grid, **name)
        spec = rc.Spec(criteria=(criterion,))
        out = rc.correct(x, torch.zeros_like(x), rc.Batch(external={"x": x}), spec=spec, backend="triton")
        assert out.keep.tolist() == [True, True], (quarters, nearest)


def test_weights_around_1_that_are_zeroed_outside(device):
    """The spread of weights whose mean is above a half is summed around 1: a zeroed one lies at -1 there."""
    d = 0.15 * torch.randn(2, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float()
    spec = rc.Spec(W.token(lower=0.8, upper=1.2, outside="zero"))
    found = rc.correct(d.to(device), torch.zeros_like(d).to(device), spec=spec, backend="triton").metrics()
    ratio = d.double().exp()
    weights = torch.where((ratio >= 0.8) & (ratio <= 1.2), ratio, 0.0)
    assert 0.5 < weights.mean() < 0.9
    wanted = {"weight_mean": weights.mean().item(), "weight_std": weights.std(correction=0).item()}
    assert {name: found[name] for name in wanted} == near(wanted, torch.float32)


@pytest.mark.parametrize("of_sequences", [False, True])
def test_an_advantage_of_0_has_no_sign(of_sequences, device):
    """Of either zero, of 1 and of -1, where D is 0.5: whom each choice of tokens leaves alone."""
    d = torch.full((4, 1) if of_sequences else (1, 4), 0.5, device=device)
    advantages = torch.tensor([0.0, -0.0, 1.0, -1.0], device=device).view(d.shape)
    unit = {"over": "sequence", "reduce": "mean"} if of_sequences else {}
    wanted = {"positive_advantage": [1, 1, 0, 1], "negative_advantage": [1, 1, 1, 0], "outward": [1, 1, 0, 1]}
    for when, mask in wanted.items():
        spec = rc.Spec(criteria=(rc.Criterion("abs", upper=0.1, when=when, **unit),))
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

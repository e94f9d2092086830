"""Numbers at the edge: ranges, grids, tiny and huge steps, and bounds to the bit."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from decimal import Decimal, localcontext

import pytest
import torch

import rollout_corr as rc
from builders import judges
from builders.invariance import PACKED
from builders.rounding import FORMULA, assert_near, margin, near
from builders.weights import KINDS, weight_of
from frozen.calls import correct_call
from frozen.generator import stated
from frozen.runners import run_as
from oracles import numbers
from rollout_corr.definition.tokens import GRID_OF_D, k3, to_grid
from rollout_corr.specs.choices import REDUCTIONS

INF = math.inf
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ranges_of_what_is_summed(dtype):
    """D enters sums within +-1024, other statistics and what metrics sum within +-2^37; extrema are D itself."""
    tokens = stated(train=[[3000.0, -500.0, 2.0**40]], entropy=[[2.0**39, -(2.0**38), 2.0**36]])

    def judged(spec):
        call = correct_call(random.Random(0), spec, part=tokens, layout=PACKED, dtypes=(dtype, dtype), extras=0.0)
        out = call.corrected(spec, "torch")
        judges.judge_correction(call, out)
        return out

    k1 = [rc.Criterion("k1", over="sequence", reduce=r, lower=-1e99, label=r) for r in REDUCTIONS]
    ratios = [rc.Criterion("ratio", over="sequence", reduce=r, upper=1e99, label="ratio " + r) for r in REDUCTIONS]
    others = [rc.Criterion(stat, over="sequence", reduce="sum", upper=1e99, label=stat) for stat in ("abs", "k2", "k3")]
    entropy = rc.Criterion("external", over="sequence", reduce="sum", name="entropy", upper=1e99, label="entropy")
    spec = rc.Spec(rc.Weight.product(), (*k1, *ratios, *others, entropy))
    out = judged(spec)
    metrics = out.metrics()
    assert (metrics["sum/mean"], metrics["min/min"], metrics["max/mean"]) == (-1548.0, -(2.0**40), 500.0)
    assert (metrics["logratio_max"], metrics["logratio_mean"], metrics["entropy/mean"]) == (2.0**40, 516.0, 2.0**36)
    assert out.keep.tolist() == [False]

    # The same over survivors, and after a token clamp that is wider than the range.
    first = rc.Criterion("external", name="entropy", lower=0.0, label="first")
    late = [replace(criterion, token_clamp=5000.0) for criterion in (*k1, *others)]
    weight = rc.Weight.geometric(token_clamp=5000.0)
    judged(rc.Spec(weight, (first, *late, *ratios, entropy), sums_over="kept", clamp=40.0))


def keeps(values, criterion, dtype):
    """Tell whether one sequence with these D, and these external values, is kept."""
    train = torch.as_tensor(values, dtype=dtype)[None]
    return rc.correct(
        train, torch.zeros_like(train), rc.Batch(external={"x": train}), spec=rc.Spec(criteria=(criterion,))
    ).keep.item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_decide_run_on_a_grid_below_fp64(dtype):
    """D to the nearest 2^-28, other statistics to the nearest 2^-38; fp64 sums plainly."""
    for stat, grid in (("k1", 2.0**-28), ("external", 2.0**-38)):
        unit = {"stat": stat, "name": "x" if stat == "external" else None, "over": "sequence", "reduce": "sum"}
        for quarters, nearest in ((1, 0), (3, 1), (-1, 0), (-3, -1), (5, 1), (6, 2), (-6, -2)):
            plain = quarters if dtype == torch.float64 else 4 * nearest
            total = -plain * grid if stat == "k1" else plain * grid
            values = [quarters * grid / 4] * 4
            for side, away in (("lower", -0.4), ("upper", 0.4)):
                for bound, passes in ((total + away * grid, True), (total - away * grid, False)):
                    criterion = rc.Criterion(**unit, **{side: bound})
                    assert keeps(values, criterion, dtype) == passes, (stat, quarters, side, bound / grid)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_k3_of_a_small_step_does_not_cancel(dtype):
    """In fp32 e^D - 1 - D is 0 for D = 1e-4, and expm1(D) - D off by 3e-4."""
    for d in (0.4, 1e-2, 1e-3, 1e-4, 1e-5, -1e-4, -0.3):
        train = torch.tensor([[d]], dtype=dtype)
        stats = {"k3": numbers.k3(train.item()), "k3_reverse": numbers.k3(-train.item())}
        spec = rc.Spec(criteria=tuple(rc.Criterion(stat, upper=9.0, label=stat) for stat in stats))
        metrics = rc.correct(train, torch.zeros_like(train), spec=spec).metrics()
        for stat, value in stats.items():
            assert metrics[f"{stat}/max"] == near(value, dtype, terms=4, size=0.0)


@pytest.mark.parametrize("level", KINDS)
def test_a_mean_weight_is_divided_by_unless_it_is_1e_8_or_less(level):
    for d, weight in ((-18.0, 1.0), (-3.0, 1.0), (-19.0, math.exp(-19)), (-30.0, math.exp(-20))):
        train = torch.tensor([[d]], dtype=torch.float64)
        out = rc.correct(train, torch.zeros_like(train), spec=rc.Spec(weight_of(level, normalize="batch")))
        assert out.weights.item() == near(weight, terms=FORMULA, size=0.0), d


@pytest.mark.parametrize("d", [-3.0, -10.0, -20.0])
@pytest.mark.parametrize("way", ["blocks", "whole"])
def test_the_smallest_weight_is_a_weight(d, way):
    with run_as(way):
        out = rc.correct(torch.tensor([[d, 0.0]]), torch.zeros(1, 2), spec=rc.Spec(rc.Weight.token()))
    for found in (out.weights[0, 0].item(), *(out.metrics()[f"weight_{name}min"] for name in ("", "before_bounds_"))):
        assert found == near(math.exp(d), torch.float32, terms=1, size=0.0)


@pytest.mark.parametrize("level", KINDS)
@pytest.mark.parametrize("way", ["blocks", "small blocks", "whole"])
@pytest.mark.parametrize("center", [-1.0, -8.0, -17.0])
def test_weights_near_0_keep_their_mean_spread_and_sample_size(center, way, level):
    """Sums of w - 1 alone gave a standard deviation of 0 at e^-8, and a sample size of 0 at e^-12."""
    generator = torch.Generator().manual_seed(0)
    d = center / (7 if level in ("product", "prefix") else 1) + 0.3 * torch.randn(30, 7, generator=generator)
    log_weight = d.double()
    if level == "prefix":
        log_weight = log_weight.cumsum(1)
    elif level != "token":
        log_weight = log_weight.sum(1, keepdim=True).expand(30, 7) / (7 if level == "geometric" else 1)
    w = log_weight.exp()
    with run_as(way):
        out = rc.correct(d, torch.zeros_like(d), spec=rc.Spec(weight_of(level, normalize="batch")))
    found = out.metrics()
    of_sequences = "sequence_weight" if level in ("product", "geometric") else "sequence_mean_weight"
    for key, x in (("weight", w), (of_sequences, w.mean(1))):
        for side in ("", "_before_bounds"):
            assert_moments(found, f"{key}{side}", x)
    assert_near(out.weights.double(), w / w.mean(), torch.float32, size=0.0)


def assert_moments(found, key, x):
    """Compare the metrics of a weight with plain formulas in float64."""
    wanted = {"mean": x.mean(), "std": x.std(correction=0), "min": x.min(), "max": x.max()}
    wanted["ess"] = x.sum() ** 2 / (x.numel() * x.square().sum())
    for name, value in wanted.items():
        assert found[f"{key}_{name}"] == near(value.item(), torch.float32, size=0.0), (key, name)


@pytest.mark.parametrize("level", ["product", "geometric"])
def test_a_batch_mean_of_sequence_weights_near_0_is_exact(level):
    """A sum of w - 1 has no digit of w left below 1e-16: weights of 5 were off by 8e-11 at a mean of 2e-6."""
    d = torch.tensor([[-13.0], [-19.0], [-17.0]], dtype=torch.float64)
    out = rc.correct(d, torch.zeros_like(d), spec=rc.Spec(weight_of(level, normalize="batch")))
    wanted = d.exp() / d.exp().mean()
    assert_near(out.weights, wanted, terms=FORMULA, size=0.0)
    assert out.metrics()["weight_divisor"] == near(d.exp().mean().item(), terms=FORMULA, size=0.0)


def test_spreads_that_are_small_do_not_cancel():
    """Weights of 1 +- 1e-6 and probabilities of almost 1 keep their deviation and correlation in fp32."""
    d = torch.tensor([[1e-6, -1e-6] * 500])
    metrics = rc.correct(
        -1.0 + d.double(), torch.full((1, 1000), -1.0).double(), spec=rc.Spec(rc.Weight.token())
    ).metrics()
    assert metrics["weight_std"] == near(1e-6, torch.float32, size=0.0)
    assert metrics["logratio_std"] == near(1e-6, torch.float32, size=0.0)
    assert metrics["kl_rollout_train_k3"] == near(5e-13, torch.float32, size=0.0)
    generator = torch.Generator().manual_seed(0)
    rollout = -1e-3 * torch.rand(1, 4000, generator=generator)
    train = rollout - 2e-4 * torch.rand(1, 4000, generator=generator)
    full = rc.Spec(detail="full")
    wanted = rc.correct(train.double(), rollout.double(), spec=full).metrics()["prob_correlation"]
    assert rc.correct(train, rollout, spec=full).metrics()["prob_correlation"] == near(wanted, torch.float32, size=4.0)
    for n in (1, 7, 100):
        constant = rc.correct(torch.full((1, n), -1.2), torch.full((1, n), -1.3), spec=full)
        assert constant.metrics()["prob_correlation"] == 0.0


@pytest.mark.parametrize(
    ("over", "dtype"),
    [(over, DTYPES[i % 3]) for i, over in enumerate((None, None, None, *REDUCTIONS))],
)
def test_bounds_are_inclusive_to_the_bit(dtype, over):
    """A value on the bound passes; a bound hardly beyond it does not, though float32 would round it back.

    Hardly: the next float64, or for k2, whose bound becomes one of |D| by a square root, 1e-9.
    """
    unit = {} if over is None else {"over": "sequence", "reduce": over}
    d = 0.5 + 2.0**-7
    values = {"k1": -d, "abs": d, "k2": d * d / 2, "external": d}
    for stat, value in values.items():
        arguments = {"stat": stat, "name": "entropy" if stat == "external" else None, **unit}
        above, below = math.nextafter(value, INF), math.nextafter(value, -INF)
        if stat == "k2":
            above, below = value * (1 + 1e-9), value * (1 - 1e-9)
        bounds = [("lower", value, True), ("lower", above, False), ("upper", value, True), ("upper", below, False)]
        for (side, bound, passes), is_open in itertools.product(bounds, (True, False)):
            least = 1e-9 if stat in ("abs", "k2") else -9.0
            ends = {side: bound} if is_open else {"lower": least, "upper": 9.0, side: bound}
            out = rc.correct(
                torch.tensor([[d]], dtype=dtype),
                torch.tensor([[0.0]], dtype=dtype),
                rc.Batch(external={"entropy": torch.tensor([[d]], dtype=dtype)}),
                spec=rc.Spec(criteria=(rc.Criterion(**arguments, **ends),)),
            )
            assert out.mask.tolist() == [[passes]], (stat, ends, value)
    for bound in (4e38, 1e300, INF):
        for side, passes in (("upper", True), ("lower", False)):
            spec = rc.Spec(criteria=(rc.Criterion("abs", **unit, **{side: bound}),))
            out = rc.correct(torch.full((1, 1), -1e30, dtype=dtype), torch.zeros(1, 1, dtype=dtype), spec=spec)
            assert out.mask.tolist() == [[passes]], (side, bound)
    for bound in ({"lower": 1.0}, {"upper": 1.0}):
        spec = rc.Spec(criteria=(rc.Criterion("ratio", **unit, **bound),))
        assert rc.correct(torch.zeros(1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype), spec=spec).mask.tolist() == [
            [True]
        ]


@pytest.mark.parametrize("stat", ["binary_kl", "binary_kl_reverse", "binary_kl_symmetric"])
def test_binary_kl_of_nearly_certain_tokens_does_not_cancel(stat):
    """1 - p has no digits left in float32 where p is next to 1, as it is for most tokens."""
    rollout = -torch.tensor([[1e-3, 1e-5, 3e-6, 2e-7]])
    train = rollout * torch.tensor([[1.3, 0.6, 2.0, 1.5]])
    spec = rc.Spec(criteria=(rc.Criterion(stat, upper=1.0, eps=1e-12, label="kl"),))
    single, double = (
        rc.correct(train.to(x), rollout.to(x), spec=spec).metrics() for x in (torch.float32, torch.float64)
    )
    for name in ("kl/mean", "kl/max", "kl/min"):
        # A difference of terms up to 3e-4.
        assert single[name] == near(double[name], torch.float32, size=3e-4), name


# --- formulas of a token, reductions of a sequence ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_accurate_and_knows_no_neighbors(dtype):
    """Against 60 decimal digits; it cancels most just above |D| = 1/2, where the series ends."""
    steps = [sign * 10.0 ** (i / 40) for i in range(-320, 52) for sign in (-1, 1)]
    d = torch.tensor([*steps, *(i / 1000 for i in range(-600, 601)), 0.0], dtype=dtype)
    with localcontext() as context:
        context.prec = 60
        exact = [float(Decimal(x).exp() - 1 - Decimal(x)) for x in d.tolist()]
    wanted = torch.tensor(exact, dtype=torch.float64)
    assert ((k3(d).double() - wanted).abs() <= margin(dtype, terms=4) * wanted).all()
    alone = torch.cat([k3(x[None]) for x in d])
    assert torch.equal(alone, k3(d))


def test_the_grid_is_rounded_once():
    """Whole numbers, those of trunc(grid * x + copysign(0.5, x)) in float32, which is what the kernels compute."""
    halves = torch.arange(-9, 10) / (2.0 * GRID_OF_D)
    odd = torch.tensor([2.0**23 - 1, 2.0**23 + 1, 2.0**24 - 1, 2.0**24 + 2, 2.0**38]) / GRID_OF_D
    x = torch.cat([halves, halves * 0.999, odd, -odd, torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e-39])])
    found = to_grid(x, GRID_OF_D)
    assert torch.equal(found, (x * GRID_OF_D + torch.copysign(torch.tensor(0.5), x)).trunc())
    assert found.tolist()[:4] == [-5.0, -4.0, -4.0, -3.0]

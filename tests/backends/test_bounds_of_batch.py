"""Bounds that the batch or each group decides: `correct` against loops, in every layout, in blocks and in one piece."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, lay_out
from builders.coarse import abs_d, coarse, mask_of, rejects_nonfinite, within
from builders.launches import Reads
from builders.rounding import near
from oracles.bounds_of_batch import kept
from rollout_corr.backends import sequence_groups, whole
from rollout_corr.backends.run import CORRECTIONS

pytestmark = pytest.mark.usefixtures("one_thread")

# The third sequence is all invalid, so group 3 is empty; group 4 has no sequence, and group 2 has one.
INDEX = [0, 1, 3, 0, 2, 1, 0, 1]
IN_GROUPS = {"group_index": torch.tensor(INDEX), "group_count": 5}
RULES = [
    {"upper": rc.Quantile(0.8)},
    {"lower": rc.Quantile(0.2), "upper": rc.Quantile(0.9)},
    {"upper": rc.Bottom(5)},
    {"upper": rc.Bottom(1000)},
    {"lower": rc.TopK(share=0.4)},
    {"upper": rc.MeanBelow(0.125)},
    {"lower": 0.0625, "upper": rc.Quantile(0.75)},
    {"upper": rc.Quantile(0.7, within="group")},
    {"lower": rc.TopK(2, within="group"), "upper": rc.Quantile(0.9, "group")},
    {"upper": rc.Bottom(1000, within="group")},
    {"lower": rc.Quantile(0.4), "upper": rc.Bottom(share=0.5, within="group")},
    {"upper": rc.MeanBelow(0.2, within="group")},
]


def expected(rules, values):
    """The places that every bound keeps, each rule among the values that it looks at."""
    good = set(values)
    for side, rule in rules.items():
        groups = {}
        for place, x in values.items():
            group = (
                getattr(rule, "within", "batch") == "group" and INDEX[place[0] if isinstance(place, tuple) else place]
            )
            groups.setdefault(group, {})[place] = x
        good &= {place for own in groups.values() for place in within({side: rule}, own)}
    return good


@pytest.mark.parametrize(
    ("rules", "dtype"), list(zip(RULES, itertools.cycle((torch.float32, torch.float64, torch.bfloat16)))), ids=str
)
def test_tokens_in_every_layout(rules, dtype, way):
    spec = rc.Spec(criteria=(rc.Criterion("abs", **rules),))
    for seed, layout in enumerate(LAYOUTS[::2]):
        batch = coarse(seed, broken=seed == 1)
        laid = lay_out(batch, layout, dtype)
        found = laid.correct(spec, **IN_GROUPS)
        good = expected(rules, abs_d(batch))
        bad = rejects_nonfinite(batch)
        assert laid.read(found.mask) == mask_of(batch, {(s, t) for s, t in good if s not in bad}), (seed, layout)
        assert found.keep.tolist() == [s not in bad for s in range(len(batch))]


@pytest.mark.parametrize("when", ["negative_advantage", "positive_advantage"])
def test_those_that_are_not_tested_are_not_the_batch(when, way):
    spec = rc.Spec(criteria=(rc.Criterion("abs", upper=rc.Quantile(0.5), when=when),))
    sign = -1.0 if when == "negative_advantage" else 1.0
    for seed in range(4):
        batch = coarse(seed)
        values = abs_d(batch)
        tested = {(s, t): x for (s, t), x in values.items() if batch[s].advantages[t] == sign}
        assert 0 < len(tested) < len(values)
        good = (set(values) - set(tested)) | within({"upper": rc.Quantile(0.5)}, tested)
        laid = lay_out(batch, "packed", torch.float32)
        assert laid.read(laid.correct(spec).mask) == mask_of(batch, good)


@pytest.mark.parametrize(
    ("sums_over", "drop", "among"),
    [
        ("valid", "unit", "batch"),
        ("kept", "sequence", "batch"),
        ("kept", "token", "batch"),
        ("valid", "unit", "group"),
        ("kept", "unit", "group"),
    ],
)
def test_sequences_after_tokens(sums_over, drop, among, way):
    """With sums_over="kept" the sequences' values, and so their bound, depend on the tokens' bound."""
    token, unit = {"upper": rc.Quantile(0.7, among)}, {"upper": rc.Bottom(3 if among == "batch" else 1, within=among)}
    spec = rc.Spec(
        criteria=(rc.Criterion("abs", over="sequence", reduce="sum", drop=drop, **unit), rc.Criterion("abs", **token)),
        sums_over=sums_over,
    )
    for seed in range(6):
        batch = coarse(seed)
        values = abs_d(batch)
        good = expected(token, values)
        sums = {}
        for s, t in good if sums_over == "kept" else values:
            sums[s] = sums.get(s, 0.0) + values[s, t]
        standing = expected(unit, sums)
        laid = lay_out(batch, "padded_left", torch.float32)
        found = laid.correct(spec, **IN_GROUPS)
        lost = set(sums) - standing
        assert laid.read(found.mask) == mask_of(batch, {(s, t) for s, t in good if s not in lost})
        # A sequence that loses its tokens one by one is kept.
        assert found.keep.tolist() == [drop == "token" or s not in lost for s in range(len(batch))]


@pytest.mark.parametrize(
    ("rule", "keep", "lowest"),
    [(rc.Bottom(2), [True, True, False, True], 0.5), (rc.Bottom(1, within="group"), [True, False, False, True], 0.0)],
)
def test_turns(rule, keep, lowest, way):
    train = torch.tensor([0.0, 0.5, 0.0, 1.0, 2.0, 0.25, 0.25]) - 3.0
    given = {"cu_seqlens": torch.tensor([0, 3, 7]), "groups": rc.Groups(size=1)}
    given["turns"] = torch.tensor([0, 1, 3, 5, 7])  # sums of |D|: 0, 0.5 | 3, 0.5
    spec = rc.Spec(criteria=(rc.Criterion("abs", over="turn", reduce="sum", upper=rule),))
    found = rc.correct(train, torch.full((7,), -3.0), rc.Batch(**given), spec=spec)
    assert found.keep_turns.tolist() == keep
    metrics = found.metrics()
    assert (metrics["turn_sum_abs/upper_min"], metrics["turn_sum_abs/upper_max"]) == (lowest, 0.5)
    nothing = rc.correct(train, train, rc.Batch(mask=torch.zeros(7), **given), spec=spec)
    assert nothing.metrics()["turn_sum_abs/upper_max"] == math.inf


@pytest.mark.parametrize("layout", ["packed", "padded_right", "list"])
def test_a_batch_without_sequences(layout, way):
    """No group has a bound, and so the side is open."""
    criterion = rc.Criterion("k1", lower=rc.Quantile(0.2, within="group"), upper=rc.Bottom(1, within="group"))
    laid = lay_out([], layout)
    out = laid.correct(rc.Spec(criteria=(criterion,)), group_index=torch.zeros(0, dtype=torch.int64))
    assert out.keep.shape == (0,) and out.metrics()[f"{criterion.label}/upper_max"] == math.inf


@pytest.mark.parametrize("side", ["lower", "upper"])
@pytest.mark.parametrize(("stat", "over", "reduce"), [("abs", "sequence", "mean"), ("k3", "turn", "sum")])
def test_a_quantile_keeps_its_share_of_float64_sums(stat, over, reduce, side):
    """Sums round: in another order one would lie an ulp beyond the bound, which is one of them."""
    generator = torch.Generator().manual_seed(0)
    spec = rc.Spec(criteria=(rc.Criterion(stat, over=over, reduce=reduce, label="it", **{side: rc.Quantile(0.5)}),))
    for _ in range(60):
        rows, width = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((3, 10), (5, 60)))
        rollout = -torch.rand(rows, width, dtype=torch.float64, generator=generator)
        train = rollout + 0.1 * torch.randn(rows, width, dtype=torch.float64, generator=generator)
        mask = torch.rand(rows, width, generator=generator) < 0.9
        turns = torch.arange(width).expand(rows, width) // 7
        found = rc.correct(train, rollout, rc.Batch(mask=mask, turns=turns if over == "turn" else None), spec=spec)
        keep = found.keep if over == "sequence" else found.keep_turns
        values = torch.where(mask, (train - rollout).abs() if stat == "abs" else (train - rollout).expm1(), 0.0)
        assert keep.double().mean() >= 0.5 and values.any()


def test_no_read_on_a_device(monkeypatch):
    laid = lay_out(coarse(2), "padded_right", torch.float32)
    monkeypatch.setitem(CORRECTIONS, "blocks", whole.run_whole)
    monkeypatch.setattr(sequence_groups.torch, "aminmax", lambda x: (0, 4))
    spec = rc.Spec(criteria=(rc.Criterion("abs", upper=rc.MeanBelow(0.2, within="group")),))
    with Reads() as mode:
        laid.correct(spec, **IN_GROUPS)
    assert not mode.reads


def test_the_bound_is_a_metric_of_each_call():
    spec = rc.Spec(criteria=(rc.Criterion("ratio", lower=rc.TopK(2), upper=rc.Quantile(0.5)),))
    rollout = torch.full((1, 4), -3.0)
    one, other = (
        rc.correct(rollout + torch.tensor([values]), rollout, spec=spec)
        for values in ([0.0, 0.5, 1.0, 1.5], [0.0, 0.25, 2.0, 2.0])
    )
    found = one.statistics.merge(other.statistics).metrics()
    wanted = {"upper_min": 0.25, "upper_max": 0.5, "lower_min": 1.0, "lower_max": 2.0}
    for key, value in wanted.items():
        assert found[f"token_ratio/{key}"] == near(math.exp(value))
    assert one.metrics()["token_ratio/upper_max"] == one.metrics()["token_ratio/upper_min"] == math.exp(0.5)
    nothing = rc.correct(rollout, rollout, mask=torch.zeros(1, 4), spec=spec).metrics()
    assert nothing["token_ratio/upper_max"] == math.inf and nothing["token_ratio/lower_min"] == 0.0
    assert rc.Statistics.nothing(spec, extra=one.statistics.extra).metrics()["token_ratio/upper_max"] == 0.0


@pytest.mark.parametrize("nonfinite", ["neutral", "propagate"])
def test_what_is_not_finite(nonfinite, way):
    """Neutral tokens have the value 0; infinity is the largest value of all, and NaN is none and never kept."""
    train = torch.tensor([[-1.0, math.nan, -2.0, math.inf, -3.0, -1.5]])
    rollout = torch.full((1, 6), -1.0)
    spec = rc.Spec(criteria=(rc.Criterion("abs", upper=rc.Bottom(3)),), nonfinite=nonfinite)
    found = rc.correct(train, rollout, spec=spec)
    wanted = [1, 1, 0, 1, 0, 0] if nonfinite == "neutral" else [1, 0, 1, 0, 0, 1]
    assert found.mask.tolist() == [list(map(bool, wanted))]


def test_the_loss_of_what_is_kept():
    """Inside `policy_loss`, also for a criterion of the new policy; bounds have no gradient."""
    batch = coarse(1)
    laid = lay_out(batch, "packed", torch.float64)
    valid = laid.mask
    new, old, rollout, advantages = (
        torch.where(valid, x, 0.0) for x in (laid.train + 0.125, laid.train, laid.rollout, laid.advantages)
    )
    spec = rc.Spec(
        weight=rc.Weight.token(upper=2.0),
        criteria=(
            rc.Criterion("k2", upper=rc.MeanBelow(0.1)),
            rc.Criterion("abs", upper=rc.Quantile(0.9), of="new/rollout"),
        ),
    )
    given = {"mask": valid, "old_logp": old, "cu_seqlens": laid.cu_seqlens}
    x = new.clone().requires_grad_()
    fused = rc.policy_loss(x, advantages, rollout_logp=rollout, spec=spec, **given)
    fused.value.backward()
    d, e = (old - rollout).abs(), (new - rollout).abs()
    places = valid.nonzero().squeeze(1).tolist()
    good = torch.zeros_like(valid)
    good[places] = torch.tensor(kept(rc.MeanBelow(0.1), "upper", (d * d / 2)[places].tolist())) & torch.tensor(
        kept(rc.Quantile(0.9), "upper", e[places].tolist())
    )
    assert torch.equal(fused.mask, good) and 0 < int(good.sum()) < len(places)
    y = new.clone().requires_grad_()
    weights = torch.where(valid, (old - rollout).exp().clamp(max=2.0), 0.0)
    plain = rc.policy_loss(y, advantages, correction=rc.Factors(weights=weights, mask=good), **given)
    plain.value.backward()
    assert torch.equal(fused.value, plain.value) and torch.equal(x.grad, y.grad)
    assert fused.metrics()["token_k2/upper_max"] > 0.0


def test_inside_a_compiled_function():
    spec = rc.Spec(criteria=(rc.Criterion("abs", over="sequence", reduce="mean", upper=rc.Quantile(0.6)),))
    laid = lay_out(coarse(0), "padded_right", torch.float32)

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(train, rollout, mask):
        found = rc.correct(train, rollout, mask=mask, spec=spec)
        return found.mask, found.keep, found.statistics.sums, found.statistics.maxima

    mask, keep, sums, maxima = compiled(laid.train, laid.rollout, laid.mask)
    eager = laid.correct(spec)
    assert torch.equal(mask, eager.mask) and torch.equal(keep, eager.keep)
    assert torch.equal(maxima[-2:], eager.statistics.maxima[-2:]) and sums.shape == eager.statistics.sums.shape

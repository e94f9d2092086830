"""Bounds that the batch decides: `correct` beside loops, in every layout, in blocks, in one piece and over ranks."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, lay_out
from builders.split_cases import Rank
from builders.threaded_ranks import Ranks
from oracles.bounds_of_batch import kept
from oracles.correction import Sequence

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = [
    {"upper": rc.Quantile(0.8)},
    {"lower": rc.Quantile(0.2), "upper": rc.Quantile(0.9)},
    {"upper": rc.Bottom(5)},
    {"upper": rc.Bottom(1000)},
    {"lower": rc.TopK(share=0.4)},
    {"upper": rc.MeanBelow(0.125)},
    {"lower": 0.0625, "upper": rc.Quantile(0.75)},
]


def coarse(seed, lengths=(5, 1, 7, 0, 4, 6, 9, 3), broken=False):
    """Sequences whose D is a multiple of 1/4, so that sums are exact and ties are many; the third is all invalid."""
    rng = random.Random(seed)
    made = []
    for s, length in enumerate(lengths):
        mask = [int(s != 2 and rng.random() > 0.2) for _ in range(length)]
        rollout = [-rng.randrange(4, 16) / 4 for _ in range(length)]
        train = [x + rng.choice((-1, 0, 0, 1, 2, 3)) / 4 for x in rollout]
        advantages = [rng.choice((-1.0, 0.0, 1.0)) for _ in range(length)]
        for t, valid in enumerate(mask):
            if not valid:
                train[t], rollout[t], advantages[t] = (rng.choice((math.nan, math.inf, -1e10)) for _ in range(3))
            elif broken and rng.random() < 0.1:
                train[t] = rng.choice((math.nan, -math.inf))
        made.append(Sequence(train, rollout, mask, advantages))
    return made


def abs_d(batch):
    """|D| of every valid token whose D is finite, by sequence and place."""
    return {
        (s, t): abs(one.train[t] - one.rollout[t])
        for s, one in enumerate(batch)
        for t, valid in enumerate(one.mask)
        if valid and math.isfinite(one.train[t])
    }


def within(rules, values):
    """The places that every bound keeps; `rules` may have a number."""
    good = set(values)
    for side, rule in rules.items():
        if isinstance(rule, float):
            good &= {place for place, x in values.items() if (x >= rule if side == "lower" else x <= rule)}
        else:
            keeps = kept(rule, side, list(values.values()))
            good &= {place for place, keep in zip(values, keeps, strict=True) if keep}
    return good


def mask_of(batch, good):
    return [[float((s, t) in good) for t in range(len(one))] for s, one in enumerate(batch)]


def rejects_nonfinite(batch):
    bad = {s for s, one in enumerate(batch) for t, m in enumerate(one.mask) if m and not math.isfinite(one.train[t])}
    return bad


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tokens_in_every_layout(rules, dtype, way):
    spec = rc.Spec(criteria=(rc.Criterion("abs", **rules),))
    for seed, layout in itertools.product(range(3), LAYOUTS):
        batch = coarse(seed, broken=seed == 2)
        laid = lay_out(batch, layout, dtype)
        found = laid.correct(spec)
        good = within(rules, abs_d(batch))
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


@pytest.mark.parametrize("sums_over", ["valid", "kept"])
@pytest.mark.parametrize("drop", ["unit", "sequence", "token"])
def test_sequences_after_tokens(sums_over, drop, way):
    """With sums_over="kept" the sequences' values, and so their bound, hang on the tokens' bound."""
    token, unit = {"upper": rc.Quantile(0.7)}, {"upper": rc.Bottom(3)}
    spec = rc.Spec(
        criteria=(
            rc.Criterion("abs", over="sequence", reduce="sum", drop=drop, **unit),
            rc.Criterion("abs", **token),
        ),
        sums_over=sums_over,
    )
    for seed in range(6):
        batch = coarse(seed)
        values = abs_d(batch)
        good = within(token, values)
        sums = {}
        for s, t in good if sums_over == "kept" else values:
            sums[s] = sums.get(s, 0.0) + values[s, t]
        standing = within(unit, sums)
        laid = lay_out(batch, "padded_left", torch.float32)
        found = laid.correct(spec)
        lost = set(sums) - standing
        assert laid.read(found.mask) == mask_of(batch, {(s, t) for s, t in good if s not in lost})
        # A sequence that loses its tokens one by one is kept.
        assert found.keep.tolist() == [drop == "token" or s not in lost for s in range(len(batch))]


def test_turns(way):
    train = torch.tensor([0.0, 0.5, 0.0, 1.0, 2.0, 0.25, 0.25]) - 3.0
    rollout, cu = torch.full((7,), -3.0), torch.tensor([0, 3, 7])
    turns = torch.tensor([0, 1, 3, 5, 7])  # sums of |D|: 0, 0.5, 3, 0.5
    spec = rc.Spec(criteria=(rc.Criterion("abs", over="turn", reduce="sum", upper=rc.Bottom(2)),))
    found = rc.correct(train, rollout, cu_seqlens=cu, turns=turns, spec=spec)
    assert found.keep_turns.tolist() == [True, True, False, True]
    assert found.metrics()["turn_sum_abs/upper_max"] == 0.5


def test_the_bound_is_a_metric_of_each_call():
    spec = rc.Spec(criteria=(rc.Criterion("ratio", lower=rc.TopK(2), upper=rc.Quantile(0.5)),))
    rollout = torch.full((1, 4), -3.0)
    one, other = (
        rc.correct(rollout + torch.tensor([values]), rollout, spec=spec)
        for values in ([0.0, 0.5, 1.0, 1.5], [0.0, 0.25, 2.0, 2.0])
    )
    found = one.statistics.merge(other.statistics).metrics()
    expected = {"upper_min": 0.25, "upper_max": 0.5, "lower_min": 1.0, "lower_max": 2.0}
    for key, value in expected.items():
        assert found[f"token_ratio/{key}"] == pytest.approx(math.exp(value), rel=1e-12)
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
    expected = [1, 1, 0, 1, 0, 0] if nonfinite == "neutral" else [1, 0, 1, 0, 0, 1]
    assert found.mask.tolist() == [list(map(bool, expected))]


def test_ranks_of_a_batch_group_decide_together():
    spec = rc.Spec(
        criteria=(
            rc.Criterion("k2", upper=rc.MeanBelow(0.125)),
            rc.Criterion("abs", over="sequence", reduce="mean", upper=rc.Quantile(0.6)),
        ),
        sums_over="kept",
    )
    for seed in range(3):
        batch = coarse(seed)
        laid = lay_out(batch, "packed", torch.float32)
        group = Ranks(2)
        cuts = [batch[:3], batch[3:]]

        def of_rank(rank, cuts=cuts):
            part = lay_out(cuts[rank], "packed", torch.float32)
            return part.read(
                (found := part.correct(spec, batch_group=Rank(rank=rank, ranks=2))).mask
            ), found.keep.tolist()

        found = group.run(of_rank)
        assert found[0][0] + found[1][0] == laid.read(laid.correct(spec).mask)
        assert found[0][1] + found[1][1] == laid.correct(spec).keep.tolist()
        # Three rounds for values of tokens, six for those of sequences.
        assert group.rounds == 9


def test_the_loss_of_what_is_kept():
    """Inside `policy_loss`, also for a criterion of the new policy; bounds have no gradient."""
    batch = coarse(1)
    laid = lay_out(batch, "packed", torch.float64)
    valid = laid.mask
    new, old, rollout, advantages = (
        torch.where(valid, x, 0.0) for x in (laid.train + 0.125, laid.train, laid.rollout, laid.advantages)
    )
    spec = rc.Spec(
        weight=rc.Weight("token", upper=2.0),
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
    plain = rc.policy_loss(y, advantages, weights=weights, train_mask=good, **given)
    plain.value.backward()
    assert torch.equal(fused.value, plain.value) and torch.equal(x.grad, y.grad)
    assert fused.metrics()["token_k2/upper_max"] > 0.0


@pytest.mark.parametrize("bypass", [False, True])
def test_the_loss_takes_bounds_that_micro_batches_decided(bypass):
    """The gradients of micro-batches are those of the whole batch, whose bounds none of them finds alone."""
    spec = rc.Spec(rc.Weight("token", upper=rc.KeepESS(0.9)), (rc.Criterion("abs", upper=rc.Quantile(0.5)),))
    batch = coarse(0)

    def gradients(parts, **given):
        found = []
        for laid in parts:
            new, old, rollout = (torch.where(laid.mask, x, 0.0) for x in (laid.train + 0.125, laid.train, laid.rollout))
            x = (old if bypass else new).clone().requires_grad_()
            policies = {"rollout_logp": rollout} | ({} if bypass else {"old_logp": old})
            options = {"spec": spec, "cu_seqlens": laid.cu_seqlens, "reduction": "sum", **given}
            # The mask alone would do, and in bypass mode the ratio is the correction.
            loss = rc.policy_loss(
                x, torch.where(laid.mask, laid.advantages, 0.0), mask=laid.mask, **policies, **options
            )
            loss.value.backward()
            found.append((x.grad, loss.weights, loss.mask))
        return [torch.cat(column) for column in zip(*found, strict=True)]

    whole, parts = (
        [lay_out(some, "packed", torch.float32) for some in cuts] for cuts in ([batch], [batch[:4], batch[4:]])
    )
    known, _ = decided_together(parts, spec)
    expected, found, alone = gradients(whole), gradients(parts, thresholds=known), gradients(parts)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert not torch.equal(alone[2], expected[2])
    x = torch.zeros(1, 3)
    for given, error, words in (
        ({"thresholds": known}, ValueError, "thresholds: expected None without a spec"),
        ({"thresholds": 3, "spec": spec}, TypeError, "thresholds: expected Thresholds or None, got int 3"),
        ({"thresholds": known, "spec": TOGETHER}, ValueError, "thresholds: expected those of the same Spec"),
    ):
        with pytest.raises(error, match=words):
            rc.policy_loss(x, x, old_logp=x, rollout_logp=x, **given)


def test_inside_a_compiled_function():
    spec = rc.Spec(
        criteria=(
            rc.Criterion("k2", upper=rc.MeanBelow(0.1)),
            rc.Criterion("abs", over="sequence", reduce="mean", upper=rc.Quantile(0.6)),
        ),
        sums_over="kept",
    )
    laid = lay_out(coarse(0), "padded_right", torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(train, rollout, mask):
        found = rc.correct(train, rollout, mask=mask, spec=spec)
        return found.mask, found.keep, found.statistics.sums, found.statistics.maxima

    mask, keep, sums, maxima = compiled(laid.train, laid.rollout, laid.mask)
    eager = laid.correct(spec)
    assert torch.equal(mask, eager.mask) and torch.equal(keep, eager.keep)
    assert torch.equal(maxima[-4:], eager.statistics.maxima[-4:]) and sums.shape == eager.statistics.sums.shape


def test_what_cannot_be():
    spec = rc.Spec(criteria=(rc.Criterion("k2", upper=rc.MeanBelow(0.1)),))
    x = torch.zeros(1, 3)
    for criterion, why in (
        (rc.Criterion("k3", upper=rc.Quantile(0.9), label="one"), "criterion 'one' compares k3 with one of its values"),
        (rc.Criterion("k2", lower=0.1, upper=rc.Quantile(0.9), label="one"), "'one' has a bound that is a number"),
        (rc.Criterion("abs", upper=rc.Quantile(0.9, within="group")), "the kernels know no bounds that groups decide"),
    ):
        with pytest.raises(ValueError, match=f"backend: .* got 'triton': .*{why}"):
            rc.correct(x, x, spec=rc.Spec(criteria=(criterion,)), group_index=torch.zeros(1).long(), backend="triton")

    def of_rank(rank):
        wanted = "spec: expected bounds that are numbers beside a sequence_group"
        with pytest.raises(ValueError, match=wanted):
            rc.correct(x, x, spec=spec, sequence_group=Rank(rank=rank, ranks=1))
        return True

    assert Ranks(1).run(of_rank) == [True]


# --- micro-batches ---

TOGETHER = rc.Spec(
    criteria=(
        rc.Criterion("k2", upper=rc.MeanBelow(0.125)),
        rc.Criterion("abs", over="sequence", reduce="mean", lower=rc.Quantile(0.2), upper=rc.Bottom(3)),
    ),
    sums_over="kept",
)


def decided_together(parts, spec, reduced=lambda found: found):
    """The thresholds of some laid out micro-batches, and the rounds that they took."""
    known, rounds = None, 0
    while known is None or not known.complete:
        found = [part.correct(spec, call=rc.threshold_statistics, known=known) for part in parts]
        known, rounds = reduced(rc.ThresholdStatistics.sum(found)).thresholds(), rounds + 1
    return known, rounds


def test_micro_batches_decide_together(way):
    for seed in range(3):
        batch = coarse(seed)
        laid = lay_out(batch, "packed", torch.float32)
        whole = laid.correct(TOGETHER)
        parts = [lay_out(some, layout, torch.float32) for some, layout in
                 ((batch[:2], "padded_left"), (batch[2:5], "packed_gaps"), (batch[5:], "list"))]  # fmt: skip
        known, rounds = decided_together(parts, TOGETHER)
        assert rounds == 9 and repr(known) == "Thresholds(3 known, complete=True)"
        found = [part.correct(TOGETHER, thresholds=known) for part in parts]
        masks = [row for part, one in zip(parts, found, strict=True) for row in part.read(one.mask)]
        assert masks == laid.read(whole.mask)
        assert torch.equal(torch.cat([one.keep for one in found]), whole.keep)
        merged, expected = (x.metrics() for x in (rc.Statistics.sum(one.statistics for one in found), whole.statistics))
        bounds = [key for key in expected if key.endswith(("/upper_max", "/upper_min", "/lower_max", "/lower_min"))]
        assert len(bounds) == 6 and all(merged[key] == expected[key] for key in bounds)


def test_the_tokens_of_highest_entropy_train():
    spec = rc.Spec(criteria=(rc.Criterion("entropy", lower=rc.TopK(share=0.2)),))
    logp, entropy = torch.full((2, 10), -1.0), torch.arange(20.0).view(2, 10)
    known = None
    while known is None or not known.complete:
        parts = [
            rc.threshold_statistics(logp[:1], logp[:1], spec=spec, known=known, entropy=x) for x in entropy.split(1)
        ]
        known = rc.ThresholdStatistics.sum(parts).thresholds()
    for given in ({}, {"thresholds": known}):
        found = rc.correct(logp, logp, spec=spec, entropy=entropy, **given)
        assert torch.equal(found.mask, entropy >= 16.0) and found.metrics()["token_entropy/lower_max"] == 16.0


@pytest.mark.parametrize("normalize", ["batch", "group", "sequence"])
def test_micro_batches_decide_beside_normalised_weights(normalize):
    """The divisor of weights, and the groups that it needs, come behind the bounds."""
    for options in ({"apply": False}, {"rejected": "both"}):
        spec = rc.Spec(rc.Weight("token", normalize=normalize), TOGETHER.criteria, **options)
        batch = coarse(7)
        grouped = {"group_size": 2} if normalize == "group" else {}
        whole = lay_out(batch, "packed", torch.float32).correct(spec, **grouped)
        parts = [lay_out(some, "packed", torch.float32) for some in (batch[:4], batch[4:])]
        known, _ = decided_together(parts, spec)
        found = [part.correct(spec, thresholds=known, **grouped) for part in parts]
        assert torch.equal(torch.cat([one.mask for one in found]), whole.mask)
        if normalize != "batch" and spec.apply:
            assert torch.equal(torch.cat([one.weights for one in found]), whole.weights)


def test_micro_batches_of_ranks_decide_together():
    batch = coarse(5)
    laid = lay_out(batch, "packed", torch.float32)
    group = Ranks(2)

    def of_rank(rank):
        part = lay_out([batch[:3], batch[3:]][rank], "packed", torch.float32)
        member = Rank(rank=rank, ranks=2)
        known, _ = decided_together([part], TOGETHER, lambda found: found.all_reduce(member))
        return part.read(part.correct(TOGETHER, thresholds=known).mask)

    first, second = group.run(of_rank)
    assert first + second == laid.read(laid.correct(TOGETHER).mask)


def test_thresholds_that_do_not_fit():
    x = torch.zeros(1, 3)
    other = rc.Spec(criteria=(rc.Criterion("k2", upper=rc.Quantile(0.5)),))
    first = rc.threshold_statistics(x, x, spec=TOGETHER)
    known, _ = decided_together([lay_out(coarse(0), "packed", torch.float32)], other)
    wrong = [
        (
            lambda: rc.threshold_statistics(x, x, spec=rc.Spec()),
            ValueError,
            "spec: expected a bound that the batch decides",
        ),
        (
            lambda: rc.threshold_statistics(x, x, spec=TOGETHER, known=3),
            TypeError,
            "known: expected Thresholds or None",
        ),
        (lambda: rc.threshold_statistics(x, x, spec=other, known=known), ValueError, "known: .* not all known"),
        (lambda: rc.threshold_statistics(x, x, spec=TOGETHER, known=known), ValueError, "known: .* of the same Spec"),
        (lambda: first.merge(rc.threshold_statistics(x, x, spec=other)), ValueError, "other: .* the same Spec"),
        (
            lambda: first + rc.threshold_statistics(x, x, spec=TOGETHER, known=first.thresholds()),
            ValueError,
            "other: expected counts of the same round",
        ),
        (
            lambda: rc.threshold_statistics(x.double(), x.double(), spec=TOGETHER, known=first.thresholds()),
            ValueError,
            "known: expected log-probs whose values of 'token_k2' are float32, as in the rounds before, got float64",
        ),
        (lambda: first.merge(3), TypeError, "other: expected ThresholdStatistics, got int"),
        (lambda: rc.ThresholdStatistics.sum([]), ValueError, "parts: expected at least one"),
        (lambda: rc.correct(x, x, spec=TOGETHER, thresholds=first.thresholds()), ValueError, "expected complete ones"),
        (lambda: rc.correct(x, x, spec=TOGETHER, thresholds=known), ValueError, "thresholds: expected those"),
        (lambda: rc.correct(x, x, spec=other, thresholds=1.0), TypeError, "thresholds: expected Thresholds or None"),
    ]
    for call, error, words in wrong:
        with pytest.raises(error, match=words):
            call()

"""Bounds that micro-batches decide together: `threshold_statistics` and `correct(thresholds=...)`."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out
from builders.coarse import coarse, decided_together
from builders.split_cases import Rank
from builders.threaded_ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")


TOGETHER = rc.Spec(
    criteria=(
        rc.Criterion("k2", upper=rc.MeanBelow(0.125)),
        rc.Criterion("abs", over="sequence", reduce="mean", lower=rc.Quantile(0.2), upper=rc.Bottom(3)),
    ),
    sums_over="kept",
)
# By what is bounded, with the rounds that it takes.
SPECS = {
    "criteria": (TOGETHER, 9),
    "weights": (rc.Spec(rc.Weight.token(lower=rc.Quantile(0.1), upper=rc.Quantile(0.9))), 3),
    "sample size": (rc.Spec(rc.Weight.token(upper=rc.KeepESS(0.9))), 3),
    "products": (
        rc.Spec(
            rc.Weight.product(upper=rc.KeepESS(0.5)), (rc.Criterion("abs", upper=rc.Quantile(0.8)),), sums_over="kept"
        ),
        6,
    ),
    "tokens of groups": (
        rc.Spec(criteria=(rc.Criterion("abs", lower=rc.TopK(2, within="group"), upper=rc.Quantile(0.9, "group")),)),
        3,
    ),
    "survivors in groups, and a bound of the batch": (
        rc.Spec(
            criteria=(
                rc.Criterion("abs", "sequence", "mean", lower=rc.Quantile(0.2), upper=rc.Quantile(0.7, within="group")),
                rc.Criterion("abs", upper=rc.MeanBelow(0.2, within="group")),
            ),
            sums_over="kept",
        ),
        9,
    ),
}
# Group 3 is all invalid, group 4 has no sequence, and some lie in several parts.
INDEX = [0, 1, 3, 0, 2, 1, 0, 1]


def laid_out(batch, part, layout, dtype=torch.float32):
    """Some sequences of a batch, with the numbers of their groups."""
    laid = lay_out(batch[part], layout, dtype)
    laid.others.update(group_index=torch.tensor(INDEX[part]), group_count=5)
    return laid


def bounds_of(found):
    return {key: x for key, x in found.metrics().items() if key.endswith(("/upper_max", "/upper_min", "/lower_max"))}


@pytest.mark.parametrize("name", SPECS)
def test_micro_batches_decide_together(name, way):
    spec, wanted = SPECS[name]
    for seed, dtype in enumerate((torch.float32, torch.float64, torch.float32)[: 3 if spec.criteria else 1]):
        batch = coarse(seed)
        laid = laid_out(batch, slice(None), "packed", dtype)
        whole = laid.correct(spec)
        cuts = (slice(0, 2), "padded_left"), (slice(2, 5), "packed_gaps"), (slice(5, None), "list")
        parts = [laid_out(batch, *cut, dtype) for cut in cuts]
        known, rounds = decided_together(parts, spec)
        assert (rounds == wanted or dtype == torch.float64) and repr(known).endswith(" known, complete=True)")
        found = [part.correct(spec, thresholds=known) for part in parts]
        for x in ("weights", "mask"):
            if getattr(whole, x) is not None:
                rows = [row for part, one in zip(parts, found, strict=True) for row in part.read(getattr(one, x))]
                assert rows == laid.read(getattr(whole, x))
        assert torch.equal(torch.cat([one.keep for one in found]), whole.keep)
        merged = rc.Correction(None, None, whole.keep, rc.Statistics.sum(one.statistics for one in found))
        assert bounds_of(merged) == bounds_of(whole) and len(bounds_of(whole)) >= 2


def test_the_tokens_of_highest_entropy_train():
    spec = rc.Spec(criteria=(rc.Criterion("entropy", lower=rc.TopK(share=0.2)),))
    logp, entropy = torch.full((2, 10), -1.0), torch.arange(20.0).view(2, 10)
    known = None
    while known is None or not known.complete:
        parts = [
            rc.threshold_statistics(logp[:1], logp[:1], rc.Batch(entropy=x), spec=known or spec)
            for x in entropy.split(1)
        ]
        known = rc.ThresholdStatistics.sum(parts).thresholds()
    for one in (spec, known):
        found = rc.correct(logp, logp, rc.Batch(entropy=entropy), spec=one)
        assert torch.equal(found.mask, entropy >= 16.0) and found.metrics()["token_entropy/lower_max"] == 16.0


@pytest.mark.parametrize("normalize", ["batch", "group", "sequence"])
def test_micro_batches_decide_beside_normalized_weights(normalize):
    """The divisor of weights, and the groups that it needs, come behind the bounds."""
    for options in ({"apply": False}, {"rejected": "both"}):
        spec = rc.Spec(rc.Weight.token(normalize=normalize), TOGETHER.criteria, **options)
        batch = coarse(7)
        grouped = {"group_size": 2} if normalize == "group" else {}
        whole = lay_out(batch, "packed", torch.float32).correct(spec, **grouped)
        parts = [lay_out(some, "packed", torch.float32) for some in (batch[:4], batch[4:])]
        known, _ = decided_together(parts, spec)
        found = [part.correct(spec, thresholds=known, **grouped) for part in parts]
        assert torch.equal(torch.cat([one.mask for one in found]), whole.mask)
        if normalize != "batch" and spec.apply:
            assert torch.equal(torch.cat([one.weights for one in found]), whole.weights)


@pytest.mark.parametrize("name", SPECS)
def test_ranks_decide_together(name):
    """In one call of a batch group, and in the rounds of their micro-batches."""
    spec, batch = SPECS[name][0], coarse(5)
    whole = laid_out(batch, slice(None), "packed")

    def told(laid, out):
        return laid.read(out.mask), [] if out.weights is None else laid.read(out.weights), out.keep.tolist()

    def of_rank(rank):
        part = laid_out(batch, (slice(0, 3), slice(3, None))[rank], ("padded_left", "list")[rank])
        member = Rank(rank=rank, ranks=2)
        known, _ = decided_together([part], spec, lambda found: found.all_reduce(member))
        out = part.correct(spec, batch_group=member)
        at_once = told(part, out)
        assert told(part, part.correct(spec, thresholds=known)) == at_once
        return *at_once, bounds_of(out)

    group = Ranks(2)
    first, second = group.run(of_rank)
    assert group.rounds == 2 * SPECS[name][1]
    out = whole.correct(spec)
    assert tuple(a + b for a, b in zip(first[:3], second[:3], strict=True)) == told(whole, out)
    assert first[3] == second[3] == bounds_of(out)


@pytest.mark.parametrize("kind", [rc.Criterion, rc.Weight])
def test_a_bound_decided_in_another_dtype_is_refused(kind):
    """A float64 that float32 does not have may lie on either side of the token that it is rounded to."""
    rollout = torch.zeros(1, 4, dtype=torch.float64)
    train = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    given = {"abs": "abs"} if kind is rc.Criterion else {}
    of_token = (
        rc.Spec(criteria=(kind("abs", upper=rc.Quantile(0.5)),))
        if given
        else rc.Spec(kind("token", upper=rc.Quantile(0.5)))
    )
    found = {}
    for dtype in (torch.float64, torch.float32):
        known = None
        while known is None or not known.complete:
            known = rc.threshold_statistics(train.to(dtype), rollout.to(dtype), spec=known or of_token).thresholds()
        found[dtype] = known
        other = torch.float32 if dtype == torch.float64 else torch.float64
        named, has, got = ("token_abs" if given else "weight"), str(dtype)[6:], str(other)[6:]
        with pytest.raises(
            ValueError, match=f"spec: expected log-probs whose values of '{named}' are {has}, .* got {got}"
        ):
            rc.correct(train.to(other), rollout.to(other), spec=known)
        new, base = train.to(other), rollout.to(other)
        with pytest.raises(ValueError, match="spec: expected log-probs whose values of"):
            rc.policy_loss(new, torch.ones(1, dtype=other), rollout_logp=base, spec=known)
        rc.correct(train.to(dtype), rollout.to(dtype), spec=known)
    # Log-probs of lower precision compute in float32.
    half = train.bfloat16(), rollout.bfloat16()
    rc.correct(*half, spec=found[torch.float32])

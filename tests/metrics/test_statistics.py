"""Statistics that are not equal do not merge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from rollout_corr.metrics import schema
from rollout_corr.metrics.statistics import MAXIMA_BLOCK, SUMS_BLOCK

SPEC = rc.Spec(rc.Weight.token(upper=2.0))


def some(spec=SPEC):
    return rc.correct(torch.zeros(2, 3), -torch.rand(2, 3), spec=spec).statistics


def objective(of):
    return rc.policy_loss(*torch.zeros(2, 2, 3), loss=rc.Loss(mean=rc.Mean(of))).statistics.objective


def as_float64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (some(rc.Spec(rc.Weight.token(upper=2.5))), r"same Spec Spec\(weight=Weight\.token\(upper=2.0"),
        (
            replace(some(), vector=some().vector.float()),
            r"other.vector: expected \[\d+\] float64 on cpu, got \[\d+\] float32",
        ),
        (replace(some(), vector=some().vector[:-1]), r"other.vector: expected \[\d+\] float64 on cpu, got \[\d+\]"),
        (some().to("meta"), r"other.vector: expected .* on cpu, got .* on meta"),
    ],
)
def test_unequal_statistics_do_not_merge(other, words):
    with pytest.raises(ValueError, match=words):
        some() + other


def test_statistics_reduced_over_ranks_of_other_specs_give_no_metrics():
    digest = schema.digest(SPEC)
    good, bad = (replace(some(), ranks=as_float64(most, -digest)) for most in (digest, digest + 1.0))
    words = r"statistics: expected equal Specs .* from this rank's Spec\(weight=Weight\.token\(upper=2.0\)\)"
    for broken in (bad, bad.to("cpu"), some() + bad, bad + some(), good + bad):
        for read in (broken.metrics, broken.warnings):
            with pytest.raises(ValueError, match=words):
                read()
    assert (good + some()).metrics()["tokens"] == 12.0


def test_a_digest_is_of_everything_that_has_to_be_equal():
    specs = [SPEC, replace(SPEC, clamp=19.0), replace(SPEC, detail="full"), rc.Spec(), None]
    losses = [None, objective("sum"), objective("token")]
    digests = {schema.digest(spec, loss) for spec in specs for loss in losses}
    assert len(digests) == len(specs) * len(losses)
    assert all(0.0 <= one == int(one) < 2.0**52 for one in digests)
    below, same = (rc.Spec(rc.Weight.token(lower=zero)) for zero in (0.0, -0.0))
    uncached = schema.digest.__wrapped__
    assert below == same and uncached(below) == uncached(same)


def test_statistics_of_most_specs_are_padded_to_one_length():
    criteria = tuple(rc.Criterion("ratio", upper=1.0 + i, label=str(i)) for i in range(20))
    spec = rc.Spec(rc.Weight.product(), criteria, detail="full", report=("verl", "skyrl", "xtuner"))
    sums, maxima = schema.layout(spec, objective("token"))
    assert len(sums) <= SUMS_BLOCK and len(maxima) + 2 <= MAXIMA_BLOCK


@pytest.mark.parametrize("rejected", ["mask", "zero", "both"])
@pytest.mark.parametrize("drop", ["unit", "sequence"])
def test_nothing_kept_is_a_bool_on_the_device(rejected, drop):
    low = -torch.ones(2, 3)
    spec = rc.Spec(criteria=(rc.Criterion("ratio", upper=1.5, drop=drop),), rejected=rejected)
    mask = torch.ones(2, 3)
    out, some_kept = rc.correct(low + 1, low, mask=mask, spec=spec), rc.correct(low, low, mask=mask, spec=spec)
    loss = rc.policy_loss(low, torch.ones(2), rc.Batch(mask=mask), spec=spec, old_logp=low + 1, rollout_logp=low)
    assert out.nothing_kept and out.nothing_kept.dim() == 0 and out.nothing_kept.dtype == torch.bool
    assert loss.nothing_kept and not some_kept.nothing_kept
    assert not (out.statistics + some_kept.statistics).nothing_kept
    assert not rc.policy_loss(low, torch.ones(2), rc.Batch(mask=mask), old_logp=low).nothing_kept
    assert rc.policy_loss(low, torch.ones(2), rc.Batch(mask=mask * 0), old_logp=low).nothing_kept
    assert out.statistics.to("meta").nothing_kept.is_meta


def test_a_dry_run_keeps_everything():
    low = -torch.ones(2, 3)
    spec = rc.Spec(criteria=(rc.Criterion("ratio", upper=1.5),), apply=False)
    for mask, nothing in ((torch.ones(2, 3), False), (torch.zeros(2, 3), True)):
        out = rc.correct(low + 1, low, mask=mask, spec=spec)
        loss = rc.policy_loss(low, torch.ones(2), rc.Batch(mask=mask), spec=spec, old_logp=low + 1, rollout_logp=low)
        assert out.nothing_kept == loss.nothing_kept == nothing

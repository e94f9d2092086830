"""Statistics that are not equal do not merge."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

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


@pytest.mark.parametrize(
    ("weight", "key"),
    [
        (rc.Weight.token(upper=1.2), "weight"),
        (rc.Weight.product(upper=1.2), "sequence_weight"),
        (rc.Weight.geometric(upper=1.01), "sequence_weight"),
        (rc.Weight.product(over="turn", upper=1.2), "turn_weight"),
    ],
    ids=["tokens", "sequences", "means", "turns"],
)
def test_percentiles_of_weights_are_those_of_sorted_ratios_and_merge(weight, key):
    """Within an eighth of a ratio's logarithm; of a batch in two parts as of the whole."""
    made = torch.Generator().manual_seed(3)
    train, rollout = (-3.0 * torch.rand(60, 12, generator=made, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(60, 12, generator=made) < 0.7
    mask[0] = False
    spec = rc.Spec(weight, detail="full")

    def found(rows):
        batch = rc.Batch(mask=mask[rows], turns="runs" if weight.over == "turn" else None)
        return rc.correct(train[rows], rollout[rows], batch, spec=spec).statistics

    logs = []
    for d, valid in zip((train - rollout).tolist(), mask.tolist(), strict=True):
        turns = [[]]
        for one, here in zip(d, valid, strict=True):
            turns[-1].append(one) if here else turns.append([])
        turns = {"turn": turns, "token": [[x] for turn in turns for x in turn]}.get(weight.over, [[*chain(*turns)]])
        logs += [sum(turn) / (len(turn) if weight.reduce == "mean" else 1) for turn in turns if turn]
    logs.sort()
    whole, halves = found(slice(None)), found(slice(25)) + found(slice(25, None))
    metrics = whole.metrics()
    for percent in (1, 5, 25, 50, 75, 95, 99):
        name = f"{key}_before_bounds_p{percent}"
        wanted = logs[math.ceil(percent / 100 * len(logs)) - 1]
        assert math.log(metrics[name]) == pytest.approx(wanted, rel=0.125, abs=1e-7), name
        assert metrics[name] == halves.metrics()[name]

"""Versions of policies: ages in criteria, weights that decay with them, metrics, and the errors."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out, random_sequences
from builders.rounding import near

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = rc.Spec(criteria=(rc.Criterion("age", upper=1),))


def test_age_metrics_without_a_spec_that_reads_ages():
    sequences = random_sequences(5)
    laid = lay_out(sequences, "padded_right")
    versions = {"versions": laid.versions, "current_version": 7}
    plain, found = laid.correct(rc.Spec()).metrics(), laid.correct(rc.Spec(), **versions).metrics()
    assert {name: found[name] for name in plain} == plain
    assert [name for name in found if name not in plain] == [
        *("age_mean", "age_max", "age_min", "tokens_stale_fraction", "tokens_newer")
    ]
    ages = [7 - v for q in sequences for v, m in zip(q.versions, q.mask, strict=True) if m]
    assert (found["age_max"], found["age_min"]) == (max(ages), min(ages))
    assert found["age_mean"] == near(sum(ages) / len(ages))
    assert found["tokens_stale_fraction"] == near(sum(a > 0 for a in ages) / len(ages))


def test_a_version_of_the_future_is_counted_and_warned_of():
    x = torch.linspace(-2.0, -0.1, 40).view(4, 10)
    mask = torch.arange(10) < 8
    versions = torch.full((4, 10), 5)
    versions[0, 2:5], versions[1, 9] = 7, 99

    def out_of(current):
        batch = rc.Batch(mask=mask.expand(4, 10), versions=rc.Versions(versions, current))
        return rc.correct(x, x - 0.001, batch)

    out = out_of(5)
    assert out.metrics()["tokens_newer"] == 3 and out.metrics()["age_min"] == -2
    (warning,) = out.warnings()
    assert warning.startswith("3 valid tokens were sampled by a newer version than versions.current, by up to 2:")
    half = out_of(7)
    assert half.metrics()["tokens_newer"] == 0 and half.warnings() == []
    versions[0, 3:5] = 5
    assert out_of(5).warnings()[0].startswith("1 valid token was sampled")


def test_a_turn_is_rejected_by_its_age():
    x = torch.zeros(10)
    batch = rc.Batch(
        cu_seqlens=torch.tensor([0, 5, 10]),
        turns=torch.tensor([0, 2, 5, 6, 10]),
        versions=rc.Versions(torch.tensor([3, 3, 3, 1, 3, 3, 2, 2, 2, 2]), 3),
    )
    oldest = rc.Spec(criteria=(rc.Criterion("age", "turn", "max", upper=1),))
    assert rc.correct(x, x, batch, spec=oldest).keep_turns.tolist() == [True, False, True, True]
    mean = rc.Spec(criteria=(rc.Criterion("age", "turn", "mean", upper=0.5, drop="sequence"),))
    out = rc.correct(x, x, batch, spec=mean)
    label = mean.criteria[0].label
    assert out.keep.tolist() == [False, False] and out.metrics()[f"{label}/max"] == 1.0


def test_weights_of_newer_versions_do_not_grow():
    x = torch.zeros(2, 3)
    spec = rc.Spec(rc.Weight.token(decay=0.5))
    versions = torch.tensor([[9, 7, 6], [7, 5, 2]], dtype=torch.int16)
    out = rc.correct(x, x, rc.Batch(versions=rc.Versions(versions, 7)), spec=spec)
    assert out.weights.tolist() == [[1.0, 1.0, 0.5], [1.0, 0.25, 2.0**-5]]
    assert out.metrics()["weight_mean"] == 1.0 and out.metrics()["age_min"] == -2.0


def test_an_external_tensor_may_be_called_age():
    x, versions = torch.zeros(2, 3), torch.full((2, 3), 5)
    spec = rc.Spec(criteria=(rc.Criterion("age", upper=1), rc.Criterion("external", upper=0.5, name="age", label="x")))
    out = rc.correct(x, x, rc.Batch(external={"age": x + 1}, versions=rc.Versions(versions, 5)), spec=spec)
    assert not out.mask.any() and out.metrics()["token_age/tokens_rejected_fraction"] == 0.0


def test_a_filler_at_the_end_of_int64_is_old_and_not_new():
    x, versions = torch.zeros(2, 3), torch.tensor([7, -(2**63)])
    out = rc.correct(x, x, rc.Batch(versions=rc.Versions(versions, 7)), spec=SMALL)
    assert out.mask.tolist() == [[True] * 3, [False] * 3] and out.metrics()["age_min"] == 0.0

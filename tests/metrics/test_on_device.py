"""Metrics as 0-d tensors without a read of any value; that they are those of `metrics()`: test_random_calls.py."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out, random_sequences
from builders.launches import Operations
from builders.rounding import near
from builders.weights import weight_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_0_of_0_among_some_tokens():
    """All weights are 0, and so is the entropy."""
    d, zeros = torch.full((2, 3), 3.0), torch.zeros(2, 3)
    out = rc.correct(d, zeros, rc.Batch(entropy=zeros), spec=rc.Spec(rc.Weight.token(upper=2.0, outside="zero")))
    for key in ("weight_ess", "kl_rollout_train_k3_over_entropy"):
        assert out.statistics.on_device(key).item() == out.metrics()[key] == 0.0


@pytest.mark.parametrize("level", ["token", "product"])
def test_the_sample_size_of_a_weight_that_is_nan_is_nan(level):
    """As its mean is, on the host, as a tensor and of its label alone: 1.0 would say that all is well."""
    d = torch.tensor([[0.1, math.nan], [0.2, 0.3]])
    batch = rc.Batch(labels={"task": rc.Labels(torch.tensor([0, 1]), 2)})
    out = rc.correct(d, torch.zeros_like(d), batch, spec=rc.Spec(weight_of(level), nonfinite="propagate"))
    found, of_labels = out.metrics(), out.metrics(by="task")
    for key in [key for key in found if key.endswith("_ess")]:
        assert math.isnan(found[key]) and math.isnan(out.statistics.on_device(key).item()), key
    key = "weight_ess" if level == "token" else "sequence_weight_ess"
    assert math.isnan(of_labels[f"task/0/{key}"])
    assert 0.99 < of_labels[f"task/1/{key}"] <= 1.0


def test_nothing_is_read():
    spec = rc.Spec(rc.Weight.token(upper=2.0, normalize="sequence"), (rc.Criterion("age", upper=6),), detail="full")
    laid = lay_out(random_sequences(2), "packed")
    statistics = laid.correct(spec, entropy=laid.external["entropy"]).statistics
    with Operations() as operations:
        for key in (
            "weight_ess",
            "sequence_mean_weight_ess",
            "kl_rollout_train_k3",
            "age_mean",
            "entropy_mean",
            "sequence_weight_divisor_max",
        ):
            statistics.on_device(key)
    assert operations.names and not operations.waits


def test_of_the_loss_and_of_merged_statistics():
    laid = lay_out(random_sequences(3, advantages="sequence"), "padded_right")
    given, spec = {"mask": laid.mask, "old_logp": laid.rollout}, rc.Spec(rc.Weight.product(upper=1.5))
    loss = rc.policy_loss(laid.train, laid.advantages, rollout_logp=laid.rollout, spec=spec, **given)
    both = loss.statistics + loss.statistics
    for key in ("kl_old_new_k1", "clip_high_fraction", "sequence_weight_ess", "tokens_trained"):
        assert both.on_device(key).item() == near(both.metrics()[key], size=0.0)
    alone = rc.policy_loss(laid.train, laid.advantages, **given)
    assert alone.statistics.on_device("kl_old_new_k3").item() == near(alone.metrics()["kl_old_new_k3"], size=0.0)


def test_a_key_that_there_is_not():
    with pytest.raises(
        ValueError, match="key: expected a native metric of these statistics, got 'weight_ess'; they ha"
    ):
        rc.Statistics.nothing(rc.Spec()).on_device("weight_ess")
    with pytest.raises(ValueError, match=r"key: expected a metric that is a sum, .* got 'prob_correlation', whose"):
        rc.Statistics.nothing(rc.Spec(detail="full")).on_device("prob_correlation")

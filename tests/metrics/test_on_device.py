"""Metrics as 0-d tensors: the numbers of `metrics()`, without a read of any value."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out, random_sequences
from builders.launches import Operations
from builders.rounding import near
from builders.weights import weight_of
from rollout_corr.metrics.on_tensors import rows_of

pytestmark = pytest.mark.usefixtures("one_thread")

FULL = rc.Spec(
    rc.Weight.token(lower=0.5, upper=2.0, normalize="sequence"),
    (rc.Criterion("k3", "sequence", "mean", upper=0.1), rc.Criterion("age", upper=6)),
    detail="full",
)
SPECS = {
    "all": FULL,
    "product": rc.Spec(rc.Weight.product(upper=1.5)),
    "prefix": rc.Spec(rc.Weight("prefix", growth="sqrt", upper=1.5)),
    "measure": rc.Spec(),
}
# Those that somebody schedules by.
WANTED = {
    "tokens",
    "tokens_kept_fraction",
    "logratio_mean",
    "logratio_abs_mean",
    "kl_rollout_train_k1",
    "kl_rollout_train_k2",
    "kl_rollout_train_k3",
    "chi2_train_rollout",
    "sequence_chi2_train_rollout",
}
OF_WEIGHTS = {"weight_ess", "weight_before_bounds_ess", "weight_mean"}
OF_SEQUENCES = {"sequence_weight_ess", "sequence_weight_before_bounds_ess"}
OF_MEANS = {key.replace("weight", "mean_weight") for key in OF_SEQUENCES}


def statistics_of(name, sequences):
    laid = lay_out(sequences, "packed")
    return laid.correct(SPECS[name], entropy=laid.external["entropy"]).statistics


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("lengths", [(5, 1, 7, 0, 4, 6), (), (0, 0)])
def test_they_are_the_metrics(name, lengths):
    statistics = statistics_of(name, random_sequences(1, lengths))
    metrics, given, refused = statistics.metrics(), set(), set()
    for key in rows_of(statistics.spec, statistics.objective, statistics.extra):
        try:
            found = statistics.on_device(key)
        except ValueError:
            refused.add(key)
            continue
        given.add(key)
        assert found.shape == () and found.dtype == torch.float64
        assert found.item() == near(metrics[key], size=0.0), key
    of_weights = OF_WEIGHTS | (OF_SEQUENCES if name == "product" else OF_MEANS) if name != "measure" else set()
    assert WANTED | {"entropy_mean", "kl_rollout_train_k3_over_entropy"} | of_weights <= given
    if name == "all":
        assert {"age_mean", "tokens_stale_fraction", "sequences_undivided", "sequence_weight_divisor_max"} <= given
    assert all(key.endswith("correlation") or "_p" in key for key in refused), refused


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
    for key in (OF_WEIGHTS | OF_SEQUENCES | OF_MEANS) & found.keys():
        assert math.isnan(found[key]) and math.isnan(out.statistics.on_device(key).item()), key
    key = "weight_ess" if level == "token" else "sequence_weight_ess"
    assert math.isnan(of_labels[f"task/0/{key}"])
    assert 0.99 < of_labels[f"task/1/{key}"] <= 1.0


def test_nothing_is_read():
    statistics = statistics_of("all", random_sequences(2))
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
    given = {"mask": laid.mask, "old_logp": laid.rollout, "rollout_logp": laid.rollout, "spec": SPECS["product"]}
    loss = rc.policy_loss(laid.train, laid.advantages, **given)
    both = loss.statistics + loss.statistics
    for key in ("kl_old_new_k1", "clip_high_fraction", "sequence_weight_ess", "tokens_trained"):
        assert both.on_device(key).item() == near(both.metrics()[key], size=0.0)
    alone = rc.policy_loss(laid.train, laid.advantages, mask=laid.mask, old_logp=laid.rollout)
    assert alone.statistics.on_device("kl_old_new_k3").item() == near(alone.metrics()["kl_old_new_k3"], size=0.0)


def test_errors():
    statistics = statistics_of("measure", random_sequences(4))
    with pytest.raises(
        ValueError, match="key: expected a native metric of these statistics, got 'weight_ess'; they have"
    ):
        statistics.on_device("weight_ess")
    with pytest.raises(ValueError, match=r"key: expected a metric that is a sum, .* got 'prob_correlation', whose"):
        statistics_of("all", random_sequences(4)).on_device("prob_correlation")

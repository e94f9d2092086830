"""`explain`: a metric's formula, the sums that it is made of with their values, its unit and its healthy range."""

from __future__ import annotations

import re

import pytest
import torch

import rollout_corr as rc
from builders.rounding import near
from rollout_corr.metrics.native import metrics_of

SPEC = rc.Spec(rc.Weight.token(upper=1.2), (rc.Criterion("k3", upper=0.01, label="outliers"),), detail="full")


@pytest.fixture(scope="module")
def out():
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(4, 9, generator=generator)
    train = rollout + 0.2 * torch.randn(4, 9, generator=generator)
    labels = {"task": rc.Labels(torch.tensor([0, 1, 1, 0]), ["math", "code"])}
    return rc.correct(train, rollout, rc.Batch(labels=labels), spec=SPEC)


def made_of(text):
    """The statistics that a text names, with their values."""
    return {name: float(value) for name, value in re.findall(r"made of: '(.+)', .* = (\S+)$", text, re.MULTILINE)}


def test_a_metric_of_weights(out):
    text = out.explain("weight_ess")
    sums = made_of(text)
    assert list(sums) == ["weight", "weight2"]
    assert sums["weight"] ** 2 / (36 * sums["weight2"]) == near(out.metrics()["weight_ess"])
    lines = text.splitlines()
    assert lines[0] == f"weight_ess = {out.metrics()['weight_ess']:.6g} fraction"
    assert lines[1] == "  meaning: (sum w)^2 / (n sum w^2) of the weight after the bounds"
    assert lines[2] == "  formula: fraction('weight' * 'weight' / (n * 'weight2'))"
    assert lines[3] == "  n: 36 measured tokens, the sum 'tokens_measured'"
    assert lines[4].startswith("  made of: 'weight', a sum = ") and "a sum of x^2 = " in lines[5]
    assert "'weight_around_one2', a sum of (x - 1)^2 = " in out.explain("weight_std")
    assert "'ratio', a sum of x - 1 = " in out.explain("ratio_mean")
    assert lines[6:] == ["  healthy: > 0.5"]


def test_a_metric_of_a_criterion_and_one_of_nothing_but_a_sum(out):
    text, metrics = out.explain("outliers/mean"), out.metrics()
    assert made_of(text)["outliers/value"] / 36 == near(metrics["outliers/mean"])
    assert "n: 36 measured tokens, the sum 'outliers/units'" in text and "healthy: inside the bounds" in text
    assert out.explain("tokens").splitlines()[-2:] == ["  made of: 'tokens', a sum = 36", "  healthy: any"]
    assert "512 bins of the histogram of D" in out.explain("logratio_p50")
    assert "'-min_d', a negated minimum = " in out.explain("logratio_min")


def test_of_a_label(out):
    key = "task/math/weight_ess"
    text = out.explain(key, by="task")
    assert text.startswith(f"{key} = {out.metrics(by='task')[key]:.6g} fraction") and "n: 18 measured tokens" in text
    assert list(made_of(text)) == ["weight", "weight2"]
    for key, value in out.metrics(by="task").items():
        assert out.explain(key, by="task").startswith(f"{key} = {value:.6g}"), key
    with pytest.raises(ValueError, match=r"key: .* 'task/math/weight_es'; the nearest are .'task/math/weight_ess"):
        out.explain("task/math/weight_es", by="task")


def test_every_metric_of_a_batch_and_of_a_loss(out):
    for key, value in out.metrics().items():
        assert out.explain(key).startswith(f"{key} = {value:.6g}"), key
        assert out.statistics.explain(key) == out.explain(key)
    assert {row.key for row in metrics_of(SPEC)} < out.metrics().keys()
    x = torch.zeros(2, 3)
    loss = rc.policy_loss(x, torch.ones(2), old_logp=x, rollout_logp=x, spec=SPEC)
    for key in ("surrogate_ratio_mean", "surrogate_loss_mean", "weight_ess"):
        assert loss.explain(key).startswith(f"{key} = {loss.metrics()[key]:.6g}")


def test_a_key_that_there_is_not(out):
    with pytest.raises(ValueError, match=r"key: expected a metric .* 'weight_es'; the nearest are .'weight_ess'"):
        out.explain("weight_es")
    with pytest.raises(ValueError, match="by: expected one of"):
        out.explain("weight_ess", by="environment")

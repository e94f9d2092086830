"""Metrics at their edges, on the host and as tensors; all others are judged in test_random_calls.py."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.weights import weight_of
from rollout_corr.metrics import histogram

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_log_prob_that_is_not_finite_has_no_gap_to_the_entropy():
    """Nor has an entropy that is not, which is counted."""
    train, entropy = torch.tensor([[-1.0, -math.inf, -2.0]]), torch.tensor([[0.5, 0.5, math.nan]])
    found = rc.correct(train, torch.full((1, 3), -1.0), rc.Batch(entropy=entropy)).metrics()
    assert (found["entropy_gap_mean"], found["entropy_mean"], found["tokens_entropy_nonfinite"]) == (-0.5, 0.5, 1)


def test_bins_meet_and_exact_zeros_of_either_sign_stand_between_them():
    edges = [histogram.bin_edges(k) for k in range(256)]
    assert all(low < high for low, high in edges)
    assert [high for _, high in edges[:-1]] == [low for low, _ in edges[1:]] and edges[-1][1] == math.inf
    inside = [0.0] * 512
    # One 0.0, three of -0.0, and nothing else in the bins around 0.
    inside[0], inside[256] = 1.0, 3.0
    assert [histogram.interpolated(list(inside), 4.0, (-1.0, 1.0), percent) for percent in (1, 50, 99)] == [0.0] * 3


def test_bits_raise_no_warning():
    x = -torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    one_off = x.clone()
    one_off[5, 7] = torch.nextafter(x[5, 7], torch.tensor(-9.0))
    out = rc.correct(one_off, x, mask=torch.ones_like(x), spec=rc.Spec(detail="full"))
    found = out.metrics()
    assert [found[key] for key in ("tokens_differing", "sequences_differing", "logp_ulps_max")] == [1, 1, 1]
    assert out.warnings() == []
    assert "tokens_differing / tokens" in out.explain("tokens_differing_fraction")


def test_percentiles_of_exact_zeros_are_zero():
    """One token of 512 differs; then one in four by less than the histogram tells from 0, half of them below it."""
    x = torch.full((1, 512), -1.0)
    y = x.clone()
    y[0, 3] -= 1e-6
    spec = rc.Spec(detail="full")
    found = rc.correct(x, y, spec=spec).metrics()
    percentiles = [value for key, value in found.items() if key.startswith("logratio_p")]
    assert percentiles == [0.0] * 9 + [found["logratio_max"]] * 2
    y = torch.full((1, 512), -1e-3)
    x = y.clone()
    x[0, :64], x[0, 64:128] = -1e-3 - 3e-8, -1e-3 + 3e-8
    found = rc.correct(x, y, spec=spec).metrics()
    assert found["tokens_differing"] == 128
    low, middle, high = ([found[f"logratio_p{p}"] for p in some] for some in ((1, 5, 10), (25, 50, 75), (90, 95, 99)))
    assert middle == [0.0] * 3
    assert all(-4e-8 < p < 0.0 for p in low) and all(0.0 < p < 4e-8 for p in high)


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


def test_a_key_that_no_tensor_has():
    with pytest.raises(
        ValueError, match="key: expected a native metric of these statistics, got 'weight_ess'; they ha"
    ):
        rc.Statistics.nothing(rc.Spec()).on_device("weight_ess")
    with pytest.raises(ValueError, match=r"key: expected a metric that is a sum, .* got 'prob_correlation', whose"):
        rc.Statistics.nothing(rc.Spec(detail="full")).on_device("prob_correlation")

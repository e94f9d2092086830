"""Metrics of the histogram and of single bits; all others are judged in test_random_calls.py."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from rollout_corr.metrics import histogram

pytestmark = pytest.mark.usefixtures("one_thread")


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

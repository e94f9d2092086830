"""The look at a whole batch: means of integers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from rollout_corr.backends.ranks import Ranks
from rollout_corr.backends.sees_batch import WholeBatch


def seen(x, trains):
    """A batch of sequences of one length, as it is read."""
    found = SimpleNamespace(tokens=None, counted=trains, x=x)
    return WholeBatch(SimpleNamespace(train=x), found, torch.arange(5), Ranks())


@pytest.mark.parametrize("largest", [0.5, 30.0, 1e6, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean(largest, dtype):
    """With values that are saturated, and with tokens left out; the values stay as they are."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3000, generator=generator, dtype=torch.float64).to(dtype)
    x[7] = largest
    for trains in (None, torch.rand(x.shape[0], generator=generator) < 0.7):
        kept = x.clone()
        found = seen(x, trains).mean(x)
        assert x.equal(kept)
        of = kept[... if trains is None else trains].double().clamp(max=2.0**37)
        assert found.item() == pytest.approx(of.mean().item(), rel=1e-6, abs=1e-7)


def test_nothing_trains():
    assert seen(torch.ones(4), torch.zeros(4, dtype=torch.bool)).mean(torch.ones(4)) == 0.0

"""The drop-in for AReaL: dtypes, clamps, what it says. tests/conformance compares its results with AReaL's."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rollout_corr.frameworks.areal import config as areal_config
from rollout_corr.frameworks.areal import dropin


@dataclass
class RejectionSamplingResult:
    """AReaL's own."""

    loss_mask: torch.Tensor
    behave_imp_weight: torch.Tensor
    filtered_fraction: float


@pytest.fixture(autouse=True)
def theirs(monkeypatch):
    """AReaL's module, as far as it is used."""
    module = ModuleType(dropin.MODULE)
    module.RejectionSamplingResult = RejectionSamplingResult
    monkeypatch.setitem(sys.modules, dropin.MODULE, module)


def configuration(**changed):
    defaults = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0, "lower": None}
    return SimpleNamespace(**defaults | changed)


def batch(seed=0):
    made = torch.Generator().manual_seed(seed)
    old = torch.rand(5, 9, generator=made, dtype=torch.float64).log().clamp(max=-0.01)
    proximal = (old + 0.2 * torch.randn(5, 9, generator=made, dtype=torch.float64)).clamp(max=-0.01)
    mask = (torch.rand(5, 9, generator=made) < 0.7).long()
    mask[2] = 0
    return proximal, old, mask


def test_packed_tokens_need_no_offsets():
    given = [x.reshape(-1) for x in batch()]
    config = configuration(upper=1.1)
    found = dropin.apply_rejection_sampling(*given, None, config)
    expected = dropin.apply_rejection_sampling(*batch(), None, config)
    assert torch.equal(found.loss_mask, expected.loss_mask.reshape(-1))
    with pytest.raises(ValueError, match="cu_seqlens: expected the offsets of packed sequences at the level sequence"):
        dropin.apply_rejection_sampling(*given, None, configuration(level="sequence"))


def test_nonfinite_and_nothing_valid():
    """A ratio that is no number is 1, as in AReaL; a divergence that is none rejects its sequence."""
    proximal, old, mask = batch()
    old[0, 0], mask[0, 0] = math.nan, 1
    found = dropin.apply_rejection_sampling(proximal, old, mask, None, configuration(upper=1.1))
    assert found.behave_imp_weight[0, 0] == 1.0 and found.loss_mask[0, 0] == 1
    found = dropin.apply_rejection_sampling(proximal, old, mask, None, configuration(metric="kl_k3", upper=0.5))
    assert not found.loss_mask[0].any() and found.behave_imp_weight.isfinite().all()
    for action in areal_config.ACTIONS:
        found = dropin.apply_rejection_sampling(proximal, old, mask * 0, None, configuration(action=action))
        assert not found.behave_imp_weight.any() and found.filtered_fraction == 0.0

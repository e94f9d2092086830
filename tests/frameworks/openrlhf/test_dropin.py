"""The drop-in for OpenRLHF's policy loss: names, Specs, errors; tests/conformance compares it with OpenRLHF's own."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import rollout_corr as rc
from builders.rounding import near
from rollout_corr.frameworks.openrlhf import dropin

SETTINGS = {
    "clip_eps_low": 0.2,
    "clip_eps_high": 0.3,
    "dual_clip": None,
    "policy_loss_type": "ppo",
    "token_level_loss": True,
    "is_correction_level": "token",
    "is_correction_mode": "mask",
    "is_correction_gating": "ratio",
    "is_correction_threshold": [0.8, 1.2],
}


@pytest.fixture
def loss(monkeypatch):
    """PolicyLoss of an OpenRLHF; only that module of it is imported; its own loss is not asked for."""

    def forward(
        self,
        log_probs,
        old_log_probs,
        advantages,
        action_mask=None,
        rollout_log_probs=None,
        dp_size=1,
        batch_num_tokens=None,
        global_batch_size=None,
    ):
        assert not torch.is_grad_enabled()
        return math.nan, "clip_ratio", "ppo_kl", "vllm_kl"

    module, root = ModuleType(dropin.MODULE), ModuleType("openrlhf")
    module.PolicyLoss = type("PolicyLoss", (SimpleNamespace,), {"forward": forward})
    root.__version__ = dropin.DROP_IN.checked[0]
    monkeypatch.setitem(sys.modules, "openrlhf", root)
    monkeypatch.setitem(sys.modules, dropin.MODULE, module)
    yield module.PolicyLoss
    dropin.uninstall()


def batch(seed=0):
    made = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(4, 7, generator=made, dtype=torch.float64)
    old = rollout + 0.2 * torch.randn(4, 7, generator=made, dtype=torch.float64)
    new = (old + 0.2 * torch.randn(4, 7, generator=made, dtype=torch.float64)).requires_grad_()
    mask = (torch.rand(4, 7, generator=made) < 0.8).long()
    return new, old, torch.randn(4, 1, generator=made, dtype=torch.float64).expand(4, 7), mask, rollout


def test_its_settings(loss):
    """tests/conformance compares the value and the gradient with OpenRLHF's; its metrics stay its own."""
    assert dropin.install().in_place
    given = batch()
    value, *metrics = loss(**SETTINGS).forward(*given)
    assert metrics == ["clip_ratio", "ppo_kl", "vllm_kl"]
    value.backward()
    assert given[0].grad.any()


def test_before_0_11_2(loss):
    """Three other names for the same correction, and none where it is off."""
    dropin.install()
    given = batch()
    others = {name: value for name, value in SETTINGS.items() if not name.startswith("is_")}
    old = {"vllm_is_truncated_threshold": [0.8, 1.2], "vllm_is_correction_type": "icepop"}
    new_names, old_names = (
        loss(**settings).forward(*given)[0]
        for settings in (SETTINGS, others | old | {"enable_vllm_is_correction": True})
    )
    assert new_names == old_names
    off = loss(**others, **old, enable_vllm_is_correction=False).forward(*given[:4])[0]
    assert off == loss(**SETTINGS | {"is_correction_level": "off"}).forward(*given)[0] != old_names


def test_a_spec_of_your_own(loss):
    dropin.install(spec=rc.Spec(weight=rc.Weight.token(upper=1.1)))
    given = batch()
    truncated = loss(**SETTINGS | {"is_correction_level": "off"}).forward(*given)[0]
    settings = {"is_correction_mode": "clip", "is_correction_threshold": [0.0, 1.1]}
    dropin.install()
    assert truncated.item() == near(loss(**SETTINGS | settings).forward(*given)[0].item())

"""SkyRL's policy losses by ours: what tests/conformance, which compares them with SkyRL's, does not ask."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rollout_corr.frameworks.skyrl import dropin
from rollout_corr.frameworks.skyrl import losses as skyrl_losses

LOW, HIGH, C = 0.1, 0.25, 1.6
CORRECTIONS = {"off": {}, "token": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1}}


def configuration(correction):
    return SimpleNamespace(
        eps_clip_low=LOW,
        eps_clip_high=HIGH,
        clip_ratio_c=C,
        sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
        off_policy_correction=SimpleNamespace(**dropin.FIELDS | CORRECTIONS[correction]),
    )


def batch(seed=0):
    made = torch.Generator().manual_seed(seed)

    def random(draw):
        return draw(5, 9, generator=made, dtype=torch.float64)

    rollout = random(torch.rand).log()
    old = rollout + 0.2 * random(torch.randn)
    new = old + 0.3 * random(torch.randn)
    mask = (random(torch.rand) < 0.7).double()
    mask[3] = 0.0
    return new, old, random(torch.randn), mask, rollout


def test_without_rollout_and_mask():
    """No correction, and every token counts."""
    new, old, advantages, mask, rollout = batch()
    config = configuration("token")
    value, metrics = skyrl_losses.regular(new, old, advantages, config, mask, None)
    assert value == skyrl_losses.regular(new, old, advantages, configuration("off"), mask, rollout)[0]
    assert list(metrics) == ["clip_ratio"]
    every = skyrl_losses.regular(new, old, advantages, config, torch.ones_like(mask), None)
    assert skyrl_losses.regular(new, old, advantages, config) == every


def test_weights_in_the_mask():
    """A mask of weights weighs the loss, as SkyRL multiplies by it."""
    new, old, advantages, mask, rollout = batch()
    whole, _ = skyrl_losses.regular(new, old, advantages, configuration("token"), mask, rollout)
    half, _ = skyrl_losses.regular(new, old, advantages, configuration("token"), 0.5 * mask, rollout)
    assert float(half) == pytest.approx(0.5 * float(whole))


def test_register(monkeypatch):
    """Once, under names of their own."""
    entries = {"regular": None}

    def enter(name, function):
        assert name not in entries
        entries[name] = function

    module = ModuleType("skyrl.backends.skyrl_train.utils.ppo_utils")
    module.PolicyLossRegistry = SimpleNamespace(list_available=lambda: list(entries), register=enter)
    name = module.__name__
    while name:
        monkeypatch.setitem(sys.modules, name, module if name == module.__name__ else ModuleType(name))
        name = name.rpartition(".")[0]
    names = ["rollout_corr_regular", "rollout_corr_dual_clip", "rollout_corr_gspo", "rollout_corr_sapo"]
    assert skyrl_losses.register() == skyrl_losses.register() == names
    assert entries["rollout_corr_gspo"] is skyrl_losses.gspo and len(entries) == 5

"""SkyRL's policy losses by ours, against its formulas in plain torch: values, gradients, metrics, the registry."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from builders.rounding import assert_near, near
from rollout_corr.frameworks.skyrl import dropin
from rollout_corr.frameworks.skyrl import losses as skyrl_losses

LOW, HIGH, C = 0.1, 0.25, 1.6
TOKENS = {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25}
CORRECTIONS = {
    "off": {},
    "token": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1},
    "sequence": {"tis_ratio_type": "sequence", "sequence_mask_metric": "product", **TOKENS},
}


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


def tokens(name, new, old, advantages, mask):
    """The loss of each token, and which tokens were clipped."""
    if name == "gspo":
        mean = ((new - old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)
        ratio = (new - new.detach() + mean.detach()).exp()
    else:
        ratio = (new - old).exp()
    if name == "sapo":
        tau = torch.full_like(advantages, 1.05).masked_fill(advantages > 0, 1.0)
        return -advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau, torch.zeros_like(mask)
    first, second = ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages
    loss = -torch.minimum(first, second)
    if name == "dual_clip":
        loss = torch.where(advantages < 0, torch.minimum(-advantages * C, loss), loss)
    return loss, (-second > -first).double()


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", ["regular", "dual_clip", "gspo", "sapo"])
def test_loss(name, correction):
    function, config = getattr(skyrl_losses, name), configuration(correction)
    new, old, advantages, mask, rollout = batch()
    leaves = new.clone().requires_grad_(), new.clone().requires_grad_()
    value, metrics = function(leaves[0], old, advantages, config, mask, rollout)
    losses, clipped = tokens(name, leaves[1], old, advantages, mask)
    weights, wanted, kept = dropin.compute_off_policy_correction(old, rollout, mask, config.off_policy_correction)
    expected = (losses * (1.0 if weights is None else weights) * kept).sum()
    value.backward()
    expected.backward()
    assert_near(value, expected)
    assert_near(leaves[0].grad, leaves[1].grad)
    # Over the mask before rejection.
    wanted["clip_ratio"] = float((clipped * mask).sum() / mask.sum())
    assert metrics == near(wanted)


def test_without_rollout_and_mask():
    """No correction, and every token counts."""
    new, old, advantages, mask, _ = batch()
    config = configuration("token")
    value, metrics = skyrl_losses.regular(new, old, advantages, config, mask, None)
    losses, _ = tokens("regular", new, old, advantages, mask)
    assert float(value) == pytest.approx(float((losses * mask).sum())) and list(metrics) == ["clip_ratio"]
    value, _ = skyrl_losses.regular(new, old, advantages, config)
    assert float(value) == pytest.approx(float(losses.sum()))


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

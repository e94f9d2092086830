"""Losses of blocks on the CPU: what values read on the host leave out gives the same as the definition without it."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.rounding import all_near, near
from rollout_corr.api.policy_loss import LOSSES
from rollout_corr.backends import loss_blocks


def loss_of(new, **changed):
    generator = torch.Generator().manual_seed(1)
    old = new.detach() - 0.3 * torch.randn(new.shape, generator=generator)
    weights, trains = 0.5 + torch.rand(new.shape, generator=generator), torch.rand(new.shape, generator=generator) < 0.7
    advantages, loss = torch.randn(new.shape, generator=generator), rc.Loss(rc.PPO(0.2, 0.2, dual=1.5))
    factors = rc.Factors(changed.pop("weights", weights), trains)
    out = rc.policy_loss(new, advantages, loss=loss, correction=factors, **{"old_logp": old, **changed})
    return out, torch.autograd.grad(out.value, new)[0]


def same_as_whole(monkeypatch, new, **changed):
    out, gradient = loss_of(new, **changed)
    monkeypatch.setitem(LOSSES, "blocks", loss_blocks.run_whole)
    plain, expected = loss_of(new, **changed)
    assert all_near(out.value, plain.value, torch.float32)
    assert all_near(gradient, expected, torch.float32)
    found, metrics = out.metrics(), plain.metrics()
    assert found == near(metrics, torch.float32)
    return found


@pytest.mark.parametrize("spoiled", ["nothing", "nan", "inf", "overflow"])
def test_a_loss_of_blocks_is_that_of_the_whole(monkeypatch, spoiled):
    """Also where a sum of finite numbers overflows, and where tokens that do not train hold what is not finite."""
    new = -torch.rand(6, 50, generator=torch.Generator().manual_seed(0))
    changed = {}
    if spoiled == "overflow":
        changed["weights"] = torch.full_like(new, 3e37)
    elif spoiled != "nothing":
        new[2, 7] = float(spoiled)
    found = same_as_whole(monkeypatch, new.requires_grad_(), **changed)
    assert found["tokens_trained"] > 0


def test_ends_of_tokens_that_train(monkeypatch):
    """No token that trains has a ratio below 1, and those that do not train count as 1 nowhere."""
    new = torch.zeros(2, 40).requires_grad_()
    old = -0.3 * torch.ones(2, 40)
    found = same_as_whole(monkeypatch, new, old_logp=old)
    assert found["surrogate_ratio_min"] == near(1.34986, torch.float32)

"""A Spec in the call of `policy_loss`, or what `correct` made of it before: one loss, whatever is not finite."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.rounding import all_near, near


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("nonfinite", ["reject", "neutral", "propagate"])
@pytest.mark.parametrize("weight", [None, rc.Weight.token(upper=2.0)])
def test_the_same_loss(weight, nonfinite, bad):
    """Value, gradient and counts; a neutral old_logp is read as new_logp in both."""
    generator = torch.Generator().manual_seed(0)
    new, old, rollout = (-torch.rand(3, 5, generator=generator) for _ in range(3))
    old[0, 2] = bad
    spec = rc.Spec(weight, (rc.Criterion("abs", upper=0.9),), nonfinite=nonfinite)
    found = []
    for fused in (True, False):
        leaf = new.clone().requires_grad_()
        given = {"spec": spec} if fused else {"correction": rc.correct(old, rollout, spec=spec)}
        out = rc.policy_loss(leaf, torch.tensor([1.0, -0.5, 2.0]), old_logp=old, rollout_logp=rollout, **given)
        out.value.backward()
        counts = {name: out.metrics()[name] for name in ("tokens_trained", "tokens_loss_nonfinite")}
        found.append((out.value.item(), leaf.grad, counts))
    assert found[0][0] == near(found[1][0], torch.float32)
    assert all_near(found[0][1], found[1][1], torch.float32) and found[0][2] == near(found[1][2])

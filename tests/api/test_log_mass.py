"""The mass that truncated sampling kept, beyond what random calls of it compare with loops."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import INTERPRETED
from builders.rounding import near

pytestmark = INTERPRETED

TRAIN, ROLLOUT = torch.full((2, 6), -1.0), torch.full((2, 6), -1.1)
MASK = torch.ones(2, 6, dtype=torch.bool)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("side", ["rollout", "train"])
@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_mass_that_is_not_finite_rejects_its_sequence(broken, side, backend, device):
    mass, spec = torch.full((2, 6), -0.1), rc.Spec(rc.Weight.token(upper=2.0))
    mass[1, 3] = broken
    batch = rc.Batch(mask=MASK.to(device), kept_mass=rc.KeptMass(mass.to(device), side))
    out = rc.correct(TRAIN.to(device), ROLLOUT.to(device), batch, spec=spec, backend=backend)
    d = 0.1 + (0.1 if side == "rollout" else -0.1)
    assert out.keep.tolist() == [True, False] and out.metrics()["tokens_nonfinite"] == 1
    assert out.weights.tolist() == [near([math.exp(d)] * 6, torch.float32), [0.0] * 6]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_its_dtype_does_not_decide_which_computes(dtype):
    batch = rc.Batch(kept_mass=rc.KeptMass(torch.full((2, 6), -0.5, dtype=dtype)))
    assert rc.correct(TRAIN, ROLLOUT, batch, spec=rc.Spec(rc.Weight.token())).weights.dtype == torch.float32


def test_a_loss_without_rollout_logp_has_no_use_for_it():
    batch = rc.Batch(mask=MASK, kept_mass=rc.KeptMass(torch.full((2, 6), -0.5)))
    found, plain = (rc.policy_loss(TRAIN, torch.ones(2), one, old_logp=ROLLOUT) for one in (batch, rc.Batch(mask=MASK)))
    assert torch.equal(found.value, plain.value)


def test_a_mass_is_looked_at_where_tokens_are_valid():
    """Rounding of bf16 passes; garbage behind the mask and outside of sequences is not looked at."""
    mass, mask = torch.full((12,), 2.0**-7).log1p(), MASK.flatten().clone()
    mask[5], mass[5], mass[0], mass[11] = False, 30.0, 5.0, 6.0
    batch = rc.Batch(mask=mask, cu_seqlens=torch.tensor([2, 10]), kept_mass=rc.KeptMass(mass))
    rc.correct(TRAIN.flatten(), ROLLOUT.flatten(), batch)
    mass[4] = 0.25
    with pytest.raises(ValueError, match=r"at every valid token, got 0\.25"):
        rc.correct(TRAIN.flatten(), ROLLOUT.flatten(), batch)


def test_the_covariance_of_a_token_is_of_its_own_log_prob():
    new = torch.tensor([[-1.0, -2.0, -3.0, -4.0]], dtype=torch.float64)
    mass = torch.tensor([[-3.0, -2.0, -1.0, 0.0]], dtype=torch.float64).mul(0.9)
    advantages = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    loss, batch = rc.Loss(rc.KLCov(1.0)), rc.Batch(kept_mass=rc.KeptMass(mass))
    out = rc.policy_loss(new, advantages, batch, loss, rollout_logp=new - mass)
    plain = rc.policy_loss(new, advantages, loss=loss, rollout_logp=new)
    keys = [key for key in plain.metrics() if "cov" in key]
    assert keys and [out.metrics()[key] for key in keys] == near([plain.metrics()[key] for key in keys])

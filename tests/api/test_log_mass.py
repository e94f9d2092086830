"""The mass that truncated sampling kept, in `correct` and `policy_loss`; oracles judge random calls with it too."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.batches import check, lay_out, random_sequences, spoil
from builders.calls import bundled, bundled_loss
from builders.kernel_cases import INTERPRETED
from builders.kernel_cases import check as check_kernels
from builders.rounding import assert_near, near

pytestmark = INTERPRETED

SIDES = ("rollout", "train")
W, C = rc.Weight, rc.Criterion

# Every way in which log-probs are read: the ratio, both probabilities, sums, extrema, single tokens of sequences.
SPECS = {
    "token": rc.Spec(W.token(lower=0.5, upper=1.4), (C("tv", over="token", upper=0.25),), detail="full"),
    "geometric": rc.Spec(W.geometric(upper=1.1), (C("ratio", over="sequence", reduce="mean", lower=0.9),)),
    "kl": rc.Spec(None, (C("binary_kl", over="sequence", reduce="max", upper=0.05, drop="token"),), "both"),
    "neutral": rc.Spec(W.product(upper=2.0), (C("prob_diff", over="token", upper=0.2),), nonfinite="neutral"),
}


def broken(seed, renormalized, lengths=(5, 1, 7, 0, 4, 6)):
    """Random sequences with a kept mass, some of whose log-probs are not finite."""
    sequences = spoil(random_sequences(seed, lengths, renormalized=renormalized), seed)
    masses = [(q, t) for q in sequences for t, m in enumerate(q.mask) if m]
    sequence, t = masses[seed % len(masses)]
    sequence.mass[t] = (-math.inf, math.nan)[seed % 2]
    return sequences


# --- correct ---


@pytest.mark.parametrize(("number", "name"), list(enumerate(SPECS)))
def test_a_broken_mass_before_the_oracle(number, name, device):
    for side in SIDES:
        check(broken(number, side), SPECS[name], ("packed", "padded_left")[number % 2], whole=number > 1)
    check_kernels(broken(3, SIDES[number % 2]), SPECS[name], ("packed_gaps", "padded_strided")[number % 2], device)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_its_dtype_does_not_decide_which_computes(dtype):
    laid = lay_out(random_sequences(1, renormalized="rollout"), "packed", torch.float32)
    laid.log_mass = laid.log_mass.to(dtype)
    assert laid.correct(SPECS["token"]).weights.dtype == torch.float32


def test_a_loss_without_rollout_logp_has_no_use_for_it():
    new, old, mask = torch.full((2, 6), -1.0), torch.full((2, 6), -1.1), torch.ones(2, 6, dtype=torch.bool)
    batch = rc.Batch(mask=mask, kept_mass=rc.KeptMass(torch.full_like(new, -0.5)))
    found = rc.policy_loss(new, torch.ones(2), batch, old_logp=old)
    assert torch.equal(found.value, rc.policy_loss(new, torch.ones(2), mask=mask, old_logp=old).value)


def test_a_mass_is_looked_at_where_tokens_are_valid():
    """Rounding of bf16 passes; garbage behind the mask and outside of sequences is not looked at."""
    train, rollout, mask = torch.full((2, 6), -1.0), torch.full((2, 6), -1.1), torch.ones(2, 6, dtype=torch.bool)
    log_mass = torch.full((2, 6), 2.0**-7).log1p()
    mask[0, 1] = False
    log_mass[0, 1] = 30.0
    rc.correct(train, rollout, rc.Batch(mask=mask, kept_mass=rc.KeptMass(log_mass)))
    gaps = {"cu_seqlens": torch.tensor([2, 10])}
    flat = log_mass.flatten()
    flat[0], flat[11] = 5.0, 6.0
    rc.correct(train.flatten(), rollout.flatten(), **bundled(mask=mask.flatten(), log_mass=flat, **gaps))
    flat[4] = 0.25
    with pytest.raises(ValueError, match=r"at every valid token, got 0\.25"):
        rc.correct(train.flatten(), rollout.flatten(), **bundled(mask=mask.flatten(), log_mass=flat, **gaps))


# --- policy_loss ---

ADVANTAGES = torch.tensor([0.5, -0.25, 1.0, -0.5, 0.25, -1.0])


def loss_of(laid, surrogate, old=False, ref=False, **others):
    """The loss of a padded batch whose `train` is new_logp: value, gradient, metrics."""
    new = laid.train.detach().clone().requires_grad_()
    arguments = {"log_mass": laid.log_mass, "renormalized": laid.renormalized} if laid.log_mass is not None else {}
    if old:
        arguments["old_logp"] = laid.train + 0.1
    if ref:
        arguments |= {"ref_logp": laid.rollout - 0.2, "kl": rc.KL("k3", 0.1, weight="ratio")}
    found = rc.policy_loss(
        new,
        ADVANTAGES.to(laid.train.device),
        **bundled_loss(mask=laid.mask, rollout_logp=laid.rollout, surrogate=surrogate, **arguments, **others),
    )
    found.value.backward()
    return found, new.grad


@pytest.mark.parametrize("surrogate", [rc.GPG(), rc.Score(), rc.TOPR(), rc.SAPO(gate="stopped")], ids=repr)
def test_the_mass_is_in_the_ratio_and_not_in_the_log_prob_that_it_multiplies(surrogate, device):
    """At a ratio of 1 the value is -A n."""
    new, mass = torch.full((1, 2), -1.0), torch.full((1, 2), -0.1)
    for backend in ("torch", "triton"):
        out = rc.policy_loss(
            new.to(device).requires_grad_(),
            torch.ones(1, device=device),
            rc.Batch(kept_mass=rc.KeptMass(mass.to(device))),
            rc.Loss(surrogate),
            rollout_logp=(new - mass).to(device),
            backend=backend,
        )
        assert out.value.item() == near(2.0 if isinstance(surrogate, rc.SAPO) else 1.0, torch.float32), backend


def test_the_covariance_of_a_token_is_of_its_own_log_prob():
    new = torch.tensor([[-1.0, -2.0, -3.0, -4.0]], dtype=torch.float64)
    mass = torch.tensor([[-3.0, -2.0, -1.0, 0.0]], dtype=torch.float64).mul(0.9)
    advantages = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    loss, batch = rc.Loss(rc.KLCov(1.0)), rc.Batch(kept_mass=rc.KeptMass(mass))
    out = rc.policy_loss(new, advantages, batch, loss, rollout_logp=new - mass)
    plain = rc.policy_loss(new, advantages, loss=loss, rollout_logp=new)
    keys = [key for key in plain.metrics() if "cov" in key]
    assert keys and [out.metrics()[key] for key in keys] == near([plain.metrics()[key] for key in keys])


@pytest.mark.parametrize("side", SIDES)
def test_which_ratios_it_corrects(side):
    """Those to the rollout: old/rollout and new/rollout. In new/old it is not, nor in the surrogate's ratio there."""
    laid = lay_out(random_sequences(3, renormalized=side), "padded_right")
    bounds = {
        of: C("ratio", over="token", of=of, lower=0.95, upper=1.2) for of in ("train/rollout", "new/rollout", "new/old")
    }
    plain = replace(laid, log_mass=None)
    shift = {"rollout": {"train": laid.train - laid.log_mass}, "train": {"rollout": laid.rollout - laid.log_mass}}
    by_hand = replace(plain, **shift[side])
    for of, criterion in bounds.items():
        spec = rc.Spec(criteria=(criterion,))
        found, slope = loss_of(laid, rc.PPO(), old=True, spec=spec)
        wanted, _ = loss_of(plain if of == "new/old" else by_hand, rc.PPO(), old=True, spec=spec)
        assert torch.equal(found.mask, wanted.mask), of
        assert 0 < found.mask.sum() < laid.mask.sum() or of == "new/old"
    without, plain_slope = loss_of(plain, rc.PPO(), old=True)
    found, slope = loss_of(laid, rc.PPO(), old=True)
    assert found.value == without.value and torch.equal(slope, plain_slope)
    weight = rc.Spec(W.token(upper=2.0))
    found, slope = loss_of(laid, rc.PPO(), old=True, spec=weight)
    wanted, _ = loss_of(by_hand, rc.PPO(), old=True, spec=weight)
    assert_near(found.weights, wanted.weights, size=0.0)
    assert not torch.equal(slope, plain_slope)

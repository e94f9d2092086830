"""A token whose ref_logp is not finite never trains: in any block, with any neighbor, on any backend."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import INTERPRETED
from builders.loss_cases import run_as
from builders.rounding import all_near, near

pytestmark = INTERPRETED

OWN, SHARED = (rc.KL("k3", 0.5, mean=mean) for mean in (rc.Mean("token", over="kept"), None))
# Two sequences of 12 tokens; a small block holds one.
PLACE, NEIGHBOR, FAR = (0, 3), (0, 7), (1, 2)


def call(broken, surrogate=rc.PPO(), kl=OWN, backend="auto", trains=None, device="cpu"):  # noqa: B008  (frozen)
    """The value, the gradient and the metrics of a batch whose reference is broken at some places."""
    generator = torch.Generator().manual_seed(0)
    old, noise, advantages = torch.rand(3, 2, 12, generator=generator).to(device).unbind()
    new, ref = (old + 0.4 * noise - 0.2).requires_grad_(), old + 0.1
    for place, value in broken.items():
        ref[place] = value
    given = {"old_logp": old, "ref_logp": ref, "correction": None if trains is None else rc.Factors(mask=trains)}
    out = rc.policy_loss(new, advantages - 0.5, loss=rc.Loss(surrogate, kl=kl), **given, backend=backend)
    out.value.backward()
    return out.value.item(), new.grad.cpu(), out.metrics()


def without(broken, device="cpu"):
    which = torch.ones(2, 12, dtype=torch.bool, device=device)
    for place in broken:
        which[place] = False
    return which


@pytest.mark.parametrize(
    ("surrogate", "kl", "bad"),
    [
        (rc.PPO(), OWN, math.nan),
        (rc.PPO(), OWN, math.inf),
        (rc.PPO(), OWN, -math.inf),
        (rc.PPO(), SHARED, math.nan),
        (rc.GSPO(), OWN, math.nan),
        (rc.SAPO(), OWN, math.nan),
        (rc.ClipCov(), OWN, math.nan),
        (rc.KLCov(), OWN, math.nan),
    ],
)
def test_on_plain_torch(surrogate, kl, bad):
    """As where a training mask leaves the token out, whether another one of its block is broken too or not."""
    for broken in ({PLACE: bad}, {PLACE: bad, NEIGHBOR: math.nan}, {PLACE: bad, FAR: math.nan}):
        wanted = call({}, surrogate, kl, trains=without(broken))
        for way in ("blocks", "small blocks", "whole"):
            with run_as(way):
                value, gradient, metrics = call(broken, surrogate, kl)
            assert metrics["tokens_trained"] == 24 - len(broken) == wanted[2]["tokens_trained"], way
            assert metrics["tokens_loss_nonfinite"] == len(broken), way
            assert not gradient[~without(broken)].any(), way
            assert value == near(wanted[0], torch.float32) and all_near(gradient, wanted[1]), way


@pytest.mark.parametrize("surrogate", [rc.PPO(), rc.GSPO(), rc.SAPO(), rc.KLCov()])
def test_on_kernels(surrogate, device):
    broken = {PLACE: math.nan}
    wanted = call({}, surrogate, trains=without(broken, device), device=device)
    value, gradient, metrics = call(broken, surrogate, backend="triton", device=device)
    assert (metrics["tokens_trained"], metrics["tokens_loss_nonfinite"]) == (23, 1)
    assert value == near(wanted[0], torch.float32) and all_near(gradient, wanted[1]) and not gradient[PLACE]


def test_in_a_recipe():
    """SkyRL's GRPO has a KL with a mean of its own."""
    recipe = rc.recipe("skyrl.grpo")
    assert recipe.loss.kl is not None and recipe.loss.kl.mean is not None
    new = torch.full((2, 4), -0.5, requires_grad=True)
    ref = torch.full((2, 4), -0.4)
    ref[0, 1] = math.nan
    out = rc.policy_loss(new, torch.ones(2), loss=recipe.loss, old_logp=new.detach(), ref_logp=ref)
    assert (out.metrics()["tokens_trained"], out.metrics()["tokens_loss_nonfinite"]) == (7, 1)

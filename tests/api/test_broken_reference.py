"""A token whose ref_logp is not finite never trains: in any block, with any neighbor, on any backend."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import INTERPRETED
from builders.loss_cases import LOOKING, SURROGATES, run_as
from builders.rounding import all_near, near
from rollout_corr.backends.loss_task import beyond_kernels

pytestmark = INTERPRETED

ALL = SURROGATES | LOOKING
TOKEN = rc.Mean("token", over="kept")
# Two sequences of 8 tokens; a small block holds one.
SHAPE, PLACE, NEIGHBOR, FAR = (2, 12), (0, 3), (0, 7), (1, 2)


def call(broken, surrogate, kl, backend="auto", trains=None, device="cpu"):
    """The value, the gradient and the metrics of a batch whose reference is broken at some places."""
    generator = torch.Generator().manual_seed(0)
    old, noise, advantages = torch.rand(4, *SHAPE, generator=generator).to(device)[:3].unbind()
    new = (old + 0.4 * noise - 0.2).requires_grad_()
    ref = old + 0.1
    for place, value in broken.items():
        ref[place] = value
    groups, mean = None, TOKEN
    if surrogate.traits.sees == "groups":
        groups, mean = rc.Groups(index=torch.zeros(2, dtype=torch.int64), count=1), rc.Mean("sequence", over="kept")
        advantages = torch.tensor([0.5, -1.0])
    batch = rc.Batch(groups=groups)
    factors = None if trains is None else rc.Factors(mask=trains.to(device))
    loss = rc.Loss(surrogate, kl=kl, mean=mean)
    out = rc.policy_loss(
        new, advantages - 0.5, batch, loss, old_logp=old, ref_logp=ref, correction=factors, backend=backend
    )
    out.value.backward()
    return out.value.item(), new.grad.cpu(), out.metrics()


def kept(broken):
    which = torch.ones(SHAPE, dtype=torch.bool)
    for place in broken:
        which[place] = False
    return which


OWN, SHARED = rc.KL("k3", 0.5, mean=TOKEN), rc.KL("k3", 0.5)


@pytest.mark.parametrize(
    ("name", "kl", "bad"),
    [
        *((name, OWN, math.nan) for name in ALL),
        ("ppo", OWN, math.inf),
        ("ppo", OWN, -math.inf),
        ("ppo", SHARED, math.nan),
    ],
)
def test_on_plain_torch(name, kl, bad):
    """As where a training mask leaves the token out, whether another one of its block is broken too or not."""
    for broken in ({PLACE: bad}, {PLACE: bad, NEIGHBOR: math.nan}, {PLACE: bad, FAR: math.nan}):
        wanted = call({}, ALL[name], kl, trains=kept(broken))
        for way in ("blocks", "small blocks", "whole"):
            with run_as(way):
                value, gradient, metrics = call(broken, ALL[name], kl)
            assert metrics["tokens_trained"] == 24 - len(broken) == wanted[2]["tokens_trained"], way
            assert metrics["tokens_loss_nonfinite"] == len(broken), way
            assert not gradient[~kept(broken)].any(), way
            assert value == near(wanted[0], torch.float32) and all_near(gradient, wanted[1]), way


@pytest.mark.parametrize("name", ["ppo", "gspo", "sapo", "kl cov"])
def test_on_kernels(name, device):
    assert beyond_kernels(ALL[name], False) is None
    broken = {PLACE: math.nan}
    wanted = call({}, ALL[name], OWN, trains=kept(broken))
    value, gradient, metrics = call(broken, ALL[name], OWN, "triton", device=device)
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

"""The gradient as autograd's users meet it: odd upstream gradients, compilers, nothing to train on."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import rollout_corr as rc
from builders.rounding import assert_near
from rollout_corr.metrics import peers

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(width=9):
    generator = torch.Generator().manual_seed(0)
    new = -torch.rand(4, width, generator=generator) * 2
    old, rollout, advantages = torch.randn(3, 4, width, generator=generator)
    mask = torch.rand(4, width, generator=generator) < 0.8
    mask[1] = False
    return new.requires_grad_(), new.detach() + 0.3 * old, new.detach() + 0.3 * rollout, advantages, mask


def test_upstream_gradients():
    new, old, _, advantages, mask = inputs()
    value = rc.policy_loss(new, advantages, mask=mask, old_logp=old).value
    (one,) = torch.autograd.grad(value, new, retain_graph=True)
    assert torch.equal(torch.autograd.grad(value, new, retain_graph=True)[0], one), "a second backward"
    for scaled, factor in (
        (value * 3.0, 3.0),
        (value.double() * 3.0, 3.0),
        (value.expand(5).sum(), 5.0),
        (torch.stack([value, value])[::2].sum(), 1.0),
        (value / 0.3, 1 / 0.3),
    ):
        (slope,) = torch.autograd.grad(scaled, new, retain_graph=True)
        assert_near(slope, one * factor, torch.float32, size=0.0)
    (slope,) = torch.autograd.grad(value, new, torch.full((3,), 2.0)[1], retain_graph=True)
    assert torch.equal(slope, one * 2)
    (slope,) = torch.autograd.grad(value, new, torch.tensor(0.0))
    assert not slope.any()


def test_without_gradients():
    new, old, rollout, advantages, mask = inputs()
    wanted = rc.policy_loss(new, advantages, mask=mask, old_logp=old, rollout_logp=rollout, spec=rc.Spec())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = rc.policy_loss(new, advantages, mask=mask, old_logp=old, rollout_logp=rollout, spec=rc.Spec())
            assert not out.value.requires_grad and out.metrics() == wanted.metrics()
        assert torch.equal(out.value, wanted.value)
    with torch.inference_mode():
        made_inside = new.detach().clone()
        assert torch.equal(rc.policy_loss(made_inside, advantages, mask=mask, old_logp=old).value, wanted.value)
    out = rc.policy_loss(new.detach(), advantages, mask=mask, old_logp=old)
    assert not out.value.requires_grad and torch.equal(out.value, wanted.value)
    # Only new_logp is differentiated, whatever else requires grad.
    others = [x.clone().requires_grad_() for x in (old, rollout, advantages)]
    out = rc.policy_loss(new.detach(), others[2], mask=mask, old_logp=others[0], rollout_logp=others[1], spec=rc.Spec())
    assert not out.value.requires_grad
    assert wanted.value.requires_grad and not wanted.statistics.sums.requires_grad


def test_double_backward_is_refused():
    new, old, _, advantages, mask = inputs()
    value = rc.policy_loss(new, advantages, mask=mask, old_logp=old).value
    with pytest.raises(RuntimeError, match=r"^policy_loss: expected a backward pass without create_graph=True"):
        torch.autograd.grad(value, new, create_graph=True)


NOTHING_TRAINS = [
    {"mask": torch.zeros(2, 3)},
    {"mask": torch.ones(2, 3), "correction": rc.Factors(mask=torch.zeros(2, 3))},
    {"correction": rc.Factors(weights=torch.zeros(2, 3))},
]


# A sum has no divisor.
MEANS = [(rc.Mean("sum"), None)] + [
    (rc.Mean(of), total) for of in ("token", "sequence", "sequence_sum") for total in (None, 0.0, torch.tensor(0))
]


@pytest.mark.parametrize(("mean", "total"), MEANS, ids=str)
def test_nothing_to_train_on(mean, total):
    """0, with a gradient of zeros: every rank gets through its backward pass."""
    new, advantages = torch.full((2, 3), -1.0, requires_grad=True), torch.ones(2, 3)
    for surrogate, given in itertools.product((rc.PPO(), rc.GSPO(), rc.KLCov()), NOTHING_TRAINS):
        factors = {"correction": given.get("correction")}
        batch = rc.Batch(mask=given.get("mask"), total=total)
        out = rc.policy_loss(new, advantages, batch, rc.Loss(surrogate, mean), old_logp=new.detach() + 0.1, **factors)
        (slope,) = torch.autograd.grad(out.value, new)
        assert out.value.item() == 0.0 and not slope.any() and all(map(math.isfinite, out.metrics().values()))
    for shape, packed in (((0,), torch.zeros(1, dtype=torch.int64)), ((0, 3), None)):
        nothing = torch.zeros(shape, requires_grad=True)
        batch = rc.Batch(cu_seqlens=packed, total=total)
        out = rc.policy_loss(nothing, nothing.detach(), batch, rc.Loss(mean=mean), old_logp=nothing.detach())
        assert out.value.item() == 0.0 and torch.autograd.grad(out.value, nothing)[0].shape == shape


def test_a_nan_that_is_passed_on():
    new, old, rollout, advantages, mask = inputs()
    rollout[0, 0], mask[0, 0] = math.nan, True
    spec, given = rc.Spec(rc.Weight.token(), nonfinite="propagate"), {"old_logp": old, "rollout_logp": rollout}
    assert rc.policy_loss(new, advantages, mask=mask, spec=spec, **given).value.isnan()


def test_compiles_without_a_graph_break(monkeypatch):
    """Forward and backward, with a correction in the same graph, and a new length does not compile again.

    A framework's metrics are imported with the Spec: the first call used to, which no compiled function may.
    """
    monkeypatch.setattr(peers, "_LOADED", {})
    criteria = (rc.Criterion("k3", over="sequence", reduce="mean", upper=0.1),)
    spec = rc.Spec(rc.Weight.token(upper=1.3), criteria, report=("native", "verl"))
    surrogate, kl = rc.GSPO(0.1, 0.1), rc.KL("k3", 0.1, gradient="k2")
    torch.compiler.reset()
    compilations = 0

    def counting(graph, _):
        nonlocal compilations
        compilations += 1
        return graph.forward

    def step(x, old, rollout, advantages, mask, offsets):
        out = rc.policy_loss(
            x * 1.0,
            advantages,
            loss=rc.Loss(surrogate, mean=rc.Mean("sequence"), kl=kl),
            mask=mask,
            cu_seqlens=offsets,
            old_logp=old,
            rollout_logp=rollout,
            spec=spec,
            ref_logp=rollout,
        )
        return out.value * 2.0, out.statistics.sums

    compiled = torch.compile(step, fullgraph=True, backend=counting, dynamic=True)
    for width in (9, 11, 14):
        new, *rest = inputs(width=width)
        new, *rest = (x.detach().reshape(-1) for x in (new, *rest))
        new.requires_grad_()
        offsets = torch.arange(0, 4 * width + 1, width)
        value, found = compiled(new, *rest, offsets)
        wanted, sums = step(new, *rest, offsets)
        torch.testing.assert_close(value, wanted)
        assert_near(found, sums, torch.float32)
        (one,), (other,) = (torch.autograd.grad(x, new) for x in (wanted, value))
        torch.testing.assert_close(other, one)
    assert compilations == 1

"""The gradient as autograd's users meet it: odd upstream gradients, compilers, garbage, extremes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.batches import GARBAGE
from builders.calls import bundled_loss
from builders.loss_cases import MEANS, SURROGATES
from builders.rounding import assert_near
from rollout_corr.metrics import peers

pytestmark = pytest.mark.usefixtures("one_thread")

INF, NAN = math.inf, math.nan


def inputs(dtype=torch.float32, rows=4, width=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    new = (-torch.rand(rows, width, generator=generator) * 2).to(dtype)
    old, rollout = (new + 0.3 * torch.randn(rows, width, generator=generator) for _ in range(2))
    advantages = torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.8
    mask[1] = False
    return new.requires_grad_(), old.to(dtype), rollout.to(dtype), advantages, mask


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


@pytest.mark.parametrize(("name", "mean"), list(zip(SURROGATES, itertools.cycle(MEANS))))
def test_nothing_to_train_on(name, mean):
    """0, with a gradient of zeros: every rank gets through its backward pass."""
    new, old, _, advantages, mask = inputs()
    divided = [{"mean": mean}]
    if mean.of != "sum":
        divided += [{"mean": replace(mean, over="kept")}, *({"mean": mean, "total": x} for x in (0.0, torch.tensor(0)))]
    for more in divided:
        options = {"surrogate": SURROGATES[name], **more}
        empty = torch.zeros(0, requires_grad=True)
        nowhere = torch.zeros(1, dtype=torch.int64)
        cases = [
            (new, {"mask": torch.zeros_like(mask), "old_logp": old, "advantages": advantages}),
            (new, {"mask": mask, "train_mask": torch.zeros_like(mask), "old_logp": old, "advantages": advantages}),
            (new, {"mask": mask, "weights": torch.zeros_like(old), "old_logp": old, "advantages": advantages}),
            (empty, {"cu_seqlens": nowhere, "old_logp": empty.detach(), "advantages": empty.detach()}),
            (new[:0], {"old_logp": old[:0], "advantages": advantages[:0]}),
        ]
        for log_probs, arguments in cases:
            if "weights" in arguments and name in ("gmpo", "gmpo scaled", "vespo", "vespo clamped"):
                continue  # a logarithm of theirs is in the loss, and has a floor
            out = rc.policy_loss(log_probs, **bundled_loss(**arguments, **options))
            assert out.value.item() == 0.0
            (slope,) = torch.autograd.grad(out.value, log_probs)
            assert slope.shape == log_probs.shape and not slope.any()
            assert all(math.isfinite(x) for x in out.metrics().values())


@pytest.mark.parametrize("name", SURROGATES)
def test_garbage_behind_the_masks(name):
    """Values at tokens that do not train change no bit, and get a gradient of exactly 0."""
    new, old, rollout, advantages, mask = inputs()
    generator = torch.Generator().manual_seed(1)
    trains = torch.rand(mask.shape, generator=generator) < 0.7
    outside = ~(mask & trains)
    found = []
    for value in (0.0, *GARBAGE, 3e38):
        spoiled = [torch.where(outside, value, x.detach()) for x in (new, old, rollout, advantages)]
        spoiled[0].requires_grad_()
        out = rc.policy_loss(
            spoiled[0],
            spoiled[3],
            loss=rc.Loss(
                SURROGATES[name],
                mean=rc.Mean("sequence"),
                kl=rc.KL("k3", 0.1, weight="ratio"),
                regularizer=rc.SquaredLogRatio(0.1, "kept"),
            ),
            mask=mask,
            old_logp=spoiled[1],
            ref_logp=spoiled[2],
            correction=rc.Factors(
                weights=torch.where(outside, value, rollout.exp()), mask=torch.where(mask, trains.float(), NAN)
            ),
        )
        (slope,) = torch.autograd.grad(out.value, spoiled[0])
        assert (slope[outside] == 0).all()
        found.append((out.value, slope, out.metrics() | {"tokens_loss_nonfinite": 0.0}))
    for value, slope, metrics in found[1:]:
        assert torch.equal(value, found[0][0]) and torch.equal(slope, found[0][1]) and metrics == found[0][2]


@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(SURROGATES, itertools.cycle((torch.float32, torch.bfloat16, torch.float16))))
)
def test_extreme_ratios(name, dtype):
    """Differences of +-200 and broken tokens: value, gradient and metrics are finite, and who is broken is left out."""
    new = torch.tensor([[-200.0, -1e-3, -1.0, -INF, -1.0, -3.0], [-1e4, -1.0, -2.0, NAN, -1.0, -1.0]], dtype=dtype)
    old = torch.tensor([[-1e-3, -200.0, -1.0, -1.0, -INF, -2.0], [-1.0, -1e4, -2.0, -1.0, NAN, -1.0]], dtype=dtype)
    for sign in (1.0, -1.0):
        leaf = new.clone().requires_grad_()
        out = rc.policy_loss(
            leaf,
            torch.full((2, 6), sign, dtype=dtype),
            loss=rc.Loss(SURROGATES[name], kl=rc.KL("k3", 0.1, weight="ratio"), regularizer=rc.SquaredLogRatio(0.1)),
            old_logp=old,
            ref_logp=old,
        )
        (slope,) = torch.autograd.grad(out.value, leaf)
        assert out.value.isfinite()
        if dtype != torch.float16:  # whose largest number is e^11
            assert slope.isfinite().all()
        broken = ~(new.isfinite() & old.isfinite())
        assert not slope[broken].any()
        metrics = out.metrics()
        assert metrics["tokens_loss_nonfinite"] == 4 and metrics["tokens_trained"] == 8
        assert all(math.isfinite(x) for x in metrics.values())


def test_nonfinite_policies():
    new, _, rollout, advantages, mask = inputs()
    rollout[0, 0], mask[0, 0] = NAN, True
    options = {"rollout_logp": rollout, "surrogate": rc.Reinforce()}
    rejected, neutral, loud = (
        rc.policy_loss(
            new, advantages, **bundled_loss(mask=mask, spec=rc.Spec(rc.Weight.token(), nonfinite=policy), **options)
        )
        for policy in ("reject", "neutral", "propagate")
    )
    (slope,) = torch.autograd.grad(rejected.value, new)
    assert not slope[0].any() and slope[2].any(), "the sequence is rejected"
    assert rejected.keep.tolist() == [False, True, True, True]
    (slope,) = torch.autograd.grad(neutral.value, new)
    torch.testing.assert_close(slope[0, 0], -advantages[0, 0] / mask.sum())
    assert loud.value.isnan()


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

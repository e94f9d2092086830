"""The kernels of the policy loss as autograd, a Spec and compilers meet them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.calls import bundled_loss
from builders.kernel_cases import FEW, WIDE, fenced, shaped, unchecked, watched
from builders.loss_cases import SURROGATES
from builders.loss_kernel_cases import ON_KERNELS, PLAIN, tensors_of
from builders.rounding import assert_near, is_near
from rollout_corr.specs.statistics import float32_at_least, float32_at_most

pytestmark = pytest.mark.usefixtures("one_thread")

INF = math.inf


def inputs(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    new = (-torch.rand(4, 48, generator=generator)).to(device, dtype).requires_grad_()
    old = new.detach() + 0.3 * torch.randn(4, 48, generator=generator).to(device, dtype)
    mask = (torch.rand(4, 48, generator=generator) < 0.8).to(device)
    return new, torch.randn(4, 48, generator=generator).to(device), mask, old


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_upstream_gradients(dtype, device):
    new, advantages, mask, old = inputs(device, dtype)
    options = {"old_logp": old, "backend": "triton", "mean": rc.Mean("sequence")}
    value = rc.policy_loss(new, advantages, **bundled_loss(mask=mask, **options)).value
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    (one,) = torch.autograd.grad(value, new, retain_graph=True)
    assert one.dtype == dtype and torch.equal(torch.autograd.grad(value, new, retain_graph=True)[0], one)
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0}
    for scaled, factor in ((value * 3.0, 3.0), (value.double() * 3.0, 3.0), (value.expand(5).sum(), 5.0)):
        (slope,) = torch.autograd.grad(scaled, new, retain_graph=True)
        torch.testing.assert_close(slope, one * factor, **close)
    (slope,) = torch.autograd.grad(value, new, torch.full((3,), 2.0, device=device, dtype=value.dtype)[1],
                                   retain_graph=True)  # fmt: skip
    assert torch.equal(slope, one * 2)
    with pytest.raises(RuntimeError, match="policy_loss: expected a backward pass without create_graph=True"):
        torch.autograd.grad(value, new, create_graph=True)
    with torch.no_grad():
        out = rc.policy_loss(new, advantages, **bundled_loss(mask=mask, **options))
    assert torch.equal(out.value, value) and not out.value.requires_grad


def test_a_batch_that_inference_mode_has_read_goes_backward(device):
    """The correction in inference mode, then the loss on the same Batch, which saves offsets for backward."""
    new, advantages, mask, old = (x.detach().reshape(-1) for x in inputs(device))
    new.requires_grad_()
    batch = rc.Batch(mask=mask, cu_seqlens=torch.tensor([0, 50, 192], dtype=torch.int32))
    with torch.inference_mode():
        rc.correct(old + 0.0, old + 0.1, batch)
    grads = []
    for held in (batch, replace(batch)):
        out = rc.policy_loss(new, advantages, held, rc.Loss(mean=rc.Mean("sequence")), old_logp=old, backend="triton")
        grads.append(torch.autograd.grad(out.value, new)[0])
    assert torch.equal(*grads)


@pytest.mark.parametrize("name", ["ppo", "gmpo"])
def test_an_advantage_that_a_row_repeats_is_one_of_its_sequence(name, device):
    """To the bit: [B, 1] expanded to [B, T], and the copy that it would be."""
    new, advantages, mask, old = inputs(device)
    repeated, found = advantages[:, :1].expand(4, 48), []
    for given in (repeated, repeated.contiguous()):
        out = rc.policy_loss(new, given, rc.Batch(mask=mask), rc.Loss(SURROGATES[name]), old_logp=old, backend="triton")
        found.append((out.value, *torch.autograd.grad(out.value, new), out.statistics.vector))
    assert all(map(torch.equal, *found))


def test_nothing_to_train_on(device):
    """0, and gradients of 0 that keep the graph."""
    new, advantages, mask, old = inputs(device)
    for name in ("ppo", "gspo", "gmpo"):
        out = rc.policy_loss(
            new, advantages, loss=rc.Loss(SURROGATES[name]), mask=mask & False, old_logp=old, backend="triton"
        )
        assert out.value == 0.0 and not torch.autograd.grad(out.value, new)[0].any()


def test_extreme_ratios(device):
    for name in list(ON_KERNELS)[::3]:
        new, advantages, mask, old = inputs(device)
        for row, far in enumerate((200.0, -200.0, INF)):
            old[row, :3] = new.detach()[row, :3] - far
        out = rc.policy_loss(new, advantages, loss=rc.Loss(SURROGATES[name]), mask=mask, old_logp=old, backend="triton")
        (slope,) = torch.autograd.grad(out.value, new)
        assert out.value.isfinite() and slope.isfinite().all(), name


SPEC = rc.Spec(rc.Weight.token(upper=1.5), (rc.Criterion("ratio", "sequence", "mean", 0.9, 1.1),))


def test_with_a_spec(device):
    """Correction, loss and gradient in one call, decoupled and in bypass mode."""
    new, advantages, mask, old = inputs(device)
    rollout = old + 0.1
    for options in ({"old_logp": old, "rollout_logp": rollout}, {"rollout_logp": rollout}):
        for spec in (SPEC, replace(SPEC, rejected="zero", nonfinite="neutral")):
            found = []
            for backend in ("triton", "torch"):
                out = rc.policy_loss(new, advantages, mask=mask, spec=spec, backend=backend, **options)
                found.append((out, torch.autograd.grad(out.value, new)[0]))
            (out, slope), (like, like_slope) = found
            assert_near(out.value, like.value, torch.float32)
            assert_near(slope, like_slope, torch.float32)
            assert torch.equal(out.mask, like.mask) and torch.equal(out.keep, like.keep)
            assert out.metrics().keys() == like.metrics().keys()


C = rc.Criterion
NEW_OLD, NEW_ROLLOUT = {"of": "new/old"}, {"of": "new/rollout"}
MEAN = {"over": "sequence", "reduce": "mean"}
OF_NEW = {
    "tokens of one": rc.Spec(rc.Weight.token(upper=1.5), (C("ratio", lower=0.8, upper=1.2, label="a", **NEW_OLD),)),
    "tokens of both": rc.Spec(
        None,
        (
            C("tv", upper=0.05, label="a", when="outward", **NEW_ROLLOUT),
            C("binary_kl", upper=0.1, label="b", drop="sequence", when="negative_advantage", **NEW_OLD),
            C("external", upper=1.0, name="entropy", label="c", **NEW_OLD),
        ),
        "both",
    ),
    "sequences": rc.Spec(
        rc.Weight.product(upper=2.0),
        (
            C("ratio", lower=0.8, upper=1.25, label="a", **MEAN, **NEW_OLD),
            C("k1", upper=0.1, label="b", when="negative_advantage", **MEAN, **NEW_OLD),
            C("abs", "sequence", "max", upper=0.7, label="c", when="outward", **NEW_ROLLOUT),
            C("k3", "sequence", "sum", upper=0.6, label="d", **NEW_ROLLOUT),
        ),
    ),
    "sums over survivors": rc.Spec(
        rc.Weight.geometric(),
        (
            C("ratio", lower=0.7, upper=1.3, label="a"),
            C("abs", upper=0.5, label="b", drop="sequence", **NEW_OLD),
            C("ratio", lower=0.9, upper=1.1, label="c", **MEAN, **NEW_ROLLOUT),
            C("ratio", "sequence", "min", lower=0.6, label="d", **NEW_OLD),
        ),
        "zero",
        sums_over="kept",
    ),
}


@pytest.mark.parametrize(
    ("name", "nonfinite"), list(zip(OF_NEW, ("neutral", "reject", "reject", "propagate"), strict=True))
)
def test_criteria_of_the_policy_that_trains(name, nonfinite, device):
    """The kernels of `correct` with a third log-prob: as the reference, masks and counts exactly."""
    spec = replace(OF_NEW[name], nonfinite=nonfinite)
    packed, shapes, per = (True, FEW, "token") if nonfinite == "reject" else (False, WIDE, "sequence")
    variant = replace(PLAIN, packed=packed, ref=torch.float32, advantages=per)
    given = tensors_of(variant, 5)
    if nonfinite == "propagate":
        for x in (given.new, given.base, given.ref):
            x.nan_to_num_(nan=-1.0, neginf=-1.0)
    tensors = [fenced(x, device) for x in (given.new, given.advantages)]
    options = {"mask": given.mask, "old_logp": given.base, "rollout_logp": given.ref, "cu_seqlens": given.offsets}
    options = {key: fenced(x, device) for key, x in options.items()}
    if any(criterion.stat == "external" for criterion in spec.criteria):
        options["external"] = {"entropy": fenced(given.weights, device)}
    with shaped(shapes), unchecked(), watched():
        out = rc.policy_loss(*tensors, **bundled_loss(spec=spec, backend="triton", **options))
    like = rc.policy_loss(*tensors, **bundled_loss(spec=spec, backend="torch", **options))
    assert torch.equal(out.keep, like.keep) and torch.equal(out.mask, like.mask)
    assert 0 < out.metrics()["sequences_kept_fraction"] < 1 or 0 < out.metrics()["tokens_kept_fraction"] < 1
    assert (out.weights is None) == (like.weights is None)
    if out.weights is not None:
        assert_near(out.weights, like.weights, torch.float32)
    for key, wanted in like.metrics().items():
        assert is_near(out.metrics()[key], wanted, torch.float32), (key, name, nonfinite)


def test_bounds_are_inclusive_to_the_bit(device):
    """A log-ratio that is the bound's own is not clipped, the next one is: in float32, whatever its exponential."""
    low, high = float32_at_least(math.log(0.8)), float32_at_most(math.log(1.28))
    x = torch.tensor([high, low], dtype=torch.float32)
    beyond = torch.nextafter(x, x * 2)
    new = torch.cat([x, beyond]).to(device).requires_grad_()
    old, advantages = torch.zeros(4, device=device), torch.tensor([1.0, -1.0, 1.0, -1.0], device=device)
    offsets = torch.tensor([0, 4], device=device)
    for surrogate, clipped in ((rc.PPO(0.2, 0.28), [0, 0, 1, 1]), (rc.Score(0.8, 1.28, "zero"), [0, 0, 1, 1])):
        for backend in ("triton", "torch"):
            out = rc.policy_loss(
                new, advantages, loss=rc.Loss(surrogate), cu_seqlens=offsets, old_logp=old, backend=backend
            )
            (slope,) = torch.autograd.grad(out.value, new)
            assert (slope == 0).int().tolist() == clipped, (surrogate, backend)
            metrics = out.metrics()
            assert metrics["clip_high_fraction"] == metrics["clip_low_fraction"] == 0.25


def test_what_the_kernels_cannot_do_is_refused(device):
    new, advantages, mask, old = inputs(device)
    far = C("ratio", upper=2.0, label="far", **NEW_OLD)
    late = rc.Spec(criteria=(replace(far, over="sequence", reduce="mean", drop="token"),))
    for spec, why in (
        (late, "criterion 'far' of new/old drops single tokens of sequences"),
        (rc.Spec(criteria=(far,), report=("native", "verl")), "criterion 'far' of new/old is used together"),
    ):
        options = {"old_logp": old, "rollout_logp": old, "spec": spec}
        with pytest.raises(ValueError, match=f"backend: expected 'auto' or 'torch', got 'triton': {why}"):
            rc.policy_loss(new, advantages, mask=mask, backend="triton", **options)
        assert rc.policy_loss(new, advantages, mask=mask, **options).value.isfinite()

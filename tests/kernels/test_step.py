"""A whole step, correction and loss in one pass over the tokens; loops judge random ones in test_random_calls.py."""

from __future__ import annotations

import math
import pickle
import weakref
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import (
    INTERPRETED,
    MIDDLE,
    NARROW,
    assert_loss_like_reference,
    given,
    shaped,
    unchecked,
    watched,
)
from builders.launches import counted_launches
from builders.rounding import assert_near

pytestmark = INTERPRETED

C = rc.Criterion
TIS = rc.Spec(rc.Weight.token(upper=2.0))
ALL = rc.Spec(
    TIS.weight,
    (C("ratio", lower=0.5, upper=2.0), C("ratio", "sequence", "mean", 0.99, 1.01), C("ratio", "sequence", "min", 1e-4)),
)
THINNING = C("k3", over="sequence", reduce="mean", upper=0.1, drop="token")


def a_step(spec=TIS, lengths=(5, 1, 0, 26, 3), packed=True, loss=None, dtype=torch.float32):
    """A step of sequences of some lengths, packed between other tokens, or in rows that are 5 columns wider."""
    generator = torch.Generator().manual_seed(0)
    shape = (5 + sum(lengths),) if packed else (len(lengths), max(lengths) + 5)
    rollout = -torch.rand(shape, generator=generator)
    train, new = (rollout + 0.1 * torch.randn(shape, generator=generator) for _ in range(2))
    mask = torch.rand(shape, generator=generator) < 0.85
    if not packed:
        mask &= torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    batch = {"cu_seqlens": 3 + torch.tensor([0, *lengths]).cumsum(0)} if packed else {}
    advantages = torch.randn(len(lengths), generator=generator)
    call = given(spec, train.to(dtype), rollout.to(dtype), advantages, mask=mask, **batch)
    call.loss, call.drawn.tensors["new"] = loss or rc.Loss(), new.to(dtype)
    return call


def stepped(call, shapes=MIDDLE):
    """A step by the kernels: the result, and the gradient."""
    with shaped(shapes), unchecked(), watched():
        out, new, _ = call.lost("triton", call.loss)
        return out, torch.autograd.grad(out.value, new)[0]


def check(call, shapes=MIDDLE):
    """A step by the kernels as plain torch makes it."""
    like, _, _ = call.lost("torch", call.loss)
    with shaped(shapes), unchecked(), watched():
        assert_loss_like_reference(call)
        out, _, _ = call.lost("triton", call.loss)
        assert out.keep.equal(like.keep) and out.mask.equal(like.mask)
        assert (out.weights is None) == (like.weights is None)
        if out.weights is not None:
            assert_near(out.weights, like.weights)
    return out


# Specs, and how many launches a step of them is, backward included; None: a correction with a pass of its own.
STEPS = {
    "token weights": (TIS, rc.PPO(), 3),
    "criteria of sequences too": (ALL, rc.PPO(), 3),
    "weights of sequences": (rc.Spec(rc.Weight.product(upper=2.0)), rc.PPO(), 5),
    "two passes": (TIS, rc.GSPO(), 5),
    "normalized": (rc.Spec(rc.Weight.token(upper=2.0, normalize="batch")), rc.PPO(), None),
    "full": (replace(TIS, detail="full"), rc.PPO(), None),
    "thinning": (replace(TIS, criteria=(THINNING,)), rc.PPO(), None),
    "report": (replace(TIS, report=("native", "verl")), rc.PPO(), None),
}


@pytest.mark.parametrize(("spec", "surrogate", "launches"), STEPS.values(), ids=STEPS)
def test_launches(spec, surrogate, launches):
    """One pass, one launch behind it and one in backward; `read` and `decide` first where sequences have weights."""
    call = a_step(spec, loss=rc.Loss(surrogate))
    with counted_launches() as count, unchecked():
        out, _, _ = call.lost("triton", call.loss)
        out.value.backward()
        made = count.total()
        assert launches in (None, made)
        assert out.weights.shape == out.mask.shape
        assert (count.total() > made) == (launches is not None), "weights and mask are made when somebody asks"
        made = count.total()
        assert out.weights is not None and out.mask is not None and count.total() == made


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_sequence_that_its_last_token_rejects_has_no_gradient(bad):
    """Its gradient was written before anybody saw the token: in another tile, by another program."""
    call = a_step(lengths=(3, 40, 5))
    call.drawn.batch["mask"][45], call.drawn.tensors["rollout"][45] = True, bad
    out, slope = stepped(call, NARROW)
    assert out.keep.tolist() == [True, False, True]
    assert not slope[6:46].any() and slope[3:6].any() and slope[46:].any()
    assert out.metrics()["sequences_trained"] == 2 and math.isfinite(out.value.item())


def test_a_sequence_without_weight_has_no_gradient():
    """Its mask stays; it is decided about before the loss, whose ratio is a sequence's."""
    mean = C("ratio", "sequence", "mean", 0.99, 1.01)
    out = check(a_step(rc.Spec(TIS.weight, (mean,), "zero"), loss=rc.Loss(rc.GSPO())))
    assert 0 < out.keep.sum() < 4


@pytest.mark.parametrize("name", ["rollout", "new"])
@pytest.mark.parametrize("weight", [rc.Weight.token(upper=2.0), rc.Weight.product(upper=2.0)], ids=["token", "product"])
def test_what_is_not_finite_propagates(weight, name):
    """A NaN goes on into weights, the value and gradients, as on plain torch, and into no other sequence."""
    call = a_step(rc.Spec(weight, nonfinite="propagate"))
    call.drawn.batch["mask"][9], call.drawn.tensors[name][9] = True, math.nan
    out, slope = check(call), stepped(call)[1]
    assert out.value.isnan() and out.weights[9].isnan() == (name == "rollout")
    assert slope[:9].isfinite().all() and slope[35:].isfinite().all()


@pytest.mark.parametrize("weight", [rc.Weight.token(upper=2.0), rc.Weight.product(upper=2.0)], ids=["token", "product"])
def test_a_tile_without_a_valid_token_has_no_extrema(weight):
    """Where NaN propagates extrema are kept as integers, and one of them is of no float."""
    call = a_step(rc.Spec(weight, nonfinite="propagate"), (3, 20), packed=False)
    assert not call.drawn.batch["mask"][0, 16:].any(), "the second tile of the first row"
    metrics = check(call, NARROW).metrics()
    assert math.isfinite(metrics["surrogate_ratio_max"]) and math.isfinite(metrics["weight_max"])


def test_an_expanded_advantage_that_is_infinite_selects_no_sequence():
    """To a criterion it is one of tokens, and the finite ones count; the loss may read it once a row."""
    selects = C("abs", over="sequence", reduce="max", upper=1e-6, when="positive_advantage")
    call = a_step(rc.Spec(criteria=(selects,)), (3, 5), packed=False)
    call.drawn.tensors["advantages"] = torch.tensor([[math.inf], [1.0]]).expand(2, 10)
    assert check(call).keep.tolist() == [True, False]


@pytest.mark.parametrize("name", ["rollout", "kept_mass", "cu_seqlens"])
def test_tensors_of_inference_mode(name):
    """Nobody counts the writes to them, and autograd does not save them."""
    call = a_step(lengths=(3, 5), loss=rc.Loss(mean=rc.Mean("sequence")))
    with torch.inference_mode():
        if name == "rollout":
            call.drawn.tensors[name] = call.drawn.tensors[name].clone()
        elif name == "kept_mass":
            call.drawn.batch[name] = rc.KeptMass(torch.zeros_like(call.drawn.tensors["rollout"]))
        else:
            call.drawn.batch[name] = call.drawn.batch[name].clone()
    check(call)


def test_a_batch_that_inference_mode_has_read_goes_backward():
    """The correction in inference mode, then the loss on the same Batch, which saves offsets for backward."""
    call = a_step(None, loss=rc.Loss(mean=rc.Mean("sequence")))
    batch, tensors, grads = rc.Batch(**call.drawn.batch), call.drawn.tensors, []
    new = tensors["new"].requires_grad_()
    with torch.inference_mode():
        rc.correct(tensors["train"] + 0.0, tensors["rollout"] + 0.1, batch)
    for held in (batch, replace(batch)):
        out = rc.policy_loss(new, tensors["advantages"], held, call.loss, old_logp=tensors["train"], backend="triton")
        grads.append(torch.autograd.grad(out.value, new)[0])
    assert torch.equal(*grads)


# What backward multiplies by: nothing to do for 1; else in place, or into a new tensor where the graph is kept.
UPSTREAM = (1.0, 3.0, 0.0, math.nan, 1.0)


@pytest.mark.parametrize("spec", [TIS, None], ids=["a step", "a loss"])
@pytest.mark.parametrize(("packed", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
def test_upstream_gradients(packed, dtype, spec):
    """A gradient over the divisor that was assumed, or over another: right whatever comes, and however often."""
    call = a_step(spec, (5, 9), packed, dtype=dtype)
    tensors, batch = call.drawn.tensors, rc.Batch(**call.drawn.batch)
    options = {"old_logp": tensors["train"], "backend": "triton"}
    options |= {} if spec is None else {"rollout_logp": tensors["rollout"], "spec": spec}
    leaf = tensors["new"].clone().requires_grad_()
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0.0, "equal_nan": True}

    def value():
        return rc.policy_loss(leaf, tensors["advantages"], batch, **options).value

    with unchecked():
        one = value()
        assert one.dtype == torch.float32
        (wanted,) = torch.autograd.grad(one, leaf, retain_graph=True)
        wanted = wanted.clone()
        assert wanted.any() and wanted.dtype == dtype
        for factor in UPSTREAM:
            (slope,) = torch.autograd.grad(one, leaf, torch.tensor(factor), retain_graph=True)
            torch.testing.assert_close(slope[wanted != 0], (wanted * factor)[wanted != 0], **close)
        with pytest.raises(RuntimeError, match="policy_loss: expected a backward pass without create_graph=True"):
            torch.autograd.grad(one, leaf, create_graph=True)
        # The last pass may take the tensor itself, and a leaf may keep it as its gradient.
        (3.0 * one.double()).backward()
        torch.testing.assert_close(leaf.grad, 3.0 * wanted, **close)
        (0.0 * value()).backward()
        torch.testing.assert_close(leaf.grad, 3.0 * wanted, **close)
        kept, again = leaf.grad, value()
        again.expand(2).sum().backward()
        torch.testing.assert_close(leaf.grad, 5.0 * wanted, **(close | {"atol": 1e-9, "rtol": 4 * close["rtol"]}))
        assert leaf.grad is kept, "gradients accumulate where the first one was left"
        with pytest.raises(RuntimeError, match="second time"):
            again.backward()
        with torch.no_grad():
            assert torch.equal(value(), one) and not value().requires_grad


def test_weights_of_inputs_that_were_written_to_are_refused():
    call = a_step()
    out, _ = stepped(call)
    call.drawn.tensors["rollout"].add_(1.0)
    with pytest.raises(RuntimeError, match="rollout_logp was changed in place"):
        _ = out.weights
    assert "weights=(not made yet), keep=bool[5]" in repr(out)


def test_weights_that_are_not_made_yet_keep_no_tensor_of_the_loss():
    call = a_step(loss=rc.Loss(kl=rc.KL("k3", 0.1)))
    ref = call.drawn.tensors["new"] - 0.1
    alive, call.drawn.tensors["ref"] = weakref.ref(ref), ref
    with unchecked():
        out, _, _ = call.lost("triton", call.loss)
        del ref, call.drawn.tensors["ref"]
        assert "weights=(not made yet)" in repr(out) and alive() is None
        assert out.weights is not None


def test_a_pickle_has_the_weights_and_the_mask():
    out, _ = stepped(a_step(lengths=(3, 5)))
    again = pickle.loads(pickle.dumps(out))
    assert again.weights.equal(out.weights) and again.mask.equal(out.mask) and again.value == out.value
    assert again.metrics() == out.metrics()


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (
            rc.Spec(criteria=(C("ratio", "sequence", "mean", upper=2.0, label="far", of="new/old", drop="token"),)),
            "criterion 'far' of new/old drops single tokens of sequences",
        ),
        (
            rc.Spec(criteria=(C("ratio", upper=2.0, label="far", of="new/old"),), report=("native", "verl")),
            "criterion 'far' of new/old is used together",
        ),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(spec, why):
    call = a_step(spec)
    with pytest.raises(ValueError, match=f"backend: expected 'auto' or 'torch', got 'triton': {why}"):
        call.lost("triton", call.loss)
    assert call.lost("auto", call.loss)[0].value.isfinite()

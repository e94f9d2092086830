"""Inputs that random losses do not draw, on the kernels: batches of nothing, values at the ends of ranges, bits."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import (
    FEW,
    INTERPRETED,
    NARROW,
    WIDE,
    assert_loss_like_reference,
    bits,
    given,
    shaped,
    unchecked,
    watched,
)
from rollout_corr.backends.loss_task import beyond_kernels
from rollout_corr.specs.statistics import float32_at_least, float32_at_most

pytestmark = INTERPRETED

C = rc.Criterion
INF, NAN = math.inf, math.nan


def a_loss(loss, shape=(3, 20), **batch):
    """A call of a loss of log-probs that differ by a few tenths; a fifth of the tokens is masked."""
    generator = torch.Generator().manual_seed(0)
    new = -torch.rand(shape, generator=generator) - 0.1
    train, rollout, ref = (new + 0.3 * torch.randn(shape, generator=generator) for _ in range(3))
    batch = {"mask": torch.rand(shape, generator=generator) < 0.8} | batch
    call = given(None, train, rollout, torch.randn(shape, generator=generator), **batch)
    call.loss, call.drawn.tensors["new"], call.drawn.tensors["ref"] = loss, new, ref
    return call


def lost(call, backend="triton"):
    """The loss of a call, and its gradient."""
    with shaped(FEW), unchecked():
        out, new, _ = call.lost(backend, call.loss)
    return out, torch.autograd.grad(out.value, new)[0]


def on(device, call):
    """The call with its tensors on a device."""
    tensors = {name: x.to(device) for name, x in call.drawn.tensors.items() if x is not None}
    batch = {name: x.to(device) if torch.is_tensor(x) else x for name, x in call.drawn.batch.items()}
    return replace(call, drawn=replace(call.drawn, tensors=tensors, batch=batch))


def compare(call):
    with shaped(FEW), unchecked(), watched():
        assert_loss_like_reference(call)


# --- nothing ---


@pytest.mark.parametrize("surrogate", [rc.PPO(), rc.GSPO(), rc.GMPO()], ids=repr)
@pytest.mark.parametrize(("shape", "offsets"), [((0,), [0, 0]), ((3, 0), None), ((0, 5), None), ((1, 1), None)])
def test_nothing_to_train_on(shape, offsets, surrogate, device):
    """0, and gradients of 0 that keep the graph."""
    offsets = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets)}
    call = on(device, a_loss(rc.Loss(surrogate), shape, mask=torch.zeros(shape), **offsets))
    compare(call)
    out, slope = lost(call)
    assert out.value == 0.0 and slope.shape == shape and not slope.any()


# --- at the ends of ranges ---


@pytest.mark.parametrize("rejected", ["zero", "both"])
def test_any_byte_of_a_bool_mask_is_a_factor_of_1(rejected, device):
    """In bypass mode the mask of a correction multiplies, and a true bool may be a byte of 2."""
    new, rollout = torch.tensor([[[-0.1, -0.2, -0.3]], [[-0.5, -0.6, -0.1]]], device=device)
    spec, found = rc.Spec(criteria=(C("ratio", lower=0.9, drop="token"),), rejected=rejected), []
    for byte in (1, 2):
        batch = rc.Batch(mask=torch.full_like(new, byte, dtype=torch.uint8).view(torch.bool))
        leaf = new.clone().requires_grad_()
        out = rc.policy_loss(leaf, -new.new_ones(1), batch, rollout_logp=rollout, spec=spec, backend="triton")
        found.append(torch.autograd.grad(out.value, leaf)[0])
    assert found[0].count_nonzero() == 2 and torch.equal(*found)


def test_a_policy_at_its_reference_has_no_slope(device):
    """|k| has none at 0, where autograd's is 0 too."""
    call = on(device, a_loss(rc.Loss(kl=rc.KL("abs", 0.3))))
    call.drawn.tensors["ref"] = call.drawn.tensors["new"].clone()
    compare(call)


def test_a_bound_of_a_kl_bounds_it_below_0_too(device):
    compare(on(device, a_loss(rc.Loss(kl=rc.KL("k1", 0.3, weight="ratio", bound=0.05)))))


def test_a_kl_with_a_mean_over_sequences_counts_no_turns(device):
    loss = rc.Loss(rc.GSPO(over="turn"), kl=rc.KL("k3", 0.5, mean=rc.Mean("sequence")))
    fields = {"cu_seqlens": torch.tensor([0, 40, 60]), "turns": torch.tensor([0, 10, 40, 60])}
    compare(on(device, a_loss(loss, (60,), **fields)))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_squares_and_penalties_saturate(kind, device):
    """Differences of thousands: squares and KL terms run within +-1024, and pull no further beyond."""
    surrogate = rc.DRO(0.5, "token" if kind in ("k1", "k3") else "sequence")
    call = on(device, a_loss(rc.Loss(surrogate, kl=rc.KL(kind, 0.1), regularizer=rc.SquaredLogRatio(0.1))))
    call.drawn.tensors["new"][:, ::2] -= 3000.0
    compare(call)


@pytest.mark.parametrize("nonfinite", ["neutral", "propagate"])
@pytest.mark.parametrize("surrogate", [rc.PPO(), rc.GMPO(), rc.DPPO(upper=None)], ids=repr)
def test_nonfinite_policies(surrogate, nonfinite, device):
    """A base that is not finite is read as new_logp, or poisons the value and the gradients that it has a part in."""
    call = on(device, a_loss(rc.Loss(surrogate)))
    call.spec = rc.Spec(nonfinite=nonfinite)
    call.drawn.tensors["train"][1, call.drawn.batch["mask"][1].nonzero()[3]] = NAN
    compare(call)
    assert lost(call)[0].value.isfinite() == (nonfinite == "neutral")


@pytest.mark.parametrize("surrogate", [rc.PPO(0.1, 0.28, dual=1.5), rc.GSPO(0.05, 0.06), rc.VESPO()], ids=repr)
def test_a_scale_that_is_not_finite_is_read_as_0_where_others_propagate(surrogate, device):
    """A clipped token has the gradient 0, which times infinity is NaN."""
    call = on(device, a_loss(rc.Loss(surrogate, kl=rc.KL("k3", 0.1, bound=0.01))))
    call.spec, scale = rc.Spec(nonfinite="propagate"), torch.ones(3, 20, device=device)
    scale[:, ::3], scale[:, 1::5], scale[:, 2::7] = INF, -INF, NAN
    found = []
    for call.given["scale"] in (scale, scale.nan_to_num(0.0, 0.0, 0.0)):
        out, slope = lost(call)
        found.append((out.value, slope))
    assert found[0][0].isfinite() and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("shape", [(3, 20), (3,)])
@pytest.mark.parametrize("surrogate", [rc.PPO(), rc.GSPO()], ids=repr)
def test_an_advantage_that_is_not_finite_leaves_out_its_token_or_its_sequence(surrogate, shape, device):
    call = on(device, a_loss(rc.Loss(surrogate)))
    advantages = torch.ones(shape, device=device)
    advantages[0], advantages[2] = NAN, INF
    call.drawn.tensors["advantages"] = advantages
    compare(call)
    out, slope = lost(call)
    assert out.metrics()["tokens_loss_nonfinite"] == call.drawn.batch["mask"][[0, 2]].sum() and not slope[[0, 2]].any()


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


# --- bits ---


@pytest.mark.parametrize("surrogate", [rc.PPO(), rc.GSPO(), rc.GMPO()], ids=repr)
def test_a_gradient_does_not_hang_on_what_is_packed_around_it(surrogate, device):
    """Over a divisor that the caller has counted: to the bit, whatever the neighbors, the place and the tiles."""
    cuts = [0, 7, 8, 8, 30, 60]
    call = on(device, a_loss(rc.Loss(surrogate), (60,), cu_seqlens=torch.tensor(cuts), total=7.0))
    with shaped(NARROW):
        (out, new, _), (again, same, _) = (call.lost("triton", call.loss) for _ in range(2))
        together, repeated = torch.autograd.grad(out.value, new)[0], torch.autograd.grad(again.value, same)[0]
    assert torch.equal(bits(together), bits(repeated)) and torch.equal(bits(out.value), bits(again.value))
    for begin, end in itertools.pairwise(cuts):
        tensors = {name: x[begin:end].clone() for name, x in call.drawn.tensors.items()}
        batch = call.drawn.batch | {
            "mask": call.drawn.batch["mask"][begin:end],
            "cu_seqlens": torch.tensor([0, end - begin]),
        }
        alone = given(None, tensors["train"], tensors["rollout"], tensors["advantages"], **batch)
        alone.drawn.tensors, alone.loss = tensors, call.loss
        with shaped(WIDE):
            out, new, _ = alone.lost("triton", alone.loss)
        (slope,) = torch.autograd.grad(out.value, new)
        assert torch.equal(bits(slope), bits(together[begin:end])), (begin, end)


@pytest.mark.parametrize("surrogate", [rc.PPO(), rc.GMPO()], ids=repr)
def test_an_advantage_that_a_row_repeats_is_one_of_its_sequence(surrogate, device):
    """To the bit: [B, 1] expanded to [B, T], and the copy that it would be."""
    call, found = on(device, a_loss(rc.Loss(surrogate))), []
    repeated = call.drawn.tensors["advantages"][:, :1].expand(3, 20)
    for call.drawn.tensors["advantages"] in (repeated, repeated.contiguous()):
        out, slope = lost(call)
        found.append((out.value, slope, out.statistics.vector))
    assert all(map(torch.equal, *found))


# --- what is left to plain torch ---


@pytest.mark.parametrize("surrogate", [rc.ClipCov(), rc.KLCov(), rc.REAL(), rc.AveragePPO()], ids=repr)
def test_what_is_left_to_plain_torch(surrogate):
    """A loss that compares groups, or that takes an average of two ratios."""
    assert (beyond_kernels(surrogate, False) is None) == (surrogate.traits.sees == "batch")


def test_a_surrogate_of_the_user_is_left_to_plain_torch():
    """The kernels know the formulas of this package alone; a class derived from one of them may have another."""

    class Doubled(rc.PPO):
        def loss(self, tokens):
            found = super().loss(tokens)
            return found._replace(value=2.0 * found.value)

    assert beyond_kernels(Doubled(), False) == "Doubled() has a formula of its own, which runs on plain torch"
    assert beyond_kernels(rc.PPO(), False) is None

"""The kernels of the policy loss: against the third oracle, against the reference, and in their own right.

In Triton's interpreter on the CPU, or compiled where `-m gpu` asks for it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import (
    FEW,
    INTERPRETED,
    MIDDLE,
    NARROW,
    REAL,
    WIDE,
    between_fences,
    bits,
    fenced,
    shaped,
    unchecked,
    watched,
)
from builders.loss_cases import (
    SURROGATES,
    LaidLoss,
    arguments_of,
    compare,
    objective,
    only,
    random_batch,
)
from builders.loss_kernel_cases import (
    PLAIN,
    assert_close,
    by_kernels,
    by_reference,
    compare_with_reference,
    on,
    tensors_of,
)
from lab.aot.loss_variants import LOSS_VARIANTS
from rollout_corr.kernels.policy_loss import launch as kernels
from rollout_corr.metrics import loss as loss_metrics
from rollout_corr.specs.operands import LossOperands

pytestmark = INTERPRETED

INF, NAN = math.inf, math.nan
DECOUPLED = ("old", "weights", "train_mask")


# --- against the third oracle ---


def check(sequences, wanted, layout, device, **options):
    """The kernels between fences: what they read and should not have read shows in the result."""
    laid = LaidLoss(sequences, layout, torch.float32)
    laid.laid = between_fences(laid.laid, device)
    laid.new = laid.leaf(laid.laid.train)
    laid.arguments = {name: fenced(x, device) for name, x in laid.arguments.items()}
    with unchecked(), watched():
        out = laid(**(arguments_of(wanted) | options), backend="triton")
        case, given = f"{layout} {wanted}", options.get("total")
        compare(out, laid, sequences, wanted, case, given=given, dtype=torch.float32)
    return out


BATCHES = [random_batch(0), random_batch(1, advantages="sequence"), random_batch(3, broken=True)]


@pytest.mark.parametrize("rejected", ["zero", "both"])
def test_any_byte_of_a_bool_mask_is_a_factor_of_1(rejected, device):
    """In bypass mode the mask of a correction multiplies, and a true bool may be a byte of 2."""
    new, rollout = torch.tensor([[[-0.1, -0.2, -0.3]], [[-0.5, -0.6, -0.1]]], device=device)
    spec, found = rc.Spec(criteria=(rc.Criterion("ratio", lower=0.9, drop="token"),), rejected=rejected), []
    for byte in (1, 2):
        batch = rc.Batch(mask=torch.full_like(new, byte, dtype=torch.uint8).view(torch.bool))
        leaf = new.clone().requires_grad_()
        out = rc.policy_loss(leaf, -new.new_ones(1), batch, rollout_logp=rollout, spec=spec, backend="triton")
        found.append(torch.autograd.grad(out.value, leaf)[0])
    assert found[0].count_nonzero() == 2 and torch.equal(*found)


def test_a_policy_at_its_reference_has_no_slope(device):
    """|k| has none at 0, where autograd's is 0 too."""
    same = [replace(q, ref=list(q.new)) for q in BATCHES[0]]
    with shaped(FEW):
        check(only(same, *DECOUPLED, "ref"), objective("ppo", kl=rc.KL("abs", 0.3)), "packed", device)


def test_a_bound_of_a_kl_bounds_it_below_0_too(device):
    with shaped(FEW):
        term = rc.KL("k1", 0.3, weight="ratio", bound=0.05)
        check(only(BATCHES[0], *DECOUPLED, "ref"), objective("ppo", kl=term), "packed", device)


@pytest.mark.parametrize("over", ["original", "rows"])
def test_a_kl_with_a_mean_over_sequences_counts_no_turns(over, device):
    new = torch.tensor([-0.1, -0.4, -0.2, -0.9, -0.3, -0.7], device=device)
    ref, advantages = new - torch.tensor([0.3, 0.0, 0.1, 0.5, 0.2, 0.4], device=device), torch.ones_like(new)
    loss = rc.Loss(rc.GSPO(over="turn"), kl=rc.KL("k3", 0.5, mean=rc.Mean("sequence", over)))
    batch = rc.Batch(cu_seqlens=torch.tensor([0, 4, 6]), turns=torch.tensor([0, 1, 4, 6]))
    values = [
        rc.policy_loss(new, advantages, batch, loss, ref_logp=ref, backend=backend).value.item()
        for backend in ("triton", "torch")
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_squares_and_penalties_saturate(kind, device):
    """Differences of thousands: squares and KL terms run within +-1024, and pull no further beyond."""
    far = [
        replace(q, new=[x - (3000.0 if t % 2 else 2.0) * m for t, (x, m) in enumerate(zip(q.new, q.mask, strict=True))])
        for q in BATCHES[0]
    ]
    name = "dro" if kind in ("k1", "k3") else "dro sequence"
    wanted = objective(name, kl=rc.KL(kind, 0.1), regularizer=rc.SquaredLogRatio(0.1))
    with shaped(FEW):
        check(only(far, *DECOUPLED, "ref"), wanted, "packed", device)


# --- against the reference, in every dtype ---


OF_SEQUENCES = LOSS_VARIANTS["gspo"]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (1, 1)])
def test_sizes_of_zero(shape, device):
    empty = torch.zeros(shape, device=device)
    offsets = torch.zeros(3, dtype=torch.int32, device=device) if len(shape) == 1 else None
    for variant in (PLAIN, OF_SEQUENCES):
        given = LossOperands(empty, empty, None, empty, False, empty, None, None, offsets, None)
        found, slope = by_kernels(given, variant.objective, device)
        assert found.value == 0.0 and slope.shape == empty.shape


# --- bits ---


def cut_out(given, s):
    """One sequence of a packed batch alone."""
    start, end = given.offsets[s].item(), given.offsets[s + 1].item()
    tokens = {
        name: getattr(given, name) for name in ("new", "base", "weights", "trains", "mask", "advantages", "scales")
    }
    cut = {name: x if x is None else x[start:end].clone() for name, x in tokens.items()}
    if given.per_sequence:
        cut["advantages"] = given.advantages[s : s + 1]
    return replace(given, **cut, offsets=torch.tensor([0, end - start], dtype=given.offsets.dtype)), start, end


@pytest.mark.parametrize("name", ["ppo_packed", "gspo", "gmpo"])
def test_a_gradient_does_not_hang_on_what_is_packed_around_it(name, device):
    """Over a divisor that the caller has counted: to the bit, whatever the neighbors, the place and the tiles."""
    variant = replace(LOSS_VARIANTS[name], ref=None)
    wanted = replace(variant.objective, kl=None)
    given = replace(tensors_of(variant, 5), divisor=torch.tensor(7.0, dtype=torch.float64))
    with shaped(NARROW):
        together = kernels.run(on(given, device), wanted)
        again = kernels.run(on(given, device), wanted)
    for one, other in zip(*(filter(torch.is_tensor, x) for x in (together, again)), strict=True):
        assert torch.equal(bits(one), bits(other))
    for s, shapes in ((0, MIDDLE), (2, REAL), (4, WIDE)):
        alone, start, end = cut_out(given, s)
        with shaped(shapes):
            found = kernels.run(on(alone, device), wanted)
        assert torch.equal(bits(found.gradient), bits(together.gradient[start:end])), (name, s)


@pytest.mark.parametrize("nonfinite", ["neutral", "propagate"])
def test_nonfinite_policies(nonfinite, device):
    """A base that is not finite is read as new_logp, or poisons the value and the gradients that it has a part in."""
    for name in ("ppo_packed", "gmpo", "dppo_tv"):
        variant = LOSS_VARIANTS[name]
        given = tensors_of(variant, 7)
        broken = (given.mask != 0).nonzero()[3]
        given.base[tuple(broken)] = -INF
        wanted = replace(variant.objective, nonfinite=nonfinite)
        with shaped(FEW):
            found, slope = by_kernels(given, wanted, device)
        like, like_slope = by_reference(given, wanted, torch.float32)
        assert found.value.isfinite() == like.value.isfinite() and torch.equal(slope.isfinite(), like_slope.isfinite())
        known = slope.isfinite()
        assert_close(slope[known], like_slope[known], 1e-6, 0.01, name)


@pytest.mark.parametrize("name", ["ppo dual", "gspo", "vespo"])
def test_a_scale_that_is_not_finite_is_read_as_0_where_others_propagate(name, device):
    """A clipped token has the gradient 0, which times infinity is NaN."""
    laid = LaidLoss(only(random_batch(11), "old", "scale"), "packed", torch.float32)
    laid.laid = laid.laid.to(device)
    laid.new = laid.leaf(laid.laid.train)
    laid.arguments = {key: None if x is None else x.to(device) for key, x in laid.arguments.items()}
    scale = laid.arguments["scale"]
    scale[::3], scale[1::5], scale[2::7] = INF, -INF, NAN
    given = {"surrogate": SURROGATES[name], "rollout_logp": laid.arguments["old_logp"], "backend": "triton"}
    given |= {"kl": rc.KL("k3", 0.1, bound=0.01), "ref_logp": laid.new.detach() - 0.3}
    found = []
    for factors in (scale, scale.nan_to_num(0.0, 0.0, 0.0)):
        with shaped(FEW), unchecked():
            out = laid(**given | {"scale": factors}, spec=rc.Spec(nonfinite="propagate"))
        found.append((out.value, *torch.autograd.grad(out.value, laid.new)))
    assert found[0][0].isfinite() and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_odd_advantages(device):
    """A token whose advantage is NaN or infinite is left out and counted; so is a whole sequence of one."""
    for variant in (PLAIN, OF_SEQUENCES):
        given = tensors_of(variant, 5)
        plain = loss_metrics.sum_names(variant.objective).index("loss_tokens_nonfinite")
        before = by_reference(given, variant.objective, torch.float32)[0].statistics[plain]
        valid = (given.mask != 0).nonzero().squeeze(1)
        for place, odd in ((0, NAN), (2, INF)):
            given.advantages[place if given.per_sequence else valid[7 * place]] = odd
        assert by_reference(given, variant.objective, torch.float32)[0].statistics[plain] > before
        with shaped(FEW):
            compare_with_reference(given, variant.objective, device, variant.name)

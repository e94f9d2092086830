"""Losses of every variant, with the dtypes that no call of Python brings, and the comparison with plain torch."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from builders.kernel_cases import fenced, watched
from builders.rounding import FORMULA, margin
from frozen.generator import GARBAGE
from rollout_corr.backends import loss_blocks
from rollout_corr.backends.differentiable import scaled
from rollout_corr.backends.loss_task import LossTask
from rollout_corr.kernels.policy_loss import launch as kernels
from rollout_corr.metrics import loss as loss_metrics
from rollout_corr.specs.operands import ScaleOperands
from rollout_corr.specs.surrogate import Decided

INF, NAN = math.inf, math.nan


def tensors_of(variant, seed, lengths):
    """A batch of a variant: D spread by a few tenths, garbage behind the mask, some tokens broken."""
    generator, sequences, width = torch.Generator().manual_seed(seed), len(lengths), max(lengths) + 2
    given = variant.given(sum(lengths) if variant.packed else width * sequences, sequences, "cpu")
    shape = given.new.shape
    valid = torch.rand(shape, generator=generator) < 0.85
    if not variant.packed:
        valid &= torch.arange(width) < torch.tensor(lengths)[:, None]
    if variant.mask is None:
        valid[:] = True

    def noise(scale, shape=shape):
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    new = -noise(1.0).abs() - 0.01
    made = {
        "new": new,
        "base": new + noise(0.3),
        "ref": new + noise(0.3),
        "weights": noise(1.0).abs(),
        "trains": (torch.rand(shape, generator=generator) < 0.8).double() * 2.0,
        "advantages": noise(1.0, given.advantages.shape),
    }
    for name in ("new", "base", "ref", "weights"):
        if variant.objective.nonfinite != "propagate" and new.numel():
            made[name].view(-1)[torch.randint(0, new.numel(), (2,), generator=generator)] = -INF if seed % 2 else NAN
        made[name][~valid] = GARBAGE[seed % len(GARBAGE)]
    made["log_mass"] = -torch.rand(shape, generator=generator, dtype=torch.float64)
    made["log_mass"][~valid] = GARBAGE[seed % len(GARBAGE)]
    if variant.mass is not None:
        made["base"] -= made["log_mass"] * (1.0 if variant.mass == "train" else -1.0)
    made["scales"] = noise(1.0).abs()
    made["scales"].view(-1)[: new.numel() // 2 : 11] = (NAN, INF)[seed % 2]
    made["scales"][~valid] = GARBAGE[seed % len(GARBAGE)]
    if not given.per_sequence:
        made["advantages"][~valid] = NAN
    made["mask"] = valid.double() * (2.0 if variant.mask not in (None, torch.bool) else 1.0)
    made["chosen"] = (torch.rand(shape, generator=generator) < 0.3).double()
    for name, values in made.items():
        x = getattr(given, name)
        if x is not None:
            x.copy_(values)
    if variant.packed:
        given.offsets.copy_(torch.tensor([0, *itertools.accumulate(lengths)]))
    if variant.counted:
        given.divisor.fill_(13.0)
    return given


def by_reference(given, wanted, dtype, differentiable):
    """Compute the loss and its gradient by the plain-torch definition, in a dtype."""
    offsets = None if given.offsets is None else given.offsets.long()
    decided, nothing = None, dict.fromkeys(wanted.surrogate.traits.sums, torch.zeros(()))
    if wanted.surrogate.sees_batch:
        decided = Decided((given.chosen,), nothing)
    changed = {"offsets": offsets, "double": dtype == torch.float64, "differentiable": differentiable}
    task = LossTask(**vars(given) | changed, leaf=given.new, objective=wanted, decided=decided)
    done = loss_blocks.run_whole(task)
    slope = None if done.gradient is None else scaled(done.gradient, torch.ones(()), done.rest, dtype)
    return done, slope


def by_kernels(given, wanted, differentiable):
    """Compute the loss by the kernels, and the gradient that backward gives."""
    placed = fenced(given, "cpu")
    with watched():
        found = kernels.run(replace(placed, differentiable=differentiable), wanted)
        if found.gradient is None:
            return found, None
        slope = ScaleOperands(
            found.gradient, found.inners, torch.ones(()), found.rest, placed.offsets, found.flags, found.gradient.dtype
        )
        scaled_apart = kernels.scale(slope)
        in_place = kernels.scale(slope, in_place=True)
        assert in_place is found.gradient and torch.equal(in_place, scaled_apart)
        return found, scaled_apart


# Counts are equal. The rest is off by roundings, of 1 where it is smaller, of 0.01 for gradients.
COUNTS = {"loss_valid_tokens", "loss_valid_sequences", "loss_tokens", "loss_sequences", "loss_tokens_nonfinite"}
COUNTS |= {"clip_low", "clip_high", "clip_dual"}


def assert_close(got, wanted, within, floor, case):
    """Equal where infinite or NaN; otherwise off by a part of the wanted value, or of the floor."""
    got, wanted = got.double(), wanted.double()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    apart = (got - wanted).abs() / wanted.abs().clamp(min=floor)
    wrong = ~(same | (apart <= within))
    assert not wrong.any(), f"{got[wrong]} for {wanted[wrong]}, off by {apart[wrong]}: {case}"


def compare_with_reference(given, wanted, case, differentiable):
    """Kernels, reference in the same dtype, reference in float64."""
    found, slope = by_kernels(given, wanted, differentiable)
    like, like_slope = by_reference(given, wanted, torch.float32, differentiable)
    exact, exact_slope = by_reference(given, wanted, torch.float64, differentiable)
    of_gradient, of_sums = margin(torch.float32, FORMULA), margin(torch.float32)
    names = (*loss_metrics.sum_names(wanted), *loss_metrics.max_names())
    for name, got, same, true in zip(names, found.statistics, like.statistics, exact.statistics, strict=True):
        if name in COUNTS:
            assert got == same, f"{name}: {got} for {same}: {case}"
        else:
            size = max(1.0, exact.statistics[names.index("loss_valid_tokens")].item() ** 0.5)
            assert_close(got, true, of_sums, size, f"{name}: {case}")
    assert found.value.shape == () and found.divisor.item() == like.divisor.item()
    assert_close(found.value, exact.value, of_sums, 1.0, f"value: {case}")
    if slope is not None:
        assert torch.equal(slope == 0, like_slope == 0), case
        assert_close(slope, exact_slope, of_gradient, 0.01, f"gradient: {case}")

"""Batches of the variants of a whole step, and the comparison of one pass with plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

import rollout_corr as rc
from builders.loss_kernel_cases import assert_close
from builders.rounding import FORMULA, margin, near
from lab.aot.variant import StepVariant

NAN, INF = math.nan, math.inf
# Metrics that are counts, or fractions of them.
EXACT = ("tokens", "sequences", "loss_tokens", "loss_sequences", "clip_")


@dataclass
class StepBatch:
    """The arguments of `policy_loss` for a variant; [B, T] or [N], rows in a wider tensor where it asks for that."""

    variant: StepVariant
    new: torch.Tensor
    old: torch.Tensor | None
    rollout: torch.Tensor
    ref: torch.Tensor | None
    advantages: torch.Tensor
    batch: rc.Batch

    def loss(self, backend: str, spec: rc.Spec | None = None, **more: Any) -> tuple[rc.PolicyLoss, torch.Tensor]:
        """Run a step: the result, and the gradient for an upstream gradient of 1."""
        objective = self.variant.objective
        new = self.new.detach().requires_grad_()
        loss = rc.Loss(objective.surrogate, mean=objective.mean, kl=objective.kl, regularizer=objective.regularizer)
        given = {"old_logp": self.old, "rollout_logp": self.rollout, "ref_logp": self.ref}
        out = rc.policy_loss(new, self.advantages, self.batch, loss, spec=spec or self.variant.spec, backend=backend,
                             **given, **more)  # fmt: skip
        (slope,) = torch.autograd.grad(out.value, new)
        return out, slope


def step_batch(variant: StepVariant, lengths: tuple[int, ...], seed: int, spoiled: bool = True) -> StepBatch:
    """Make a batch with holes, and garbage behind the mask and outside of sequences.

    With `spoiled` some valid log-probs and advantages are not finite, one of them the last token of the longest
    sequence, and some policies lie far apart.
    """
    generator = torch.Generator().manual_seed(seed)
    width, before, after = max(lengths) + 5, 3, 2
    tokens = before + sum(lengths) + after
    shape = (tokens,) if variant.packed else (len(lengths), width)
    starts = list(accumulate(lengths, initial=before)) if variant.packed else [0] * len(lengths)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    inside = torch.zeros(shape, dtype=torch.bool)
    last = []
    for s, length in enumerate(lengths):
        row = inside if variant.packed else inside[s]
        row[starts[s] : starts[s] + length] = True
        last.append((starts[s] + length - 1,) if variant.packed else (s, length - 1))
    valid = inside & (torch.rand(shape, generator=generator) < 0.85)
    if variant.mask is None:
        valid = inside if variant.packed else torch.ones(shape, dtype=torch.bool)
    rollout = torch.rand(shape, generator=generator, dtype=torch.float64).clamp(min=1e-4).log()
    # Most sequences lie within the bounds of the criteria, some do not.
    drift = noise(0.3) * (torch.rand(shape, generator=generator) < 0.02)
    old = rollout + noise(0.05) + drift
    new, ref = old + noise(0.1), old + noise(0.2)
    # Equal log-probs, and some far beyond every clamp.
    old = torch.where(torch.rand(shape, generator=generator) < 0.1, rollout, old)
    advantages = torch.randn(shape if variant.advantages == "token" else (len(lengths),), generator=generator)
    if spoiled:
        where = torch.rand(shape, generator=generator)
        old = torch.where((where < 0.004) & valid, old - 40.0, old)
        new = torch.where((where > 0.998) & valid, NAN, new)
        longest = last[max(range(len(lengths)), key=lengths.__getitem__)]
        valid[longest] = True
        rollout[longest] = -INF
    garbage = torch.tensor([NAN, INF, -INF, -9999.0])[torch.randint(4, shape, generator=generator)].double()
    new, old, rollout, ref = (torch.where(valid, x, garbage) for x in (new, old, rollout, ref))

    def placed(x: torch.Tensor, kind: torch.dtype | None) -> Any:
        return None if kind is None else variant.place(x.to(kind))

    mask = None
    if variant.mask is not None:
        # In a gap even the mask is not 0: those tokens are of no sequence.
        marks = valid | (~inside & (torch.rand(shape, generator=generator) < 0.5)) if variant.packed else valid
        mask = placed(marks.double() * (1.0 if variant.mask == torch.bool else 2.0), variant.mask)
    mass = None
    if variant.mass is not None:
        mass = rc.KeptMass(-torch.rand(shape, generator=generator), "rollout" if variant.mass == "train" else "train")
    offsets = torch.tensor(starts) if variant.packed else None
    batch = rc.Batch(
        mask=mask,
        cu_seqlens=None if offsets is None else offsets.to(variant.offsets),
        total=11.0 if variant.counted else None,
        kept_mass=mass,
    )
    if not spoiled:
        advantages = advantages.clamp(-2, 2)
    elif variant.advantages == "token":
        advantages[valid.nonzero(as_tuple=True)[0][::97] if variant.packed else 0] = INF
    return StepBatch(
        variant, placed(new, variant.new), placed(old, variant.old), placed(rollout, variant.rollout),
        placed(ref, variant.ref), advantages, batch,
    )  # fmt: skip


def assert_one_pass(found: rc.PolicyLoss, slope: torch.Tensor, like: rc.PolicyLoss, like_slope: torch.Tensor) -> None:
    """Compare a step in one pass with plain torch: verdicts, masks and counts exactly, the rest within rounding."""
    kind = slope.dtype
    assert torch.equal(found.keep.cpu(), like.keep), "keep"
    got, wanted = found.metrics(), like.metrics()
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        exact = key.startswith(EXACT) and not key.endswith(("_mean", "_std"))
        assert got[key] == value if exact else got[key] == near(value, torch.float32, size=10.0), key
    assert_close(found.value, like.value, margin(torch.float32), 1.0, "value")
    assert torch.equal(slope.cpu() == 0, like_slope == 0), "where the gradient is 0"
    within = margin(torch.float32, FORMULA) if kind == torch.float32 else torch.finfo(kind).eps
    assert_close(slope, like_slope, within, 0.01, "gradient")
    for name in ("mask", "weights"):
        one, other = getattr(found, name), getattr(like, name)
        if one is None or other is None:
            assert one is other, name
        elif name == "mask":
            assert one.dtype == other.dtype and torch.equal(one.cpu(), other), name
        else:
            assert_close(one, other, margin(torch.float32, FORMULA), 1.0, name)


def compare_step(given: StepBatch) -> None:
    """Run a step in one pass of the kernels, and on plain torch."""
    like = given.loss("torch")
    found = given.loss("triton")
    assert type(found[0]) is not type(like[0]), "one pass gives its weights late"
    assert_one_pass(*found, *like)

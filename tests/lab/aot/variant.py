"""Variants of the kernels: what a compile key is made of, and batches without values that have such a key.

A key holds the structure of the Spec or Objective, the layout, the dtypes, how the tensors lie in memory, and how long
sequences are on average. Lengths and thresholds are in no key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout_corr.backends.batch import external_names
from rollout_corr.backends.step import settles, use_of
from rollout_corr.kernels.correct.plan import pairs_of
from rollout_corr.specs.correction import Spec
from rollout_corr.specs.operands import CorrectOperands, LossOperands, ScaleOperands
from rollout_corr.specs.terms import Objective

if TYPE_CHECKING:
    from rollout_corr.kernels.launches import Launch

# Mean lengths: each of `grid.SHAPES` has one, the last two.
LONGEST, LONG, MEDIUM, SHORT = 1 << 20, 4096, 512, 64

# On AMD it is part of a key whether a tensor is below 2 GiB. These make no difference elsewhere.
TOKENS, HUGE = 1 << 20, 1 << 31


def placed(x: Tensor, aligned: bool, unit: bool) -> Tensor:
    """Copy a tensor to memory that is aligned and contiguous or not.

    Args:
        x: [N] or [B, T] of any dtype, on any device.
        aligned: Every row begins at a multiple of 16 bytes, or else one element behind.
        unit: Neighbors lie side by side, or else with one element between them.
    """
    first, step = (0 if aligned else 1), (1 if unit else 2)
    around = x.new_empty((*x.shape[:-1], first + step * x.shape[-1]))
    lying = around[..., first::step]
    lying.copy_(x)
    return lying


@dataclass(frozen=True, kw_only=True)
class VariantLayout:
    """The layout of the batch of a variant: sizes, strides, alignment.

    Args:
        packed: Sequences by offsets, or the rows of [B, T].
        mask: Dtype of the mask, None without one.
        offsets: Dtype of the offsets of a packed batch.
        advantages: "token", "sequence" or None.
        aligned: Log-probs and masks begin at a multiple of 16 bytes, and so do all their rows. Otherwise they begin one
            element behind, like a slice without the first token.
        unit: Neighboring tokens lie side by side. Otherwise there is one element between them.
        length: Tokens of a sequence on average, which chooses the shape.
        tokens: Tokens of the batch that is compiled for.
    """

    packed: bool = True
    mask: torch.dtype | None = torch.bool
    offsets: torch.dtype = torch.int32
    advantages: str | None = None
    aligned: bool = True
    unit: bool = True
    length: int = LONG
    tokens: int = TOKENS

    @property
    def wide(self) -> bool:
        """Test whether tensors lie so that the compiler can load 128 bits at a time."""
        return self.aligned and self.unit

    def place(self, x: Tensor) -> Tensor:
        """Copy a tensor to memory as this variant has its log-probs and its masks."""
        return placed(x, self.aligned, self.unit)

    def _shape(self, tokens: int, sequences: int) -> tuple[int, ...]:
        return (tokens,) if self.packed else (sequences, tokens // sequences)


@dataclass(frozen=True)
class Variant(VariantLayout):
    """A variant of `correct`.

    Args:
        name: How a report calls it.
        spec: What is done.
        train: Dtype of the trainer's log-probs.
        rollout: Dtype of the engine's log-probs.
        split: Sequences lie on several ranks.
        mass: "train" or "rollout", from whose log-probs the kept mass is taken; None without one.
        turns: A batch brings turns, as many as sequences, whose mean length is `length`.
    """

    name: str
    spec: Spec = Spec()  # noqa: RUF009  (frozen)
    train: torch.dtype = field(default=torch.float32, kw_only=True)
    rollout: torch.dtype = field(default=torch.float32, kw_only=True)
    split: bool = field(default=False, kw_only=True)
    mass: str | None = field(default=None, kw_only=True)
    turns: bool = field(default=False, kw_only=True)

    def wide_bytes(self, kernel: str) -> int:
        """Bytes a token that the compiler has to load 128 bits at a time in `read` or `gradient`."""
        if not (self.train == self.rollout == torch.float32 and self.wide):
            return 0
        of_mask = 0 if self.mask is None else self.mask.itemsize
        return 4 + 4 + (of_mask if of_mask >= 4 else 0)

    def given(self, tokens: int, sequences: int, device: str | torch.device = "meta") -> CorrectOperands:
        """Make a batch of this variant without values in it.

        Args:
            tokens: How many; of a padded batch as many as fit into rows of equal width.
            sequences: How many.
            device: Where. On "meta" it takes no memory.
        """
        shape = self._shape(tokens, sequences)
        computes = torch.promote_types(torch.promote_types(self.train, self.rollout), torch.float32)

        def empty(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        advantages = None
        if self.advantages is not None:
            advantages = empty(computes, *(shape if self.advantages == "token" else (sequences,)))
        return CorrectOperands(
            train=self.place(empty(self.train, *shape)),
            rollout=self.place(empty(self.rollout, *shape)),
            mask=None if self.mask is None else self.place(empty(self.mask, *shape)),
            offsets=empty(self.offsets, sequences + 1) if self.packed else None,
            advantages=advantages,
            per_sequence=self.advantages == "sequence",
            externals=[empty(torch.float32, *shape) for _ in external_names(self.spec)],
            new=empty(self.train, *shape) if pairs_of(self.spec) else None,
            log_mass=None if self.mass is None else empty(computes, *shape),
            mass_of_rollout=self.mass == "rollout",
            turns=empty(self.offsets, sequences + 1) if self.turns else None,
        )

    def launches(self, given: CorrectOperands | None = None) -> tuple[Launch, ...]:
        """List what `correct` would launch for a batch, by default one on the meta device."""
        from rollout_corr.kernels.correct.launch import prepare

        given = self.given(self.tokens, self.tokens // self.length) if given is None else given
        return prepare(given, self.spec, split=self.split)[1]


@dataclass(frozen=True)
class LossVariant(VariantLayout):
    """A variant of `policy_loss`.

    Args:
        name: How a report calls it.
        objective: What is computed.
        new: Dtype of new_logp.
        base: Dtype of the log-probs that it is compared with, None without.
        ref: Dtype of the reference policy's log-probs, None without.
        weights: Dtype of the weights, None without.
        trains: Dtype of the training mask, None without.
        counted: The caller gives the total.
        differentiable: The gradient is wanted.
        mass: "train", which is new_logp, or "rollout", the base, from which the kept mass is taken; None without one.
        scales: Factors of all that a token adds are given.
    """

    name: str
    objective: Objective
    new: torch.dtype = field(default=torch.float32, kw_only=True)
    base: torch.dtype | None = field(default=torch.float32, kw_only=True)
    ref: torch.dtype | None = field(default=None, kw_only=True)
    weights: torch.dtype | None = field(default=torch.float32, kw_only=True)
    trains: torch.dtype | None = field(default=None, kw_only=True)
    advantages: str = field(default="token", kw_only=True)
    counted: bool = field(default=False, kw_only=True)
    differentiable: bool = field(default=True, kw_only=True)
    mass: str | None = field(default=None, kw_only=True)
    scales: bool = field(default=False, kw_only=True)

    def wide_bytes(self, kernel: str) -> int:
        """Bytes a token that the compiler has to load 128 bits at a time in `read` or `gradient`."""
        if not (self.new == self.base == torch.float32 and self.wide):
            return 0
        return 8 + sum(x.itemsize for x in (self.ref, self.weights) if x == torch.float32)

    def given(self, tokens: int, sequences: int, device: str | torch.device = "meta") -> LossOperands:
        """Make a batch of this variant without values in it; see `Variant.given`."""
        shape = self._shape(tokens, sequences)
        double = torch.float64 in (self.new, self.base, self.ref)

        def empty(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def line(dtype: torch.dtype | None) -> Tensor | None:
            return None if dtype is None else self.place(empty(dtype, *shape))

        kind = torch.float64 if double else torch.float32
        return LossOperands(
            new=self.place(empty(self.new, *shape)),
            base=line(self.base),
            ref=line(self.ref),
            advantages=empty(kind, *(shape if self.advantages == "token" else (sequences,))),
            per_sequence=self.advantages == "sequence",
            weights=line(self.weights),
            trains=line(self.trains),
            mask=line(self.mask),
            offsets=empty(self.offsets, sequences + 1) if self.packed else None,
            divisor=empty(torch.float64) if self.counted else None,
            scales=empty(kind, *shape) if self.scales else None,
            log_mass=None if self.mass is None else empty(kind, *shape),
            mass_of_base=self.mass == "rollout",
            double=double,
            differentiable=self.differentiable,
            chosen=empty(torch.bool, *shape) if self.objective.surrogate.sees_batch else None,
        )

    def launches(self, given: LossOperands | None = None) -> tuple[Launch, ...]:
        """List what a forward and a backward would launch for a batch, by default one on the meta device."""
        from rollout_corr.kernels.policy_loss.launch import prepare

        given = self.given(self.tokens, self.tokens // self.length) if given is None else given
        found, launches = prepare(given, self.objective)
        if found.gradient is None:
            return launches
        return (*launches, _backward(found, given))


def _backward(found: Any, given: LossOperands) -> Launch:
    """The launch of a backward pass behind a loss."""
    from rollout_corr.kernels.policy_loss.launch import prepare_scale

    one = torch.ones((), dtype=found.value.dtype, device=given.new.device)
    slope = ScaleOperands(found.gradient, found.inners, one, found.rest, given.offsets, found.flags, given.new.dtype)
    return prepare_scale(slope, in_place=True)[1]


@dataclass(frozen=True)
class StepVariant(VariantLayout):
    """A variant of a whole step: a correction and a loss in one pass.

    Args:
        name: How a report calls it.
        spec: The correction.
        objective: The loss.
        new: Dtype of new_logp.
        old: Dtype of old_logp; None in bypass mode, where the loss compares new_logp with the engine's log-probs.
        rollout: Dtype of the engine's log-probs.
        ref: Dtype of the reference policy's log-probs, None without.
        counted: The caller gives the total.
        mass: "train" or "rollout", from whose log-probs the kept mass is taken; None without one.
    """

    name: str
    spec: Spec
    objective: Objective
    new: torch.dtype = field(default=torch.float32, kw_only=True)
    old: torch.dtype | None = field(default=torch.float32, kw_only=True)
    rollout: torch.dtype = field(default=torch.float32, kw_only=True)
    ref: torch.dtype | None = field(default=None, kw_only=True)
    advantages: str = field(default="sequence", kw_only=True)
    counted: bool = field(default=False, kw_only=True)
    mass: str | None = field(default=None, kw_only=True)

    def wide_bytes(self, kernel: str) -> int:
        """Bytes a token that the compiler has to load 128 bits at a time in `read` or `gradient`."""
        if not (self.new == self.rollout == torch.float32 and self.old in (None, torch.float32) and self.wide):
            return 0
        if kernel == "read":  # of a step that decides about sequences first: the two log-probs of the correction
            return 8
        return 8 + 4 * (self.old is not None) + 4 * (self.ref == torch.float32)

    def given(self, tokens: int, sequences: int, device: str | torch.device = "meta") -> LossOperands:
        """Make a batch of this variant without values in it; see `Variant.given`."""
        shape = self._shape(tokens, sequences)

        def empty(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def line(dtype: torch.dtype | None) -> Tensor | None:
            return None if dtype is None else self.place(empty(dtype, *shape))

        bypass = self.old is None
        weights = self.objective.surrogate.traits.weights_in_bypass if bypass else "multiply"
        trainer, engine = ("new", "base") if bypass else ("base", "own")
        takes_mass = bypass and self.mass is not None
        step = use_of(self.spec, weights, self.spec.rejected, trainer, engine, takes_mass)._replace(
            settles=settles(self.spec, self.objective, self.spec.rejected),
            rollout=None if bypass else line(self.rollout),
            externals=tuple(empty(torch.float32, *shape) for _ in external_names(self.spec)),
        )
        return LossOperands(
            new=self.place(empty(self.new, *shape)),
            base=line(self.rollout if bypass else self.old),
            ref=line(self.ref),
            advantages=empty(torch.float32, *(shape if self.advantages == "token" else (sequences,))),
            per_sequence=self.advantages == "sequence",
            weights=None,
            trains=None,
            mask=line(self.mask),
            offsets=empty(self.offsets, sequences + 1) if self.packed else None,
            divisor=empty(torch.float64) if self.counted else None,
            log_mass=None if self.mass is None else empty(torch.float32, *shape),
            mass_of_base=self.mass == "rollout",
            step=step,
        )

    def launches(self, given: LossOperands | None = None) -> tuple[Launch, ...]:
        """List what a forward and a backward would launch for a batch, by default one on the meta device."""
        from rollout_corr.kernels.policy_loss.step import prepare, prepare_settled

        given = self.given(self.tokens, self.tokens // self.length) if given is None else given
        run = prepare_settled if given.step.settles else prepare
        found, launches = run(given, self.spec, self.objective)
        assert found.gradient is not None
        return (*launches, _backward(found, given))

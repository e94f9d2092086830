"""A batch as operators of torch and kernels take it: the fields of a record are the operands, in their order.

Tensors of tokens are [N] with offsets, or [B, T] without. `backends.registration` makes the schema of an operator of
these records, and `kernels` read them by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_VERSION = 2**62


class ReadVersions(NamedTuple):
    """Versions of policies that have been read."""

    ids: Tensor  # of those that sampled: per token in the shape of the batch, or [S], any integer dtype
    per_sequence: bool  # they are [S]
    current: int  # of the one that trains

    def ages(self) -> Tensor:
        """int64: current - version; a filler at the end of int64 must not wrap around to the other sign."""
        ages: Tensor = self.current - self.ids.long().clamp(-LARGEST_VERSION, LARGEST_VERSION)
        return ages


def compute_dtype(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The dtype that computes, from the dtypes of the two log-probs: the wider one, float32 at least."""
    if one == other == torch.float32:
        return one
    return torch.promote_types(torch.promote_types(one, other), torch.float32)


@dataclass(eq=False, repr=False)
class CorrectOperands:
    """The tensors of a correction, and operands of `torch.ops.rollout_corr.correct`; a Spec comes behind them."""

    train: Tensor
    rollout: Tensor
    mask: Tensor | None  # non-zero at valid tokens, any dtype; None: every token is valid
    offsets: Tensor | None  # [S + 1] int32 or int64, of a packed batch; None: every row of [B, T] is a sequence
    advantages: Tensor | None = None  # per token, or [S] where `per_sequence`
    per_sequence: bool = False
    externals: list[Tensor] = field(default_factory=list)  # of criteria over external statistics, in their order
    new: Tensor | None = None  # of the policy being trained, for criteria that compare it
    log_mass: Tensor | None = None  # the log of the mass that truncated sampling kept
    mass_of_rollout: bool = False  # it is taken from the engine's log-probs, and not from the trainer's
    turns: Tensor | None = None  # [U + 1] int32 or int64, offsets among the tokens, row after row
    # Where the ages are not among the externals; the operator has no such operand.
    versions: ReadVersions | None = None

    @property
    def first(self) -> Tensor:
        """The tensor whose shape and device the others have."""
        return self.train

    @property
    def count(self) -> int:
        """The number of sequences."""
        return self.train.shape[0] if self.offsets is None else self.offsets.shape[0] - 1


@dataclass(eq=False, repr=False)
class CorrectResult:
    """The result of a correction by any backend, in the shape of the batch, before weights are divided."""

    weights: Tensor | None
    mask: Tensor | None  # None: the mask given
    keep: Tensor  # [S] bool
    statistics: Tensor  # float64, the sums and then the maxima
    keep_turns: Tensor | None = None  # [U] bool; None without turns
    mean: Tensor | None = None  # 0-d, where the backend has taken what `normalize="batch"` divides by
    ages: Tensor | None = None  # [5], where the backend has taken the statistics of ages: three sums, two maxima


class InStep(NamedTuple):
    """A correction in the pass of the loss: how it enters the loss, and what it reads that the loss does not."""

    weighted: bool  # factors of the loss: the weights, or with `gated` 0 where a token is rejected
    gated: bool
    trained: bool  # rejected tokens do not train
    trainer: str | None  # the log-probs of the trainer: its `train`, or "new" or "base"
    engine: str | None  # and of the engine: its `rollout`, or "base"
    loss_takes_mass: bool  # the loss takes the kept mass off its ratio too
    settles: bool = False  # sequences are decided about before the pass of the loss
    train: Tensor | None = None  # where `trainer` is "own"
    rollout: Tensor | None = None  # where `engine` is "own"
    externals: tuple[Tensor, ...] = ()

    def without_tensors(self) -> InStep:
        """Return what a compiled step depends on."""
        return self._replace(train=None, rollout=None, externals=())


# Of a loss whose weights and masks are ready.
NO_STEP = InStep(weighted=False, gated=False, trained=False, trainer=None, engine=None, loss_takes_mass=True)


@dataclass(eq=False, repr=False)
class LossOperands:
    """The tensors of a policy loss, and operands of `torch.ops.rollout_corr.policy_loss`; an Objective comes behind."""

    new: Tensor  # new_logp
    base: Tensor | None  # what it is compared with
    ref: Tensor | None  # of the reference policy
    advantages: Tensor  # per token, or [S]
    per_sequence: bool  # advantages are [S]
    weights: Tensor | None  # factors of the loss
    trains: Tensor | None  # non-zero at trained tokens
    mask: Tensor | None  # non-zero at valid tokens
    offsets: Tensor | None  # [S + 1] int32 or int64, of a packed batch
    divisor: Tensor | None  # 0-d float64, where the caller has counted
    scales: Tensor | None = None  # factors of all that a token adds to the loss
    log_mass: Tensor | None = None  # the log of the mass that truncated sampling kept
    mass_of_base: bool = False  # it is taken from the base, and not from new_logp
    double: bool = False  # float64 computes
    turns: Tensor | None = None  # [U + 1] int32 or int64, offsets among the tokens, for a surrogate of turns
    chosen: Tensor | None = None  # non-zero where the surrogate chose the token from the whole batch
    differentiable: bool = True  # the gradient is handed back
    step: InStep = NO_STEP  # a correction in the same pass; the operator has no such operand

    @property
    def first(self) -> Tensor:
        """The tensor whose shape and device the others have."""
        return self.new

    @property
    def count(self) -> int:
        """The number of sequences."""
        return self.new.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that computes."""
        return torch.float64 if self.double else torch.float32


class LossResult(NamedTuple):
    """The result of a policy loss by any backend; the operator has the first six."""

    value: Tensor  # 0-d
    gradient: Tensor | None  # d(value * rest) / d(new_logp), in the shape of the batch; None where none was wanted
    inners: Tensor | None  # [S], by which each sequence's gradient is still to be multiplied; None or empty for nothing
    divisor: Tensor  # 0-d float64
    rest: Tensor  # 0-d float64, what the gradient is still to be divided by
    statistics: Tensor  # sums and maxima, float64; in a step each begins with the correction's
    by_kernels: bool = False  # the kernels made it, and scale the gradient in backward
    joined: bool = False  # the statistics of `LossTask.before` are in them too
    flags: Tensor | None = None  # of each step of padded rows with a mask: a token is valid, or its gradient is 0
    keep: Tensor | None = None  # [S] bool, of a step


class ScaleOperands(NamedTuple):
    """The operands of `torch.ops.rollout_corr.scale_gradient`, which is backward."""

    gradient: Tensor  # [N] or [B, T], contiguous
    inners: Tensor | None  # [S] in its dtype; None or empty: sequences do not matter
    upstream: Tensor  # 0-d, any floating dtype, on the device of the gradient
    rest: Tensor  # 0-d float64, what the gradient is still to be divided by
    offsets: Tensor | None  # of a packed batch
    flags: Tensor | None  # bool, of the kernels' steps over padded rows: the gradient is not 0 throughout
    dtype: torch.dtype  # of the result

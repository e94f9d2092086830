"""A policy loss to run on a batch, its result, and what of it the kernels leave to plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..definition.tokens import KeptMass
from ..specs.surrogate import Surrogate
from .batch import OpenBatch

if TYPE_CHECKING:
    from ..definition.loss import Operands
    from ..specs.surrogate import Decided
    from ..specs.terms import Objective
    from .blocks import Block


@dataclass(eq=False, repr=False)
class LossTask:
    """A loss to run. Tensors have the shape of the batch, and are constants, except for `new`.

    Attributes:
        new: new_logp, which may require grad; `batch.train` is the same, detached.
        batch: Mask and offsets.
        advantages: Per token, or [S] where `batch.per_sequence`.
        base: Log-probs that new_logp is compared with; None: its own, detached.
        weights: Factors of the surrogate's loss, or None.
        ref: Log-probs of the reference policy, or None.
        trains: Non-zero at tokens that train; None: all valid ones.
        objective: Everything that is fixed about the loss.
        differentiable: Compute the gradient too.
        divisor: 0-d float64 count that the caller brings; None: the loss counts.
        group: Process group over which sequences are split, or None.
        mass: The mass that truncated sampling kept, where `base` is the rollout's, or None.
        scales: Factors of all that a token adds to the loss, or None.
        decided: What the surrogate found in the whole batch, tokens in its shape; None where it does not look.
        entropy: Of each token, for a surrogate that reads it, or None.
        block: The batch as one block, where it was read as one for the look; or None.
        before: Statistics of a correction, and how many are sums; the kernels join them with those of the loss.
    """

    new: Tensor
    batch: OpenBatch
    advantages: Tensor
    base: Tensor | None
    weights: Tensor | None
    ref: Tensor | None
    trains: Tensor | None
    objective: Objective
    differentiable: bool = True
    divisor: Tensor | None = None
    group: Any = None
    mass: KeptMass | None = None
    scales: Tensor | None = None
    decided: Decided | None = None
    entropy: Tensor | None = None
    block: tuple[Block, Operands] | None = None
    before: tuple[Tensor, int] | None = None


class LossResult(NamedTuple):
    """The result of a policy loss by any backend.

    Attributes:
        value: 0-d.
        gradient: d(value * divisor) / d(new_logp), in the shape of the batch; None where none was wanted.
        inners: [S], by which each sequence's gradient is still to be multiplied; None or empty for nothing.
        divisor: 0-d float64.
        statistics: Sums and maxima, float64.
        by_kernels: The kernels made it, and scale the gradient in backward.
        joined: The statistics hold those of `LossTask.before` too.
    """

    value: Tensor
    gradient: Tensor | None
    inners: Tensor | None
    divisor: Tensor
    statistics: Tensor
    by_kernels: bool = False
    joined: bool = False


def beyond_kernels(surrogate: Surrogate, scaled: bool) -> str | None:
    """Say why the kernels leave a surrogate to plain torch; None if they do not.

    Args:
        surrogate: The surrogate.
        scaled: Factors of all that a token adds are given.
    """
    if type(surrogate).__module__.rpartition(".")[0] != Surrogate.__module__.rpartition(".")[0]:
        return f"{surrogate!r} has a formula of its own, which runs on plain torch"
    if surrogate.ratio_level in ("average", "geometric_average"):
        return f"{surrogate!r} takes an average of two ratios, which runs on plain torch"
    if surrogate.sees_batch and not surrogate.traits.chooses_tokens:
        units = "groups of sequences" if surrogate.traits.sees == "groups" else "the batch for bounds"
        return f"{surrogate!r} looks at {units}, which runs on plain torch"
    return f"{surrogate!r} with scale runs on plain torch" if scaled and surrogate.traits.one_loss else None

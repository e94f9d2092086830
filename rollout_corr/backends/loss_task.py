"""A policy loss to run on a batch, and what of it the kernels leave to plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..definition.tokens import KeptMass
from ..specs.surrogate import Surrogate
from .batch import OpenBatch

if TYPE_CHECKING:
    from ..specs.surrogate import Decided
    from ..specs.terms import Objective


@dataclass(eq=False, repr=False)
class LossTask:
    """A loss to run. Tensors have the shape of the batch, and are constants, except for `new`."""

    new: Tensor  # may require grad; `batch.train` is the same, detached
    batch: OpenBatch  # mask and offsets
    advantages: Tensor  # per token, or [S] where `batch.per_sequence`
    base: Tensor | None  # log-probs that new_logp is compared with; None: its own, detached
    weights: Tensor | None  # factors of the surrogate's loss
    ref: Tensor | None  # log-probs of the reference policy
    trains: Tensor | None  # non-zero at trained tokens; None: all valid ones
    objective: Objective
    differentiable: bool = True  # compute the gradient too
    divisor: Tensor | None = None  # 0-d float64 count that the caller brings; None: the loss counts
    group: Any = None  # over which sequences are split
    mass: KeptMass | None = None  # that truncated sampling kept, where `base` is the rollout's
    scales: Tensor | None = None  # factors of all that a token adds to the loss
    decided: Decided | None = None  # what the surrogate found in the whole batch; None: it does not look
    before: tuple[Tensor, int] | None = None  # statistics of a correction to join, and how many are sums


def beyond_kernels(surrogate: Surrogate, scaled: bool) -> str | None:
    """Say why the kernels leave a surrogate, with or without a scale, to plain torch; None if they do not."""
    if type(surrogate).__module__.rpartition(".")[0] != Surrogate.__module__.rpartition(".")[0]:
        return f"{surrogate!r} has a formula of its own, which runs on plain torch"
    if surrogate.ratio_level in ("average", "geometric_average"):
        return f"{surrogate!r} takes an average of two ratios, which runs on plain torch"
    if surrogate.traits.sees == "groups":
        return f"{surrogate!r} looks at groups of sequences, which runs on plain torch"
    return f"{surrogate!r} with scale runs on plain torch" if scaled and surrogate.traits.one_loss else None

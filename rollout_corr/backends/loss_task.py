"""A policy loss to run on a batch, and what of it the kernels leave to plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..definition.tokens import KeptMass
from ..specs.operands import LossOperands
from ..specs.surrogate import Surrogate
from .batch import SequenceGroups, as_it_is, mass_of
from .layouts import LogProbs

if TYPE_CHECKING:
    from ..specs.surrogate import Decided
    from ..specs.terms import Objective


@dataclass(eq=False, repr=False, kw_only=True)
class LossTask(LossOperands):
    """A loss to run: the tensors that kernels take, constants all of them, and what else belongs to it."""

    leaf: Tensor  # new_logp as it came, which may require grad; `new` is the same, detached
    objective: Objective
    restore: Callable[[Tensor], LogProbs] = as_it_is  # gives a result of this shape back in the caller's layout
    given_mask: LogProbs | None = None
    group: Any = None  # over which sequences are split
    groups: SequenceGroups | None = None  # for a surrogate that looks at them
    decided: Decided | None = None  # what the surrogate found in the whole batch; None: it does not look
    before: tuple[Tensor, int] | None = None  # statistics of a correction to join, and how many are sums

    @property
    def mass(self) -> KeptMass | None:
        """The mass that truncated sampling kept, where `base` is the rollout's."""
        return mass_of(self.log_mass, self.mass_of_base)


def beyond_kernels(surrogate: Surrogate, scaled: bool) -> str | None:
    """Say why the kernels leave a surrogate, with or without a scale, to plain torch; None if they do not."""
    if type(surrogate).__module__.rpartition(".")[0] != Surrogate.__module__.rpartition(".")[0]:
        return f"{surrogate!r} has a formula of its own, which runs on plain torch"
    if surrogate.ratio_level in ("average", "geometric_average"):
        return f"{surrogate!r} takes an average of two ratios, which runs on plain torch"
    if surrogate.traits.sees == "groups":
        return f"{surrogate!r} looks at groups of sequences, which runs on plain torch"
    return f"{surrogate!r} with scale runs on plain torch" if scaled and surrogate.traits.one_loss else None

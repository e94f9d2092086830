"""The description of an entropy bonus: `EntropyBonus`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollout_corr.spec.checked import Checked
from rollout_corr.spec.loss import SCOPES, Scope
from rollout_corr.spec.validate import choice, number


@dataclass(frozen=True, repr=False)
class EntropyBonus(Checked):
    """A reward for entropy: -coef times the entropy of the tokens, reduced as the policy loss is.

    Args:
        coef: Factor of the term; below 0 entropy is penalised.
        scope: The tokens that it is summed over: "kept" those that train, "all" the valid ones, rejected ones too.
    """

    coef: float
    scope: Scope = "kept"

    def __post_init__(self) -> None:
        value = number("EntropyBonus.coef", self.coef)
        if not math.isfinite(value):
            raise ValueError(f"EntropyBonus.coef: expected a finite number, got {value!r}")
        choice("EntropyBonus.scope", self.scope, SCOPES)
        self._set(coef=value)

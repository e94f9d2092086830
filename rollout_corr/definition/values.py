"""`CriterionValues`: the quantities that the formulas of spec/statistics.py read, from the tokens of a batch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rollout_corr.definition.tokens import Tokens, binary_kl, k3, probability, select
from rollout_corr.spec.criterion import AGE, Criterion


class CriterionValues:
    """The quantities that formulas in spec/statistics.py read (`TokenValues` there), for one criterion."""

    def __init__(self, criterion: Criterion, tokens: Tokens, external: Mapping[str, Tensor]) -> None:
        self._criterion = criterion
        self._tokens = tokens
        self._external = external

    @property
    def d(self) -> Tensor:
        """D after the criterion's token clamp."""
        limit, d = self._criterion.token_clamp, self._tokens.d
        return d if limit is None else d.clamp(-limit, limit)

    @property
    def clamped_d(self) -> Tensor:
        """`d` within +-Spec.clamp."""
        return self._tokens.clamped(self._criterion.token_clamp)

    @property
    def p(self) -> Tensor:
        """exp(rollout_logp)."""
        return probability(self._tokens.rollout)

    @property
    def q(self) -> Tensor:
        """exp(train_logp)."""
        return probability(self._tokens.train)

    @property
    def binary_kl(self) -> Tensor:
        """KL(rollout || train) of {this token, any other}."""
        tokens = self._tokens
        return select(tokens.measured, binary_kl(tokens.rollout, tokens.train, tokens.d, self._criterion.eps))

    @property
    def binary_kl_reverse(self) -> Tensor:
        """KL(train || rollout) of {this token, any other}."""
        tokens = self._tokens
        return select(tokens.measured, binary_kl(tokens.train, tokens.rollout, -tokens.d, self._criterion.eps))

    @property
    def external(self) -> Tensor:
        """The caller's tensor, entropies or ages."""
        given = self._external[self._criterion.tensor_name or AGE]
        return select(self._tokens.measured, given.to(self._tokens.d.dtype))

    def k3(self, x: Tensor) -> Tensor:
        """e^x - 1 - x."""
        # Not tokens.k3: what decides must not depend on how large D is elsewhere in the block.
        return k3(x)

"""The kernel that counts tokens for bounds that the batch decides, in the place of their values in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from rollout_corr.backends import operators
from rollout_corr.backends.batch import Batch
from rollout_corr.backends.bounds_of_batch import AnySearch, Counters, rules_of_tokens
from rollout_corr.backends.select import DIGITS, Search, digit_of
from rollout_corr.backends.select_ess import DIGITS as DIGITS_OF_WEIGHTS
from rollout_corr.backends.select_ess import EssSearch
from rollout_corr.spec.bounds_of_batch import OfBatch, Place
from rollout_corr.spec.correction import Spec

if TYPE_CHECKING:
    from rollout_corr.kernels.correct.counting import Round


def counters_of(batch: Batch, spec: Spec, backend: str) -> Counters | None:
    """Give what counts tokens where the kernels run: where they correct the batch too, and no compiler looks on."""
    if backend != "triton" or operators.beyond_kernels(spec) is not None:
        return None
    operands = operators.operands_of(batch, spec, bounded=False)
    if operators.is_operator(operands):
        return None

    def counter_for(labels: set[str]) -> TokenCounter | None:
        rules = {place: rule for place, rule in rules_of_tokens(spec).items() if place.label in labels}
        return TokenCounter(batch, operands, spec, rules) if rules else None

    return counter_for


class TokenCounter:
    """The counter of a batch; see `bounds_of_batch.Counter`.

    Args:
        batch: The batch.
        operands: Its tensors.
        spec: The Spec.
        rules: The bounds.
    """

    def __init__(
        self, batch: Batch, operands: operators.CorrectOperands, spec: Spec, rules: dict[Place, OfBatch]
    ) -> None:
        self.rules, self.dtype, self.device = rules, batch.dtype, batch.train.device
        self._given, self._spec = operators.given_of(operands), spec

    def tables(self, searches: Mapping[Place, AnySearch]) -> dict[Place, Tensor]:
        """Launch the kernel, once for all that count and once for a sample size."""
        from rollout_corr.kernels.correct.counting import count

        found: dict[Place, Tensor] = {}
        for one in rounds_of({place: searches[place] for place in self.rules if place in searches}):
            found |= count(self._given, self._spec, one)
        return found


def rounds_of(searches: Mapping[Place, AnySearch]) -> list[Round]:
    """Give searches as the kernel takes them: those of one launch have the same digits."""
    from rollout_corr.kernels.correct.counting import Round

    rounds = []
    counting = {place: one for place, one in searches.items() if isinstance(one, Search)}
    if counting:
        first = next(iter(counting.values()))
        bits, behind = digit_of(DIGITS[first.dtype], first.round)
        prefixes = tuple([one.prefix for one in counting.values()])
        rounds.append(Round(tuple(counting), prefixes, bits + behind, bits))
    for place, one in searches.items():
        if isinstance(one, EssSearch):
            bits, behind = digit_of(DIGITS_OF_WEIGHTS, one.round)
            scales = 1.0 / one.units(one.prefix.device)[0]
            rounds.append(Round((place,), (one.prefix,), bits + behind, bits, scales))
    return rounds

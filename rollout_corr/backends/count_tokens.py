"""The kernel that counts tokens for bounds that the batch decides, in the place of their values in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from rollout_corr.backends import operators
from rollout_corr.backends.batch import Batch
from rollout_corr.backends.bounds_of_batch import AnySearch, Counters, counting_of_tokens
from rollout_corr.backends.select import DIGITS, Search, digit_of
from rollout_corr.spec.bounds_of_batch import Counting, Place
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
        rules = {place: rule for place, rule in counting_of_tokens(spec).items() if place.label in labels}
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
        self, batch: Batch, operands: operators.CorrectOperands, spec: Spec, rules: dict[Place, Counting]
    ) -> None:
        self.rules, self.dtype, self.device = rules, batch.dtype, batch.train.device
        self._given, self._spec = operators.given_of(operands), spec

    def tables(self, searches: Mapping[Place, AnySearch]) -> dict[Place, Tensor]:
        """Launch the kernel once: values of one dtype have the same digits."""
        from rollout_corr.kernels.correct.counting import count

        found = {place: one for place in self.rules if isinstance(one := searches.get(place), Search)}
        return count(self._given, self._spec, round_of(found)) if found else {}


def round_of(searches: Mapping[Place, Search]) -> Round:
    """Give searches of values of one dtype, at least one, as the kernel takes them: they have the same digits."""
    from rollout_corr.kernels.correct.counting import Round

    first = next(iter(searches.values()))
    bits, behind = digit_of(DIGITS[first.dtype], first.round)
    return Round(tuple(searches), tuple([one.prefix for one in searches.values()]), bits + behind, bits)

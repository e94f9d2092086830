"""The kernel that counts tokens for bounds that the batch decides, in the place of their values in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from rollout_corr.backends import operators
from rollout_corr.backends.batch import Batch
from rollout_corr.backends.bounds_of_batch import AnySearch, Counters, in_order, rules_of_sequences, rules_of_tokens
from rollout_corr.backends.select import digit_of
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

    def counter_for(labels: set[str]) -> TokenCounter:
        def some(rules: dict[Place, OfBatch]) -> dict[Place, OfBatch]:
            return {place: rule for place, rule in rules.items() if place.label in labels}

        # With turns, slots are of these.
        units = {} if spec.has_prefixes or spec.measures_turns else some(rules_of_sequences(spec))
        return TokenCounter(batch, operands, spec, some(rules_of_tokens(spec)), units)

    return counter_for


class TokenCounter:
    """The counter of a batch; see `bounds_of_batch.Counter`.

    Args:
        batch: The batch.
        operands: Its tensors.
        spec: The Spec.
        rules: The bounds of tokens.
        units: The bounds of sequences.
    """

    def __init__(
        self,
        batch: Batch,
        operands: operators.CorrectOperands,
        spec: Spec,
        rules: dict[Place, OfBatch],
        units: dict[Place, OfBatch],
    ) -> None:
        self.rules, self.units, self.dtype, self.device = rules, units, batch.dtype, batch.train.device
        self._given, self._spec = operators.given_of(operands), spec

    def values(self, known: Mapping[Place, Tensor]) -> dict[Place, tuple[Tensor, Tensor]]:
        """Launch `read`, and what adds up the slots of sequences behind it."""
        if not self.units:
            return {}
        from rollout_corr.kernels.correct.valuing import values

        given = replace(self._given, bounds=in_order(known, self._spec, self.device))
        return values(given, self._spec, tuple(self.units))

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

    alike: dict[tuple[int, ...], list[Place]] = {}
    for place, one in searches.items():
        alike.setdefault(one.digits(), []).append(place)
    rounds = []
    for digits, places in alike.items():
        first = searches[places[0]]
        bits, behind = digit_of(digits, first.round)
        prefixes = tuple([searches[place].prefix for place in places])
        rounds.append(Round(tuple(places), prefixes, bits + behind, bits, first.scales()))
    return rounds

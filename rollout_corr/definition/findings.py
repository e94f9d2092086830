"""The definition of a correction from end to end, and where ratios lie outside their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..specs.correction import Spec
from . import correction
from .bounds import BoundsOfBatch
from .correction import Advantages, Decision
from .facts import SequenceFacts, sequence_facts
from .tokens import Number, Tokens
from .weights import Weighing, weigh, weights_of

Numbers = dict[str, Number]


class Operands(NamedTuple):
    """Some whole sequences to correct, the Spec, and what it reads besides log-probs."""

    tokens: Tokens  # read under the Spec
    n_valid: Tensor  # [S] int64, the valid tokens of each sequence
    spec: Spec
    advantages: Advantages | None  # for criteria with `when`
    external: Mapping[str, Tensor]  # for criteria with stat="external", by name
    others: Mapping[str, Tokens]  # under other pairs of policies, by `Criterion.of`
    bounds: BoundsOfBatch | None = None  # gives the bounds that the batch decides, where the Spec has such
    groups: Tensor | None = None  # [S] int64, the group of each sequence, where groups decide bounds


class Decided(NamedTuple):
    """Some whole sequences, and what the criteria say of them."""

    tokens: Tokens
    n_valid: Tensor  # [S] int64, the valid tokens of each sequence
    n_measured: Tensor  # [S] int64, how many of them are measured
    decision: Decision


@dataclass(eq=False, repr=False)
class Findings:
    """Everything that the definition found about some whole sequences; statistics are taken from it."""

    spec: Spec
    tokens: Tokens
    n_valid: Tensor  # [S] int64
    n_measured: Tensor  # [S] int64
    decision: Decision
    weighing: Weighing | None
    weights: Tensor | None  # per token, before batch normalization; None when the Spec hands none back
    facts: SequenceFacts

    @property
    def units_measured(self) -> Tensor:
        """[S] or [U] int64: the measured tokens of each unit of the weight."""
        weight, turns = self.spec.weight, self.facts.turns
        return turns.measured if weight is not None and weight.per_turn and turns else self.n_measured


def decided(given: Operands) -> Decided:
    """Run the criteria."""
    tokens, spec, n_measured = given.tokens, given.spec, given.n_valid
    if tokens.nonfinite is not None and spec.nonfinite == "reject":
        n_measured = given.n_valid - tokens.nonfinite
    more = given.advantages, given.external, given.others, given.bounds, given.groups
    decision = correction.decide(tokens, n_measured, spec, *more)
    return Decided(tokens, given.n_valid, n_measured, decision)


def evaluate(given: Operands) -> Findings:
    """Correct some whole sequences."""
    spec = given.spec
    tokens, n_valid, n_measured, decision = decided(given)
    weighing = weigh(tokens, decision, spec, given.bounds)
    weights = weights_of(tokens, decision, weighing, spec)
    facts = sequence_facts(tokens, n_valid, n_measured, decision, weighing, spec)
    return Findings(spec, tokens, n_valid, n_measured, decision, weighing, weights, facts)

"""The definition of a correction from end to end, and where ratios lie outside their bounds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..specs.correction import Spec
from .correction import Decision, Operands, decide
from .facts import SequenceFacts, sequence_facts
from .tokens import Number, Tokens
from .weights import Weighing, weigh, weights_of

Numbers = dict[str, Number]


@dataclass(eq=False, repr=False)
class Findings:
    """Everything that the definition found about some whole sequences; statistics are taken from it."""

    spec: Spec
    tokens: Tokens
    n_valid: Tensor  # [S] int64
    decision: Decision
    weighing: Weighing | None
    weights: Tensor | None  # per token, before batch normalization; None when the Spec hands none back
    facts: SequenceFacts

    @property
    def n_measured(self) -> Tensor:
        """[S] int64: the measured tokens of each sequence."""
        return self.decision.n_measured

    @property
    def units_measured(self) -> Tensor:
        """[S] or [U] int64: the measured tokens of each unit of the weight."""
        weight, turns = self.spec.weight, self.facts.turns
        return turns.measured if weight is not None and weight.per_turn and turns else self.n_measured


def evaluate(given: Operands) -> Findings:
    """Correct some whole sequences."""
    tokens, n_valid, spec, decision = given.tokens, given.n_valid, given.spec, decide(given)
    weighing = weigh(tokens, decision, spec, given.bounds)
    weights = weights_of(tokens, decision, weighing, spec)
    facts = sequence_facts(tokens, n_valid, decision, weighing, spec)
    return Findings(spec, tokens, n_valid, decision, weighing, weights, facts)

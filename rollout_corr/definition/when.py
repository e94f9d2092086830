"""`Criterion.when`: which tokens, turns and sequences a criterion tests, by the signs of advantages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rollout_corr.definition.tokens import Tokens, select, sum_of_statistic


@dataclass(eq=False, repr=False)
class Advantages:
    """Advantages per token, and per sequence, [S], when they were given so."""

    token: Tensor
    sequence: Tensor | None


def selected_tokens(when: str, tokens: Tokens, advantages: Tensor) -> Tensor:
    """Bool per token: those that `when` selects. A NaN advantage selects nothing, nor does 0."""
    if when == "outward":
        return advantages.sign() * tokens.d.sign() > 0
    wanted = advantages < 0 if when == "negative_advantage" else advantages > 0
    return wanted if tokens.measured is None else wanted & tokens.measured


def selected_units(when: str, over: str, tokens: Tokens, advantages: Advantages) -> Tensor:
    """Bool per unit: by the sign of the mean advantage over its valid tokens; for "outward", those with one."""
    units = tokens.units(over)
    if when == "outward":
        return units.sum_integers(selected_tokens(when, tokens, advantages.token)) > 0
    if advantages.sequence is not None:
        mean = advantages.sequence
        if over == "turn" and tokens.turns is not None:
            mean = tokens.turns.of_sequences.spread(mean)
    else:
        finite = advantages.token.isfinite()
        counted = finite if tokens.valid is None else finite & tokens.valid
        mean = sum_of_statistic(select(counted, advantages.token), units, False)
    return mean < 0 if when == "negative_advantage" else mean > 0

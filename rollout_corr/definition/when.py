"""`Criterion.when`: which tokens and sequences a criterion tests, by the signs of advantages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rollout_corr.definition.tokens import Tokens, select, sum_of_statistic


@dataclass
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


def selected_sequences(when: str, tokens: Tokens, advantages: Advantages) -> Tensor:
    """[S] bool: by the sign of the mean advantage over valid tokens; for "outward", those with an outward token."""
    if when == "outward":
        return tokens.count(selected_tokens(when, tokens, advantages.token)) > 0
    if advantages.sequence is not None:
        mean = advantages.sequence
    else:
        finite = advantages.token.isfinite()
        counted = finite if tokens.valid is None else finite & tokens.valid
        mean = sum_of_statistic(select(counted, advantages.token), tokens.sequences, False)
    return mean < 0 if when == "negative_advantage" else mean > 0

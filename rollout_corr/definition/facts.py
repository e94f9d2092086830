"""Facts per sequence and per turn: all that statistics of whole sequences are made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..specs.correction import Spec
from .correction import Decision, Outcome
from .sequences import Sequences
from .tokens import Tokens

if TYPE_CHECKING:
    from .turns import Turns
    from .weights import Weighing

Named = dict[str, Tensor]


@dataclass(eq=False, repr=False)
class CriterionFacts:
    """The measurements and the rejections of one criterion, per sequence."""

    value: Tensor  # [S] or [U], the unit's value; [0] for token criteria
    units: Tensor  # [S] or [U] bool, whether it has a value; for token criteria [S] int64, the tokens that have one
    tokens: Tensor  # [S] int64, the valid tokens that it rejected


@dataclass(eq=False, repr=False)
class TurnFacts:
    """All that the statistics of turns need, [U] each. A weight's have no meaning where none is of turns."""

    tokens: Tensor  # int64, valid tokens
    measured: Tensor  # int64, how many of them are measured
    keep: Tensor  # bool, not rejected, nor its sequence; True without a valid token
    place: Tensor  # int64, FIRST, MIDDLE or LAST
    d: Tensor  # the sum of D
    abs_d: Tensor  # the sum of |D|
    k3: Tensor  # the sum of k3
    excess: Tensor  # as for a sequence, below
    weight_excess: Tensor
    ratio: Tensor
    weight: Tensor
    log_weight: Tensor


@dataclass(eq=False, repr=False)
class SequenceFacts:
    """All that the statistics of sequences need, [S] each. A weight's have no meaning where there is none."""

    criteria: list[CriterionFacts]  # in the order in which they were run
    tokens: Tensor  # int64, valid tokens
    measured: Tensor  # int64, how many of them are measured
    nonfinite: Tensor | None  # int64, how many of them have a D that is NaN or infinite; None: there is none
    differing: Tensor  # int64, how many of them have two log-probs that differ
    kept: Tensor  # int64, how many of them are not rejected
    keep: Tensor  # bool
    train: Tensor  # the sum of train_logp
    rollout: Tensor  # the sum of rollout_logp
    d: Tensor  # the sum of D
    excess: Tensor  # ratio - 1 before the bounds; of weights of tokens and turns the mean over tokens
    weight_excess: Tensor  # ratio - 1 after the bounds
    ratio: Tensor  # before the bounds
    weight: Tensor  # after the bounds
    log_weight: Tensor  # log of the ratio before the bounds
    turns: TurnFacts | None  # where turns are measured
    total: int | None  # the valid tokens of all of them, where the shape tells
    rejects: bool  # keep may be False
    drops: bool  # a sequence that is kept may have lost tokens


def sequence_facts(
    tokens: Tokens, n_valid: Tensor, decision: Decision, weighing: Weighing | None, spec: Spec
) -> SequenceFacts:
    """Gather the facts of each sequence, and take the sums over sequences that no outcome needed."""
    n_measured = decision.n_measured
    train, rollout = tokens.sums_of_log_probs
    of_turns = None
    if tokens.turns is not None:
        of_turns = _turn_facts(tokens, tokens.turns, decision, weighing, spec)
    weight = _weight_facts(tokens, n_measured, weighing, spec, of_turns)
    return SequenceFacts(
        criteria=[_criterion_facts(outcome, tokens, n_valid, n_measured) for outcome in decision.outcomes],
        tokens=n_valid,
        measured=n_measured,
        nonfinite=tokens.nonfinite,
        differing=tokens.n_differing,
        kept=tokens_kept(tokens, n_valid, decision),
        keep=decision.keep,
        train=train,
        rollout=rollout,
        d=tokens.sum_d,
        turns=of_turns,
        total=tokens.d.numel() if tokens.valid is None else None,
        rejects=decision.rejects,
        drops=decision.dropped is not None or decision.keep_turns is not None,
        **weight,
    )


def _turn_facts(tokens: Tokens, turns: Turns, decision: Decision, weighing: Weighing | None, spec: Spec) -> TurnFacts:
    assert decision.keep_turns is not None
    measured = turns.measured(spec.nonfinite == "reject")
    weight = _nothing(tokens)
    if weighing is not None and spec.weight is not None and spec.weight.per_turn:
        weight = _of_units(weighing)
    return TurnFacts(
        tokens=turns.n_valid,
        measured=measured,
        keep=decision.keep_turns & (turns.of_sequences.spread(decision.keep) | (turns.n_valid == 0)),
        place=turns.places(measured > 0),
        d=tokens.sum_d_over("turn"),
        abs_d=turns.units.sum(tokens.size),
        k3=turns.units.sum(tokens.k3),
        **weight,
    )


def _nothing(tokens: Tokens) -> Named:
    """Placeholders where the Spec has no weight; never read."""
    return dict.fromkeys(("excess", "weight_excess", "ratio", "weight", "log_weight"), tokens.sum_d)


def _of_units(weighing: Weighing) -> Named:
    """The weight of each turn or sequence."""
    return {
        "excess": weighing.excess,
        "weight_excess": weighing.weight_excess,
        "ratio": weighing.ratio,
        "weight": weighing.weight,
        "log_weight": weighing.log_ratio,
    }


def _weight_facts(
    tokens: Tokens, n_measured: Tensor, weighing: Weighing | None, spec: Spec, of_turns: TurnFacts | None
) -> Named:
    """The weight of each sequence; of weights of tokens and turns the means over its measured tokens."""
    if weighing is None or spec.weight is None:
        return _nothing(tokens)
    if spec.weight.per_turn and of_turns is not None and tokens.turns is not None:
        within = tokens.turns.of_sequences
        ratio, weight = (within.sum(of_turns.measured * side) for side in (of_turns.ratio, of_turns.weight))
        found = _means(ratio, weight, n_measured)
        if spec.weight.rules:
            found["log_weight"] = _between_ends(found["log_weight"], weighing.log_ratio, of_turns.measured > 0, within)
        return found
    if not spec.weight.per_token:
        return _of_units(weighing)
    total = total_bounded = tokens.sum_weights("ratio", weighing.ratio)
    if spec.weight.bounded:
        total_bounded = tokens.sum_weights("weight", weighing.weight)
    found = _means(total, total_bounded, n_measured)
    if spec.asks_batch and spec.weight.rules:
        found["log_weight"] = _between_ends(found["log_weight"], weighing.log_ratio, tokens.measured, tokens.sequences)
    return found


def _between_ends(log_mean: Tensor, log_ratio: Tensor, measured: Tensor | None, sequences: Sequences) -> Tensor:
    """[S]: logs of means, within the ends of their terms, of tokens or turns, whatever their rounding.

    A bound that the batch decides is one of its ratios: a sequence of equal ones must not seem to lie beyond it.
    """
    sides = (log_ratio, -log_ratio)
    if measured is not None:
        sides = torch.where(measured, sides[0], -torch.inf), torch.where(measured, sides[1], -torch.inf)
    high, low = (sequences.max(side).to(log_mean.dtype) for side in sides)
    return torch.where(high >= -low, log_mean.clamp(-low, high), log_mean)


def _means(total: Tensor, total_bounded: Tensor, n_measured: Tensor) -> Named:
    """The mean weight of each sequence, from sums over its measured tokens; 1 where there is none."""
    n = n_measured.clamp(min=1)
    nothing = n_measured == 0
    ratio = torch.where(nothing, 1.0, total / n)
    weight = ratio if total_bounded is total else torch.where(nothing, 1.0, total_bounded / n)
    return {
        "excess": ratio - 1.0,
        "weight_excess": weight - 1.0,
        "ratio": ratio,
        "weight": weight,
        "log_weight": ratio.log(),
    }


def _criterion_facts(outcome: Outcome, tokens: Tokens, n_valid: Tensor, n_measured: Tensor) -> CriterionFacts:
    among, value = outcome.counted, outcome.value
    if outcome.criterion.per_token:
        value = torch.zeros(0, dtype=torch.float64, device=tokens.d.device)
        # A criterion of new/old counts tokens that are not finite in train/rollout: where it counts all, these too.
        every = n_measured if tokens.measured is None else n_valid
        units = every if among is None else n_measured if among is tokens.measured else tokens.count(among)
    else:
        assert among is not None
        units = among
    return CriterionFacts(value, units, tokens_lost(outcome, tokens, n_valid))


def tokens_lost(outcome: Outcome, tokens: Tokens, n_valid: Tensor) -> Tensor:
    """[S] int64: valid tokens that one criterion rejected."""
    if outcome.failed is not None:
        return outcome.failed * n_valid
    if outcome.failed_turns is not None and tokens.turns is not None:
        turns = tokens.turns
        return turns.of_sequences.sum_integers(torch.where(outcome.failed_turns, turns.n_valid, 0))
    if outcome.thinned is not None and outcome.selected is not None:
        over = outcome.criterion.over
        lost = torch.where(outcome.thinned, tokens.units(over).sum_integers(outcome.selected), 0)
        return tokens.turns.of_sequences.sum_integers(lost) if over == "turn" and tokens.turns is not None else lost
    return torch.zeros_like(n_valid) if outcome.dropped is None else tokens.count(outcome.dropped)


def tokens_kept(tokens: Tokens, n_valid: Tensor, decision: Decision) -> Tensor:
    """[S] int64: valid tokens that are not rejected.

    The counts must not depend on an outcome (see correction.survivors). So where failed sequences lose some of
    their tokens, tokens are counted for every combination of failures, and the outcomes choose among the counts.
    """
    turns, keep = tokens.turns, decision.keep
    in_turns = turns is not None and any(outcome.criterion.over == "turn" for outcome in decision.outcomes)
    if turns is not None and in_turns and decision.keep_turns is not None:
        n_valid, keep = turns.n_valid, decision.keep_turns & turns.of_sequences.spread(keep)
    kept = _kept_of_units(tokens, n_valid, keep, decision, in_turns)
    return turns.of_sequences.sum_integers(kept) if turns is not None and in_turns else kept


def _kept_of_units(tokens: Tokens, n_valid: Tensor, keep: Tensor, decision: Decision, in_turns: bool) -> Tensor:
    """`tokens_kept` of each sequence, or of each turn where a criterion is over turns; `keep` is of these units."""
    if decision.dropped is None:
        return keep * n_valid if decision.rejects or in_turns else n_valid
    units = tokens.units("turn" if in_turns else "sequence")
    left = [torch.ones_like(tokens.d, dtype=torch.bool) if tokens.valid is None else tokens.valid]
    choice = torch.zeros_like(n_valid)
    for outcome in decision.outcomes:
        if outcome.thinned is not None and outcome.selected is not None:
            thinned = outcome.thinned
            if in_turns and outcome.criterion.over == "sequence" and tokens.turns is not None:
                thinned = tokens.turns.of_sequences.spread(thinned)
            choice = choice + thinned * len(left)
            left += [which & ~outcome.selected for which in left]
        elif outcome.dropped is not None:
            left = [which & ~outcome.dropped for which in left]
    counts = torch.stack([units.sum_integers(which) for which in left])
    return torch.where(keep, counts.gather(0, choice[None])[0], 0)


def concatenate(parts: list[SequenceFacts]) -> SequenceFacts:
    """Join the facts of consecutive blocks."""
    if len(parts) == 1:
        return parts[0]

    def joined(items: Iterable[object], fields: Iterable[str]) -> dict[str, Tensor]:
        rows = [vars(item) for item in items]
        return {name: torch.cat([row[name] for row in rows]) for name in fields}

    criteria = [
        CriterionFacts(**joined([part.criteria[i] for part in parts], CriterionFacts.__dataclass_fields__))
        for i in range(len(parts[0].criteria))
    ]
    apart = "criteria", "turns", "nonfinite", "total", "rejects", "drops"
    plain = [name for name in SequenceFacts.__dataclass_fields__ if name not in apart]
    of_turns = [part.turns for part in parts if part.turns is not None]
    turns = TurnFacts(**joined(of_turns, TurnFacts.__dataclass_fields__)) if of_turns else None
    nonfinite = None
    if any(part.nonfinite is not None for part in parts):
        counts = (torch.zeros_like(part.tokens) if part.nonfinite is None else part.nonfinite for part in parts)
        nonfinite = torch.cat(list(counts))
    totals = [part.total for part in parts if part.total is not None]
    return SequenceFacts(
        criteria=criteria,
        turns=turns,
        nonfinite=nonfinite,
        total=sum(totals) if len(totals) == len(parts) else None,
        rejects=any(part.rejects for part in parts),
        drops=any(part.drops for part in parts),
        **joined(parts, plain),
    )

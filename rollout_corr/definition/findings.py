"""The definition of a correction from end to end, and the facts per sequence that its statistics are made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.definition import correction
from rollout_corr.definition.correction import Advantages, Decision, Outcome, Weighing
from rollout_corr.definition.sequences import Packed, Sequences
from rollout_corr.definition.tokens import LARGEST_D, KeptMass, Tokens, few_above, read_tokens, select
from rollout_corr.spec.correction import Spec
from rollout_corr.spec.thresholds import log_bound

Named = dict[str, Tensor]


class Beyond(NamedTuple):
    """The tokens beyond the bounds of a token weight, where they are few."""

    places: Tensor  # [k] int64
    sequences: Tensor  # [k] int64, the sequence of each
    above: int
    below: int


@dataclass
class CriterionFacts:
    """The measurements and the rejections of one criterion, per sequence."""

    value: Tensor  # [S] the sequence's value; [0] for token criteria
    units: Tensor  # [S] bool, whether it has a value; for token criteria int64, the tokens that have one
    tokens: Tensor  # [S] int64, the valid tokens that it rejected


@dataclass
class SequenceFacts:
    """Per sequence, all that the statistics of sequences need. Every tensor is [S], or [0] without a weight."""

    criteria: list[CriterionFacts]  # in the order in which they were run
    tokens: Tensor  # int64, valid tokens
    measured: Tensor  # int64, those of them that are measured
    nonfinite: Tensor  # int64, those of them whose D is NaN or infinite
    kept: Tensor  # int64, those of them that are not rejected
    keep: Tensor  # bool
    train: Tensor  # the sum of train_logp
    rollout: Tensor  # the sum of rollout_logp
    d: Tensor  # the sum of D
    raw: Tensor  # ratio - 1 before the bounds; of token weights the mean
    bounded: Tensor  # ratio - 1 after the bounds
    ratio: Tensor  # before the bounds
    weight: Tensor  # after the bounds
    log_weight: Tensor  # log of the ratio before the bounds


@dataclass
class Findings:
    """Everything that the definition found about some whole sequences; statistics are taken from it."""

    spec: Spec
    tokens: Tokens
    n_valid: Tensor  # [S] int64
    n_measured: Tensor  # [S] int64
    decision: Decision
    weighing: Weighing | None
    weights: Tensor | None  # per token, before batch normalisation; None when the Spec hands none back
    beyond: Beyond | None
    facts: SequenceFacts
    _excess2: list[Tensor] = field(default_factory=list)

    @property
    def excess2(self) -> Tensor:
        """0-d: the sum of (e^D - 1)^2, which a weight without bounds or token clamp needs again."""
        if not self._excess2:
            excess = self.tokens.excess
            self._excess2.append((excess * excess).sum())
        return self._excess2[0]


def evaluate(
    train: Tensor,
    rollout: Tensor,
    valid: Tensor | None,
    sequences: Sequences,
    n_valid: Tensor,
    spec: Spec,
    advantages: Advantages | None,
    external: Mapping[str, Tensor],
    look: bool = False,
    pairs: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    mass: KeptMass | None = None,
) -> Findings:
    """Correct some whole sequences.

    Args:
        train, rollout: [N] or [B, T], log-probs in the dtype that computes.
        valid: Bool of the same shape; None: all tokens are valid.
        sequences: Which tokens belong together.
        n_valid: [S] int64, the valid tokens of each sequence.
        spec: The Spec.
        advantages: For criteria with `when`.
        external: For criteria with stat="external", by name.
        look: Read values to leave out what they make unnecessary: CPU tensors only, and all of them valid.
        pairs: Log-probs of other pairs of policies, by `Criterion.of`.
        mass: The mass that truncated sampling kept, per token in the dtype that computes; it comes between a policy of
            the trainer and the rollout's, so not into new/old.
    """
    if mass is not None:
        train, rollout = mass.taken_from(train, rollout)
        pairs = {of: two if of == "new/old" else mass.taken_from(*two) for of, two in (pairs or {}).items()}
    tokens = read_tokens(train, rollout, valid, sequences, spec, look)
    n_measured = n_valid
    if tokens.nonfinite is not None and spec.nonfinite == "reject":
        n_measured = n_valid - tokens.nonfinite
    others = {of: read_tokens(one, other, valid, sequences, spec, look) for of, (one, other) in (pairs or {}).items()}
    decision = correction.decide(tokens, n_measured, spec, advantages, external, others)
    weighing = correction.weigh(tokens, decision, spec)
    weights = correction.weights_of(tokens, decision, weighing, spec)
    beyond = few_beyond(tokens, weighing, spec)
    facts = sequence_facts(tokens, n_valid, n_measured, decision, weighing, spec, beyond)
    return Findings(spec, tokens, n_valid, n_measured, decision, weighing, weights, beyond, facts)


def few_beyond(tokens: Tokens, weighing: Weighing | None, spec: Spec) -> Beyond | None:
    """Find the tokens beyond the bounds of a token weight; None where they are many or values may not be read.

    Where few tokens differ, the sums after the bounds are the sums before them, corrected at those tokens. Not in
    float64: a ratio of e^20 in a sum swallows the digits that its removal should leave, up to 1e-7.
    """
    weight = spec.weight
    if weighing is None or weight is None or not weight.per_token or tokens.largest is None:
        return None
    log_ratio = weighing.log_ratio
    if log_ratio.dtype == torch.float64 or not isinstance(tokens.sequences, Packed):
        return None
    low, high = correction.limits(log_ratio.dtype, log_bound(weight.lower), log_bound(weight.upper))
    nowhere = torch.zeros(0, dtype=torch.int64, device=log_ratio.device)
    above = nowhere if high is None else few_above(log_ratio, high)
    below = nowhere if low is None else few_above(-log_ratio, -low)
    if above is None or below is None:
        return None
    places = torch.cat([above, below])
    return Beyond(places, tokens.sequences.of(places), above.shape[0], below.shape[0])


def sequence_facts(
    tokens: Tokens,
    n_valid: Tensor,
    n_measured: Tensor,
    decision: Decision,
    weighing: Weighing | None,
    spec: Spec,
    beyond: Beyond | None,
) -> SequenceFacts:
    """Gather the facts of each sequence, and take the sums over sequences that no outcome needed."""
    sequences = tokens.sequences
    train = sequences.sum(tokens.train)
    weight = _weight_facts(tokens, n_measured, weighing, spec, beyond)
    if tokens.largest is not None and tokens.largest <= LARGEST_D:
        rollout = train - tokens.sum_d
    else:
        rollout = sequences.sum(tokens.rollout)
    return SequenceFacts(
        criteria=[_criterion_facts(outcome, tokens, n_valid, n_measured) for outcome in decision.outcomes],
        tokens=n_valid,
        measured=n_measured,
        nonfinite=torch.zeros_like(n_valid) if tokens.nonfinite is None else tokens.nonfinite,
        kept=tokens_kept(tokens, n_valid, decision),
        keep=decision.keep,
        train=train,
        rollout=rollout,
        d=tokens.sum_d,
        **weight,
    )


def _weight_facts(
    tokens: Tokens, n_measured: Tensor, weighing: Weighing | None, spec: Spec, beyond: Beyond | None
) -> Named:
    """The weight of each sequence; at token level the means over its measured tokens."""
    if weighing is None or spec.weight is None:
        nothing = torch.zeros(0, dtype=torch.float64, device=tokens.d.device)
        return dict.fromkeys(("raw", "bounded", "ratio", "weight", "log_weight"), nothing)
    raw, bounded, ratio = weighing.raw, weighing.bounded, weighing.ratio
    if ratio is not None:
        weight, log_weight = weighing.weight, weighing.log_ratio
        return {"raw": raw, "bounded": bounded, "ratio": ratio, "weight": weight, "log_weight": log_weight}
    total = total_bounded = tokens.sequences.sum(select(tokens.measured, raw))
    if spec.weight.bounded:
        if beyond is None:
            total_bounded = tokens.sequences.sum(select(tokens.measured, bounded))
        else:
            # Elsewhere the bounds change nothing.
            after, before = (x.index_select(0, beyond.places).double() for x in (bounded, raw))
            total_bounded = total.index_add(0, beyond.sequences, after - before)
    n = n_measured.clamp(min=1)
    raw, bounded = total / n, total_bounded / n
    return {"raw": raw, "bounded": bounded, "ratio": 1.0 + raw, "weight": 1.0 + bounded, "log_weight": raw.log1p()}


def _criterion_facts(outcome: Outcome, tokens: Tokens, n_valid: Tensor, n_measured: Tensor) -> CriterionFacts:
    among, value = outcome.among, outcome.value
    if outcome.criterion.over == "token":
        value = torch.zeros(0, dtype=torch.float64, device=tokens.d.device)
        units = n_measured if among is None or among is tokens.measured else tokens.count(among)
    else:
        assert among is not None
        units = among
    return CriterionFacts(value, units, tokens_lost(outcome, tokens, n_valid))


def tokens_lost(outcome: Outcome, tokens: Tokens, n_valid: Tensor) -> Tensor:
    """[S] int64: valid tokens that one criterion rejected."""
    if outcome.failed is not None:
        return torch.where(outcome.failed, n_valid, 0)
    if outcome.thinned is not None and outcome.selected is not None:
        return torch.where(outcome.thinned, tokens.count(outcome.selected), 0)
    return torch.zeros_like(n_valid) if outcome.dropped is None else tokens.count(outcome.dropped)


def tokens_kept(tokens: Tokens, n_valid: Tensor, decision: Decision) -> Tensor:
    """[S] int64: valid tokens that are not rejected.

    The counts must not depend on an outcome (see correction.survivors). So where failed sequences lose some of
    their tokens, tokens are counted for every combination of failures, and the outcomes choose among the counts.
    """
    if decision.dropped is None:
        return torch.where(decision.keep, n_valid, 0)
    left = [torch.ones_like(tokens.d, dtype=torch.bool) if tokens.valid is None else tokens.valid]
    choice = torch.zeros_like(n_valid)
    for outcome in decision.outcomes:
        if outcome.thinned is not None and outcome.selected is not None:
            choice = choice + outcome.thinned * len(left)
            left += [which & ~outcome.selected for which in left]
        elif outcome.dropped is not None:
            left = [which & ~outcome.dropped for which in left]
    counts = torch.stack([tokens.count(which) for which in left])
    return torch.where(decision.keep, counts.gather(0, choice[None])[0], 0)


def concatenate(parts: list[SequenceFacts]) -> SequenceFacts:
    """Join the facts of consecutive blocks."""
    if len(parts) == 1:
        return parts[0]

    def joined(items: Iterable[object], fields: Iterable[str]) -> list[Tensor]:
        rows = [vars(item) for item in items]
        return [torch.cat([row[name] for row in rows]) for name in fields]

    criteria = [
        CriterionFacts(*joined([part.criteria[i] for part in parts], CriterionFacts.__dataclass_fields__))
        for i in range(len(parts[0].criteria))
    ]
    plain = [name for name in SequenceFacts.__dataclass_fields__ if name != "criteria"]
    return SequenceFacts(criteria, *joined(parts, plain))


def above(log_ratio: Tensor, bound: float | None) -> Tensor:
    """Bool per unit: beyond an upper bound; nowhere where it is open. NaN is beyond any bound."""
    return _nowhere(log_ratio) if bound is None else ~correction.within(log_ratio, None, bound)


def below(log_ratio: Tensor, bound: float | None) -> Tensor:
    """Bool per unit: beyond a lower bound; nowhere where it is open. NaN is beyond any bound."""
    return _nowhere(log_ratio) if bound is None else ~correction.within(log_ratio, bound, None)


def outside(log_ratio: Tensor, lower: float | None, upper: float | None) -> tuple[Tensor, Tensor]:
    """Bool per unit: beyond the upper bound, and beyond the lower one."""
    return above(log_ratio, upper), below(log_ratio, lower)


def _nowhere(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device=x.device).expand(x.shape)

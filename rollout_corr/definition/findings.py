"""The definition of a correction from end to end, and the facts per sequence that its statistics are made from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_corr.definition import correction
from rollout_corr.definition.bounds import Bound, after_bounds, within
from rollout_corr.definition.correction import Decision, Outcome, Weighing
from rollout_corr.definition.near import Near
from rollout_corr.definition.sequences import Sequences
from rollout_corr.definition.tokens import LARGEST_D, KeptMass, Number, Tokens, read_tokens, rounded, select
from rollout_corr.definition.when import Advantages
from rollout_corr.spec.correction import Spec, Weight
from rollout_corr.spec.thresholds import log_bound

Named = dict[str, Tensor]
Numbers = dict[str, Number]


class FewBounded:
    """Sums of a token weight where all but a few tokens are near 1 and within the bounds, which change those few alone.

    Args:
        near: The sums before the bounds.
        weight: At token level, without a token clamp.

    Attributes:
        few: [k] float64, ratio - 1 of the few after the bounds.
    """

    def __init__(self, near: Near, weight: Weight) -> None:
        self._near, self._weight = near, weight
        self.few = after_bounds(weight, near.few_excess, near.few, 1.0)

    def squares(self) -> float:
        """The sum of (ratio - 1)^2 after the bounds."""
        return self._near.near_excess2 + self.few.dot(self.few).item()

    def count(self, low: float | None, high: float | None) -> int:
        """Tokens beyond a bound."""
        beyond = [] if low is None else [self._near.few < low]
        beyond += [] if high is None else [self._near.few > high]
        return sum(int(torch.count_nonzero(which)) for which in beyond) if self.few.shape[0] else 0

    def extrema(self, raw: tuple[float, float]) -> tuple[float, float]:
        """(-minimum, maximum) of ratio - 1 after the bounds, from those before them."""
        low, high = -raw[0], raw[1]
        weight = self._weight
        if weight.outside == "clamp" or not self.count(log_bound(weight.lower), log_bound(weight.upper)):
            least = -math.inf if weight.lower is None else weight.lower - 1.0
            most = math.inf if weight.upper is None else weight.upper - 1.0
            return rounded((-min(max(low, least), most), min(max(high, least), most)), self._near.d.dtype)
        # Zero is the least of all; the largest is among those within the bounds.
        others = self._near.d.index_fill(0, self._near.places, -torch.inf).amax().item()
        return rounded((1.0, max(math.expm1(others), self.few.amax().item())), self._near.d.dtype)


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
    few: FewBounded | None  # of a token weight
    facts: SequenceFacts


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
    few = few_bounded(tokens, spec)
    facts = sequence_facts(tokens, n_valid, n_measured, decision, weighing, spec, few)
    return Findings(spec, tokens, n_valid, n_measured, decision, weighing, weights, few, facts)


def few_bounded(tokens: Tokens, spec: Spec) -> FewBounded | None:
    """Sums of a token weight from those of D; None where too many tokens are far, or where nobody looked."""
    weight = spec.weight
    if weight is None or weight.level != "token" or weight.token_clamp is not None or tokens.near is None:
        return None
    return FewBounded(tokens.near, weight)


def sequence_facts(
    tokens: Tokens,
    n_valid: Tensor,
    n_measured: Tensor,
    decision: Decision,
    weighing: Weighing | None,
    spec: Spec,
    few: FewBounded | None,
) -> SequenceFacts:
    """Gather the facts of each sequence, and take the sums over sequences that no outcome needed."""
    sequences = tokens.sequences
    train = sequences.sum(tokens.train)
    weight = _weight_facts(tokens, n_measured, weighing, spec, few)
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
    tokens: Tokens, n_measured: Tensor, weighing: Weighing | None, spec: Spec, few: FewBounded | None
) -> Named:
    """The weight of each sequence; at token level the means over its measured tokens."""
    if weighing is None or spec.weight is None:
        nothing = torch.zeros(0, dtype=torch.float64, device=tokens.d.device)
        return dict.fromkeys(("raw", "bounded", "ratio", "weight", "log_weight"), nothing)
    ratio = weighing.ratio
    if ratio is not None and not spec.weight.per_token:
        raw, bounded, log_weight = weighing.raw, weighing.bounded, weighing.log_ratio
        return {"raw": raw, "bounded": bounded, "ratio": ratio, "weight": weighing.weight, "log_weight": log_weight}
    if spec.weight.level == "token" and spec.weight.token_clamp is None:
        total = tokens.excess_of_sequences
    else:
        total = tokens.sequences.sum(select(tokens.measured, weighing.raw))
    total_bounded = total
    if few is not None:
        total_bounded = tokens.of_sequences(few.few)
    elif spec.weight.bounded:
        total_bounded = tokens.sequences.sum(select(tokens.measured, weighing.bounded))
    n = n_measured.clamp(min=1)
    raw = total / n
    bounded = raw if total_bounded is total else total_bounded / n
    return {"raw": raw, "bounded": bounded, "ratio": 1.0 + raw, "weight": 1.0 + bounded, "log_weight": raw.log1p()}


def _criterion_facts(outcome: Outcome, tokens: Tokens, n_valid: Tensor, n_measured: Tensor) -> CriterionFacts:
    among, value = outcome.among, outcome.value
    if outcome.criterion.per_token:
        value = torch.zeros(0, dtype=torch.float64, device=tokens.d.device)
        units = n_measured if among is None or among is tokens.measured else tokens.count(among)
    else:
        assert among is not None
        units = among
    return CriterionFacts(value, units, tokens_lost(outcome, tokens, n_valid))


def tokens_lost(outcome: Outcome, tokens: Tokens, n_valid: Tensor) -> Tensor:
    """[S] int64: valid tokens that one criterion rejected."""
    if outcome.failed is not None:
        return outcome.failed * n_valid
    if outcome.thinned is not None and outcome.selected is not None:
        return torch.where(outcome.thinned, tokens.count(outcome.selected), 0)
    return torch.zeros_like(n_valid) if outcome.dropped is None else tokens.count(outcome.dropped)


def tokens_kept(tokens: Tokens, n_valid: Tensor, decision: Decision) -> Tensor:
    """[S] int64: valid tokens that are not rejected.

    The counts must not depend on an outcome (see correction.survivors). So where failed sequences lose some of
    their tokens, tokens are counted for every combination of failures, and the outcomes choose among the counts.
    """
    if decision.dropped is None:
        return decision.keep * n_valid if decision.rejects else n_valid
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


def above(log_ratio: Tensor, bound: Bound) -> Tensor:
    """Bool per unit: beyond an upper bound; nowhere where it is open. NaN is beyond any bound."""
    return _nowhere(log_ratio) if bound is None else ~within(log_ratio, None, bound)


def below(log_ratio: Tensor, bound: Bound) -> Tensor:
    """Bool per unit: beyond a lower bound; nowhere where it is open. NaN is beyond any bound."""
    return _nowhere(log_ratio) if bound is None else ~within(log_ratio, bound, None)


def outside(log_ratio: Tensor, lower: float | None, upper: float | None) -> tuple[Tensor, Tensor]:
    """Bool per unit: beyond the upper bound, and beyond the lower one."""
    return above(log_ratio, upper), below(log_ratio, lower)


def _nowhere(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device=x.device).expand(x.shape)

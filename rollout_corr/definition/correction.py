"""The definition of a correction, in plain torch. Read this first, beside tokens.py; docs/math.md derives the formulas.

In order:

1. Validity, D = train - rollout, non-finite D: `read_tokens` in tokens.py. Where sampling was truncated, `KeptMass`
   brings both log-probs to the kept set first.
2. Token criteria: `statistic` of every token, `decide_tokens`.
3. Sequence criteria: `value_of` aggregates the statistic, `decide_sequences`. With sums_over="kept", over the tokens
   that pass the token criteria. `decide` runs all criteria; their order within 2 and within 3 has no effect.
4. The weight: token clamp, aggregation, clamp to +-Spec.clamp, exp, bounds: `weigh`.
5. What is handed back: `weights_of` zeroes, `kept_tokens` masks. Division by the batch's mean weight comes between,
   where all blocks and ranks are known (backends/run.py).

All of it runs in the dtype of the log-probs promoted to at least float32, so float64 log-probs make it an exact oracle.
Per-sequence quantities are float64. Nothing is multiplied by a mask: what does not count is replaced (`where`),
so that NaN behind a mask stays there.

Shapes: a tensor "per token" is [N] (packed) or [B, T] (padded); S is the number of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_corr.definition import prefix
from rollout_corr.definition.bounds import after_bounds, grown, within
from rollout_corr.definition.tokens import (
    LARGEST_D,
    Tokens,
    k3,
    select,
    sum_of_d,
    sum_of_statistic,
)
from rollout_corr.definition.values import CriterionValues
from rollout_corr.definition.when import Advantages, selected_sequences, selected_tokens
from rollout_corr.spec.correction import Criterion, Spec, Weight
from rollout_corr.spec.thresholds import threshold_of

# A batch whose mean weight is not above this is not normalised: the division would inflate the remaining weights.
SMALLEST_MEAN = 1e-8


# --- one token ---


def statistic(criterion: Criterion, tokens: Tokens, external: Mapping[str, Tensor]) -> Tensor:
    """Per token, the value of a criterion's `stat`; a ratio as its logarithm D, because it aggregates in log space."""
    return criterion.statistic.formula(CriterionValues(criterion, tokens, external))


# --- one sequence ---


def total_of_d(token_clamp: float | None, tokens: Tokens, among: Tensor | None) -> Tensor:
    """[S] float64: the sum of D, after the token clamp, over the tokens `among` (bool per token; None: all)."""
    if token_clamp is None and among is tokens.measured:
        return tokens.sum_d
    d = tokens.d if token_clamp is None else tokens.d.clamp(-token_clamp, token_clamp)
    d = select(among, d)
    return sum_of_d(d.clamp(-LARGEST_D, LARGEST_D), tokens.sequences, tokens.propagate, d)


def value_of(
    criterion: Criterion, tokens: Tokens, among: Tensor | None, n: Tensor, external: Mapping[str, Tensor]
) -> Tensor:
    """[S] float64: a criterion's value of each sequence, a ratio as its logarithm; 0 where no token counts.

    Args:
        criterion: One with over="sequence".
        tokens: The tokens.
        among: Bool per token, which of them count; None: all.
        n: [S] int64, how many count.
        external: The caller's tensors by name.
    """
    row, sequences = criterion.statistic, tokens.sequences
    if criterion.reduce in ("sum", "mean"):
        if row.log_space:
            total = total_of_d(criterion.token_clamp, tokens, among)
        else:
            x = select(among, statistic(criterion, tokens, external))
            # A NaN that the caller gave as an external statistic has to fail its sequence, not to vanish.
            propagate = tokens.propagate or row.source == "caller"
            if row.one_limb:
                total = sum_of_d(x.clamp(-LARGEST_D, LARGEST_D), sequences, propagate, x)
            else:
                total = sum_of_statistic(x, sequences, propagate)
        total = torch.where(n > 0, total, 0.0)
        return total if criterion.reduce == "sum" else total / n.clamp(min=1)
    return extremum(statistic(criterion, tokens, external), criterion.reduce == "max", tokens, among, n)


def extremum(x: Tensor, largest: bool, tokens: Tokens, among: Tensor | None, n: Tensor) -> Tensor:
    """[S] float64: the largest or smallest x of the tokens `among`, of which a sequence has n; 0 where n = 0."""
    sign = 1.0 if largest else -1.0
    signed = sign * x
    found = tokens.sequences.max(signed if among is None else torch.where(among, signed, -torch.inf))
    return torch.where(n > 0, sign * found.double(), 0.0)


# --- bounds ---


def passes(criterion: Criterion, x: Tensor, clamp: float, growth: Tensor | None = None) -> Tensor:
    """Test values of the quantity that the criterion's threshold compares (see thresholds.py), grown or as it is."""
    threshold = threshold_of(criterion)
    if threshold.on in ("abs_d", "clamped_abs_d"):
        x = x.abs()
    if threshold.on in ("clamped_d", "clamped_abs_d"):
        x = x.clamp(-clamp, clamp)
    passed = within(x, *grown(threshold.lower, threshold.upper, growth))
    if threshold.hole is not None:
        passed = passed & (within(x, None, threshold.hole[0]) | within(x, threshold.hole[1], None))
    return passed


# --- decisions ---


@dataclass
class Outcome:
    """The outcome of one criterion: `dropped` where it rejects single tokens, else `failed` for whole sequences."""

    criterion: Criterion
    value: Tensor  # the statistic per unit, [S] for sequences; a ratio as its logarithm
    among: Tensor | None  # bool per unit: measured; None: all
    dropped: Tensor | None  # bool per token
    failed: Tensor | None  # [S] bool
    thinned: Tensor | None = None  # [S] bool: failed sequences of which only the `selected` tokens are dropped
    selected: Tensor | None = None  # bool per token


@dataclass
class Decision:
    """The outcome of all criteria together."""

    keep: Tensor  # [S] bool
    dropped: Tensor | None  # bool per token: dropped one by one, beyond whole sequences
    survivors: Tensor | None  # tokens that sequence sums run over where n > 0; None means all
    n: Tensor  # [S] int64, how many those are; 0 where a token criterion took the whole sequence
    outcomes: list[Outcome] = field(default_factory=list)
    rejects: bool = False  # a sequence may have been rejected

    def add(self, outcome: Outcome) -> None:
        """Let a further criterion reject."""
        if outcome.failed is not None:
            self.keep, self.rejects = self.keep & ~outcome.failed, True
        if outcome.dropped is not None:
            self.dropped = outcome.dropped if self.dropped is None else self.dropped | outcome.dropped
        self.outcomes.append(outcome)


def decide(
    tokens: Tokens,
    n_measured: Tensor,
    spec: Spec,
    advantages: Advantages | None,
    external: Mapping[str, Tensor],
    others: Mapping[str, Tokens] | None = None,
) -> Decision:
    """Run every criterion, those of tokens first, because with sums_over="kept" the others run over survivors.

    Args:
        tokens: train and rollout.
        n_measured: [S] int64, how many of them are measured.
        spec: The Spec.
        advantages: For criteria with `when`.
        external: For criteria with stat="external".
        others: The tokens under other pairs of policies, by `Criterion.of`.
    """
    others = others or {}
    every = [tokens, *others.values()]
    keep = torch.ones(tokens.sequences.count, dtype=torch.bool, device=tokens.d.device)
    decision = Decision(keep, None, tokens.measured, n_measured)
    for criterion in spec.criteria:
        if criterion.over == "token":
            pair = others.get(criterion.of, tokens)
            decision.add(decide_tokens(criterion, pair, pair.measured, spec, advantages, external))
    standing = dropped = None
    if spec.sums_over == "kept" and decision.outcomes:
        standing, dropped = decision.keep, decision.dropped
        decision.survivors, decision.n = survivors(tokens, dropped, standing)
    for criterion in spec.criteria:
        if criterion.over != "token":
            among, n = decision.survivors, decision.n
            pair = others.get(criterion.of, tokens)
            if pair is not tokens:
                among, n = survivors(pair, dropped, standing)
            if criterion.over == "prefix":
                decision.add(decide_tokens(criterion, pair, among, spec, advantages, external))
            else:
                decision.add(decide_sequences(criterion, pair, among, n, spec, advantages, external))
    if spec.rejects_nonfinite:
        for pair in every:
            if pair.nonfinite is not None:
                decision.keep, decision.rejects = decision.keep & (pair.nonfinite == 0), True
    return decision


def survivors(tokens: Tokens, dropped: Tensor | None, standing: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """The measured tokens that sequence sums run over, and how many each sequence has; 0 where `standing` is False.

    A rejected sequence is taken out of the counts and not out of the tokens: what is summed must not depend on a
    decision, so that ranks which hold parts of sequences can sum before they decide (backends/split.py).
    """
    among = tokens.measured
    if dropped is not None:
        among = ~dropped if among is None else among & ~dropped
    n = tokens.count(torch.ones_like(tokens.d, dtype=torch.bool) if among is None else among)
    return among, n if standing is None else torch.where(standing, n, 0)


def decide_tokens(
    criterion: Criterion,
    tokens: Tokens,
    among: Tensor | None,
    spec: Spec,
    advantages: Advantages | None,
    external: Mapping[str, Tensor],
) -> Outcome:
    """Test every token of `among` that `when` selects, alone or with those of `among` before it."""
    value = tested = statistic(criterion, tokens, external)
    on, growth = threshold_of(criterion).on, None
    if on != "value":
        d = CriterionValues(criterion, tokens, external).d
        tested = d.abs() if on in ("abs_d", "clamped_abs_d") else d
    if criterion.over == "prefix":
        compared = tested
        value = prefix.value_of(criterion, value, tokens, among)
        tested = value if on == "value" else prefix.value_of(criterion, compared, tokens, among)
        growth = prefix.growth(criterion.growth, tokens, among)
    fails = ~passes(criterion, tested, spec.clamp, growth)
    if among is not None:
        fails = fails & among
    if criterion.when != "any" and advantages is not None:
        fails = fails & selected_tokens(criterion.when, tokens, advantages.token)
    if criterion.drop == "sequence":
        return Outcome(criterion, value, among, None, tokens.count(fails) > 0)
    if criterion.drop == "rest":
        fails = prefix.rest(fails, tokens)
    return Outcome(criterion, value, among, fails, None)


def decide_sequences(
    criterion: Criterion,
    tokens: Tokens,
    among: Tensor | None,
    n: Tensor,
    spec: Spec,
    advantages: Advantages | None,
    external: Mapping[str, Tensor],
) -> Outcome:
    """Test every sequence that has a token to sum over (`n` of `among`) and that `when` selects."""
    sequences = tokens.sequences
    value = tested = value_of(criterion, tokens, among, n, external)
    on = threshold_of(criterion).on
    if on != "value" and not criterion.statistic.log_space:
        # The statistic grows with D or |D|, so the extremum of that decides.
        d = CriterionValues(criterion, tokens, external).d
        tested = extremum(
            d.abs() if on in ("abs_d", "clamped_abs_d") else d, criterion.reduce == "max", tokens, among, n
        )
    failed = ~passes(criterion, tested, spec.clamp) & (n > 0)
    if criterion.thins_sequences:
        selected = torch.ones_like(tokens.d, dtype=torch.bool) if tokens.measured is None else tokens.measured
        if criterion.when != "any" and advantages is not None:
            selected = selected_tokens(criterion.when, tokens, advantages.token)
        return Outcome(criterion, value, n > 0, sequences.spread(failed) & selected, None, failed, selected)
    if criterion.when != "any" and advantages is not None:
        failed = failed & selected_sequences(criterion.when, tokens, advantages)
    return Outcome(criterion, value, n > 0, None, failed)


# --- weights ---


class Weighing:
    """An importance weight: per token at token level, per prefix in float64, per sequence (float64) otherwise.

    Args:
        weight: Level and bounds.
        log_ratio: Clamped to +-Spec.clamp.
        excess: Gives ratio - 1 before the bounds, without cancellation: statistics may not need it of every token.
        growth: By what the log of the bounds grows, per token; None: nothing.
    """

    def __init__(
        self, weight: Weight, log_ratio: Tensor, excess: Callable[[], Tensor], growth: Tensor | None = None
    ) -> None:
        self._weight, self._excess = weight, excess
        self.log_ratio = log_ratio
        self.growth = growth
        ratio = log_ratio.exp()
        self.weight = after_bounds(weight, ratio, log_ratio, 0.0, growth)
        # Before the bounds; at token level nothing reads it.
        self.ratio = None if weight.level == "token" else ratio
        self._known: dict[str, Tensor] = {}

    @property
    def raw(self) -> Tensor:
        """Ratio - 1 before the bounds."""
        if "raw" not in self._known:
            self._known["raw"] = self._excess()
        return self._known["raw"]

    @property
    def bounded(self) -> Tensor:
        """Ratio - 1 after the bounds."""
        if "bounded" not in self._known:
            self._known["bounded"] = after_bounds(self._weight, self.raw, self.log_ratio, 1.0, self.growth)
        return self._known["bounded"]


def weigh(tokens: Tokens, decision: Decision, spec: Spec) -> Weighing | None:
    """The weight before batch normalisation and before anything is zeroed; None without `Spec.weight`."""
    weight = spec.weight
    if weight is None:
        return None
    if weight.level == "prefix":
        log_ratio = prefix.log_of_weight(weight, tokens, decision.survivors).clamp(-spec.clamp, spec.clamp)
        return Weighing(weight, log_ratio, log_ratio.expm1, prefix.growth(weight.growth, tokens, decision.survivors))
    if weight.level == "token":
        log_ratio = tokens.clamped(weight.token_clamp)
        if weight.token_clamp is None:
            return Weighing(weight, log_ratio, lambda: tokens.excess)
        return Weighing(weight, log_ratio, lambda: log_ratio + k3(log_ratio))
    total = total_of_d(weight.token_clamp, tokens, decision.survivors)
    aggregate = torch.where(decision.n > 0, total, 0.0)
    if weight.level == "geometric":
        aggregate = aggregate / decision.n.clamp(min=1)
    log_ratio = aggregate.clamp(-spec.clamp, spec.clamp)
    return Weighing(weight, log_ratio, log_ratio.expm1)


# --- what is handed back ---


def weights_of(tokens: Tokens, decision: Decision, weighing: Weighing | None, spec: Spec) -> Tensor | None:
    """The weights handed back, per token, before batch normalisation; None when the Spec hands none back."""
    if not spec.returns_weights:
        return None
    if weighing is None:
        weights = torch.ones_like(tokens.d)
    elif spec.weighs_tokens:
        weights = weighing.weight.to(tokens.d.dtype)
    else:
        weights = tokens.sequences.spread(weighing.weight.to(tokens.d.dtype)).expand(tokens.d.shape)
    weights = select(tokens.measured, weights)
    # A sequence that a non-finite token rejects has no weight, whatever `rejected` says.
    finite = None if tokens.nonfinite is None or spec.nonfinite != "reject" else tokens.nonfinite == 0
    standing = decision.keep if spec.rejected != "mask" else finite
    if standing is not None:
        weights = select(tokens.sequences.spread(standing), weights)
    if spec.rejected != "mask" and decision.dropped is not None:
        weights = select(~decision.dropped, weights)
    return weights


def kept_tokens(tokens: Tokens, decision: Decision) -> Tensor:
    """Bool per token: valid and not rejected."""
    kept = tokens.sequences.spread(decision.keep).expand(tokens.d.shape)
    if tokens.valid is not None:
        kept = kept & tokens.valid
    return kept if decision.dropped is None else kept & ~decision.dropped

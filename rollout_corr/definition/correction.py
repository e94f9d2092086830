"""The definition of a correction, in plain torch. Read this first, then tokens.py; docs/math.md derives the formulas.

In order:

1. Validity, D = train - rollout, non-finite D: `read_tokens` in tokens.py. Where sampling was truncated, `KeptMass`
   brings both log-probs to the kept set first.
2. Token criteria: `statistic` of every token, `decide_tokens`.
3. Turn and sequence criteria: `value_of` aggregates the statistic, `decide_units`. With sums_over="kept", over the
   tokens that pass the token criteria. `decide` runs all criteria; their order within 2 and within 3 has no effect.
4. The weight: token clamp, aggregation, clamp to +-Spec.clamp, exp, bounds: `weigh` in weights.py.
5. What is handed back: `weights_of` zeroes, `kept_tokens` masks. Division by the batch's mean weight comes between,
   where all blocks and ranks are known (backends/run.py).

All of it runs in the dtype of the log-probs promoted to at least float32, so float64 log-probs make it an exact oracle.
Per-sequence quantities are float64. Nothing is multiplied by a mask: what does not count is replaced (`where`),
so that NaN behind a mask stays there. No value is read on the host: the definition runs on every device without a wait,
and a compiler can follow it. What a backend has read comes in as data.

Shapes: a tensor "per token" is [N] (packed) or [B, T] (padded); S is the number of sequences, U the number of turns. A
*unit* of a weight or criterion that is not over tokens is a turn or a sequence, whose sums are [U] or [S].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..specs.bounds_of_batch import by_group
from ..specs.correction import Spec
from ..specs.criterion import AGE, Criterion, threshold_of
from .bounds import BoundsOfBatch, beyond, grown, within
from .sequences import Sequences
from .tokens import LARGEST_D, Tokens, binary_kl, k3, probability, select, sum_of_d, sum_of_statistic

# --- one token ---


class CriterionValues:
    """The quantities that formulas in specs/statistics.py read (`TokenValues` there), for one criterion."""

    def __init__(self, criterion: Criterion, tokens: Tokens, external: Mapping[str, Tensor]) -> None:
        self._criterion = criterion
        self._tokens = tokens
        self._external = external

    @property
    def d(self) -> Tensor:
        """D after the criterion's token clamp."""
        limit, d = self._criterion.token_clamp, self._tokens.d
        return d if limit is None else d.clamp(-limit, limit)

    @property
    def clamped_d(self) -> Tensor:
        """`d` within +-Spec.clamp."""
        return self._tokens.clamped(self._criterion.token_clamp)

    @property
    def p(self) -> Tensor:
        """exp(rollout_logp)."""
        return probability(self._tokens.rollout)

    @property
    def q(self) -> Tensor:
        """exp(train_logp)."""
        return probability(self._tokens.train)

    @property
    def binary_kl(self) -> Tensor:
        """KL(rollout || train) of {this token, any other}."""
        tokens = self._tokens
        return select(tokens.measured, binary_kl(tokens.rollout, tokens.train, tokens.d, self._criterion.eps))

    @property
    def binary_kl_reverse(self) -> Tensor:
        """KL(train || rollout) of {this token, any other}."""
        tokens = self._tokens
        return select(tokens.measured, binary_kl(tokens.train, tokens.rollout, -tokens.d, self._criterion.eps))

    @property
    def external(self) -> Tensor:
        """The caller's tensor, entropies or ages."""
        given = self._external[self._criterion.tensor_name or AGE]
        return select(self._tokens.measured, given.to(self._tokens.d.dtype))

    @property
    def entropy(self) -> Tensor:
        """`external`, NaN where it is not finite."""
        given = self.external
        return torch.where(given.isfinite(), given, torch.nan)

    def k3(self, x: Tensor) -> Tensor:
        """e^x - 1 - x."""
        # Not tokens.k3: what decides must not depend on how large D is elsewhere in the block.
        return k3(x)


def statistic(criterion: Criterion, tokens: Tokens, external: Mapping[str, Tensor]) -> Tensor:
    """Per token, the value of a criterion's `stat`; a ratio as its logarithm D, because it aggregates in log space."""
    return criterion.statistic.formula(CriterionValues(criterion, tokens, external))


# --- one turn or sequence ---


def total_of_d(token_clamp: float | None, tokens: Tokens, among: Tensor | None, over: str) -> Tensor:
    """Per unit, float64: the sum of D, after the token clamp, over the tokens `among` (bool per token; None: all)."""
    if token_clamp is None and among is tokens.measured:
        return tokens.sum_d_over(over)
    d = tokens.d if token_clamp is None else tokens.d.clamp(-token_clamp, token_clamp)
    d = select(among, d)
    return sum_of_d(d.clamp(-LARGEST_D, LARGEST_D), tokens.units(over), tokens.propagate, d)


def value_of(
    criterion: Criterion, tokens: Tokens, among: Tensor | None, n: Tensor, external: Mapping[str, Tensor]
) -> Tensor:
    """Per unit, float64: a criterion's value, a ratio as its logarithm; 0 where no token counts.

    It is over the tokens in `among`, or all; `n` is how many count in each unit.
    """
    row, units = criterion.statistic, tokens.units(criterion.over)
    if criterion.reduce in ("sum", "mean"):
        if row.log_space:
            total = total_of_d(criterion.token_clamp, tokens, among, criterion.over)
        else:
            x = select(among, statistic(criterion, tokens, external))
            # A NaN that the caller gave as a statistic has to fail its unit, not to vanish.
            propagate = tokens.propagate or row.may_be_nan()
            if row.one_limb:
                total = sum_of_d(x.clamp(-LARGEST_D, LARGEST_D), units, propagate, x)
            else:
                total = sum_of_statistic(x, units, propagate)
        total = torch.where(n > 0, total, 0.0)
        return total if criterion.reduce == "sum" else total / n.clamp(min=1)
    return extremum(statistic(criterion, tokens, external), criterion.reduce == "max", units, among, n)


def extremum(x: Tensor, largest: bool, units: Sequences, among: Tensor | None, n: Tensor) -> Tensor:
    """Per unit, float64: the largest or smallest x of its n tokens `among`; 0 where n = 0."""
    sign = 1.0 if largest else -1.0
    signed = sign * x
    found = units.max(signed if among is None else torch.where(among, signed, -torch.inf))
    return torch.where(n > 0, sign * found.double(), 0.0)


# --- `Criterion.when`: the signs of advantages ---


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


# --- bounds ---


def passes(criterion: Criterion, x: Tensor, clamp: float, growth: Tensor | None = None) -> Tensor:
    """Test values of the quantity that the criterion's threshold compares (see `threshold_of`), grown or as it is."""
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


@dataclass(eq=False, repr=False)
class Outcome:
    """The outcome of one criterion: `dropped` where it rejects single tokens, else `failed` for whole units."""

    criterion: Criterion
    value: Tensor  # the statistic per unit; a ratio as its logarithm
    among: Tensor | None  # bool per unit: measured; None: all
    dropped: Tensor | None  # bool per token
    failed: Tensor | None  # [S] bool
    thinned: Tensor | None = None  # bool per unit: failed ones that lose only their `selected` tokens
    selected: Tensor | None = None  # bool per token
    failed_turns: Tensor | None = None  # [U] bool: turns that are dropped whole

    @property
    def counted(self) -> Tensor | None:
        """Bool per unit: the units of `among` whose value statistics take; of a caller's values, the finite ones."""
        if not self.criterion.statistic.may_be_nan():
            return self.among
        finite = self.value.isfinite()
        return finite if self.among is None else self.among & finite


@dataclass(eq=False, repr=False)
class Decision:
    """The outcome of all criteria together."""

    keep: Tensor  # [S] bool
    dropped: Tensor | None  # bool per token: dropped one by one, beyond whole sequences
    survivors: Tensor | None  # tokens that sequence sums run over where n > 0; None means all
    standing: Tensor | None  # [S] bool: False where all of them count for nothing; None means nowhere
    n: Tensor  # [S] int64, how many those are; 0 where a token criterion took the whole sequence
    n_measured: Tensor  # [S] int64, the measured tokens
    n_turns: Tensor | None = None  # [U] int64, `n` of each turn; None without turns
    n_measured_turns: Tensor | None = None  # likewise
    keep_turns: Tensor | None = None  # [U] bool: not rejected by itself; None without turns
    outcomes: list[Outcome] = field(default_factory=list)
    rejects: bool = False  # a sequence may have been rejected

    def add(self, outcome: Outcome) -> None:
        """Reject what a further criterion rejects."""
        if outcome.failed is not None:
            self.keep, self.rejects = self.keep & ~outcome.failed, True
        if outcome.dropped is not None:
            self.dropped = outcome.dropped if self.dropped is None else self.dropped | outcome.dropped
        if outcome.failed_turns is not None and self.keep_turns is not None:
            self.keep_turns = self.keep_turns & ~outcome.failed_turns
        self.outcomes.append(outcome)


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

    def beyond(self, criterion: Criterion, tokens: Tokens, value: Tensor, chosen: Tensor | None) -> Tensor:
        """Bool: values beyond the bounds that the batch, or the group of each, decides by those that are chosen."""
        groups = self.groups if by_group(criterion.rules) else None
        if groups is not None and criterion.over == "turn" and tokens.turns is not None:
            groups = tokens.turns.of_sequences.spread(groups)
        elif groups is not None and criterion.per_token:
            groups = tokens.sequences.spread(groups).expand(value.shape)
        assert self.bounds is not None
        return beyond(value, self.bounds.of(criterion, value, chosen, groups))


def decide(given: Operands) -> Decision:
    """Run every criterion, those of tokens first, because with sums_over="kept" the others run over survivors."""
    tokens, spec, others, n_measured = given.tokens, given.spec, given.others, given.n_valid
    if tokens.nonfinite is not None and spec.nonfinite == "reject":
        n_measured = given.n_valid - tokens.nonfinite
    every = [tokens, *others.values()]
    keep = torch.ones(tokens.sequences.count, dtype=torch.bool, device=tokens.d.device)
    decision = Decision(keep, None, tokens.measured, None, n_measured, n_measured)
    if tokens.turns is not None:
        decision.n_turns = decision.n_measured_turns = tokens.turns.measured(spec.nonfinite == "reject")
        decision.keep_turns = torch.ones_like(decision.n_turns, dtype=torch.bool)
    for criterion in spec.criteria:
        if criterion.over == "token":
            pair = others.get(criterion.of, tokens)
            decision.add(decide_tokens(criterion, pair, pair.measured, given))
    standing = dropped = None
    if spec.sums_over == "kept" and decision.outcomes:
        standing, dropped = decision.keep, decision.dropped
        decision.standing = standing if decision.rejects else None
        decision.survivors, decision.n = survivors(tokens, dropped, standing)
        if tokens.turns is not None:
            decision.n_turns = survivors(tokens, dropped, standing, "turn")[1]
    for criterion in spec.criteria:
        if criterion.over != "token":
            among, n = decision.survivors, decision.n_turns if criterion.over == "turn" else decision.n
            pair = others.get(criterion.of, tokens)
            if pair is not tokens:
                among, n = survivors(pair, dropped, standing, criterion.over)
            if criterion.over == "prefix":
                decision.add(decide_tokens(criterion, pair, among, given, decision.standing))
                continue
            assert n is not None
            decision.add(decide_units(criterion, pair, among, n, given))
    if spec.rejects_nonfinite:
        for pair in every:
            if pair.nonfinite is not None:
                decision.keep, decision.rejects = decision.keep & (pair.nonfinite == 0), True
    return decision


def survivors(
    tokens: Tokens, dropped: Tensor | None, standing: Tensor | None, over: str = "sequence"
) -> tuple[Tensor | None, Tensor]:
    """The measured tokens that sums of units run over, and how many each has; 0 where `standing`, [S], is False.

    A rejected sequence is taken out of the counts and not out of the tokens: what is summed must not depend on a
    decision, so that ranks which hold parts of sequences can sum before they decide (backends/split.py).
    """
    among = tokens.measured
    if dropped is not None:
        among = ~dropped if among is None else among & ~dropped
    counted = torch.ones_like(tokens.d, dtype=torch.bool) if among is None else among
    n = tokens.units("turn").sum_integers(counted) if over == "turn" else tokens.count(counted)
    if over == "turn" and standing is not None and tokens.turns is not None:
        standing = tokens.turns.of_sequences.spread(standing)
    return among, n if standing is None else torch.where(standing, n, 0)


def decide_tokens(
    criterion: Criterion, tokens: Tokens, among: Tensor | None, given: Operands, standing: Tensor | None = None
) -> Outcome:
    """Test every token of `among` that `when` selects.

    A token is tested alone or, where `standing`, together with the tokens of `among` before it.
    """
    spec, advantages, external = given.spec, given.advantages, given.external
    value = tested = statistic(criterion, tokens, external)
    on, growth = threshold_of(criterion).on, None
    if on != "value":
        d = CriterionValues(criterion, tokens, external).d
        tested = d.abs() if on in ("abs_d", "clamped_abs_d") else d
    if criterion.over == "prefix":
        from . import prefix

        compared = tested
        value = prefix.value_of(criterion, value, tokens, among)
        tested = value if on == "value" else prefix.value_of(criterion, compared, tokens, among)
        growth = prefix.growth(criterion.growth, tokens, among, criterion.within)
        if standing is not None:
            # Only now, as in `survivors`: what runs along a sequence must not depend on a decision.
            stands = tokens.sequences.spread(standing).expand(tokens.d.shape)
            among = stands if among is None else among & stands
    chosen = among
    if criterion.when != "any" and advantages is not None:
        selected = selected_tokens(criterion.when, tokens, advantages.token)
        chosen = selected if among is None else among & selected
    fails = given.beyond(criterion, tokens, value, chosen) if criterion.rules else None
    if fails is None or criterion.low is not None or criterion.high is not None:
        failed = ~passes(criterion, tested, spec.clamp, growth)
        fails = failed if fails is None else fails | failed
    if chosen is not None:
        fails = fails & chosen
    if criterion.drop == "sequence":
        return Outcome(criterion, value, among, None, tokens.count(fails) > 0)
    if criterion.drop == "rest":
        from . import prefix

        fails = prefix.rest(fails, tokens, criterion.within)
    return Outcome(criterion, value, among, fails, None)


def decide_units(criterion: Criterion, tokens: Tokens, among: Tensor | None, n: Tensor, given: Operands) -> Outcome:
    """Test every turn or sequence that has a token to sum over (`n` of `among`) and that `when` selects."""
    spec, advantages, external = given.spec, given.advantages, given.external
    units = tokens.units(criterion.over)
    value = tested = value_of(criterion, tokens, among, n, external)
    on = threshold_of(criterion).on
    if on != "value" and not criterion.statistic.log_space:
        # The statistic grows with D or |D|, so the extremum of that decides.
        d = CriterionValues(criterion, tokens, external).d
        tested = extremum(
            d.abs() if on in ("abs_d", "clamped_abs_d") else d, criterion.reduce == "max", units, among, n
        )
    some = chosen = n > 0
    failed = ~passes(criterion, tested, spec.clamp)
    if criterion.thins:
        selected = torch.ones_like(tokens.d, dtype=torch.bool) if tokens.measured is None else tokens.measured
        if criterion.when != "any" and advantages is not None:
            selected = selected_tokens(criterion.when, tokens, advantages.token)
        if criterion.rules:
            holds = chosen & (units.sum_integers(selected) > 0)
            failed = failed | given.beyond(criterion, tokens, value, holds)
        failed = failed & chosen
        return Outcome(criterion, value, some, units.spread(failed) & selected, None, failed, selected)
    if criterion.when != "any" and advantages is not None:
        chosen = chosen & selected_units(criterion.when, criterion.over, tokens, advantages)
    if criterion.rules:
        failed = failed | given.beyond(criterion, tokens, value, chosen)
    failed = failed & chosen
    if criterion.over == "turn" and tokens.turns is not None:
        if criterion.drop == "unit":
            return Outcome(criterion, value, some, None, None, failed_turns=failed)
        failed = tokens.turns.any(failed)
    return Outcome(criterion, value, some, None, failed)

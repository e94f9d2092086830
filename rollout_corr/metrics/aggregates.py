"""The native statistics, a row each: what is taken on the device, from tokens and from sequences.

Sums of ratios lie around 1, all others around 0, so that variances do not cancel. To add one, add its row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rollout_corr.definition.bounds import grown
from rollout_corr.definition.findings import Findings, above, below
from rollout_corr.definition.tokens import (
    LARGEST_STATISTIC,
    Number,
    extrema,
    k3,
    probability,
    select,
    squares,
)
from rollout_corr.metrics import turns as of_turns
from rollout_corr.metrics.all_sequences import AllSequences
from rollout_corr.metrics.rows import Aggregate, At, Column, exp, extremes, of_column, total
from rollout_corr.spec.caches import cached
from rollout_corr.spec.correction import Criterion, Spec

# The log of a ratio of 2.
LOG_2 = 0.6931471805599453


def weighted(spec: Spec) -> bool:
    """Tell whether there is a weight."""
    return spec.weight is not None


def weighs_tokens(spec: Spec) -> bool:
    """Tell whether every token has a weight of its own."""
    return spec.weighs_tokens


def weighs_prefixes(spec: Spec) -> bool:
    """Tell whether a token's weight depends on those before it."""
    return spec.weighs_prefixes


def weighs_sequences(spec: Spec) -> bool:
    """Tell whether all tokens of a sequence have its weight."""
    return spec.weight is not None and not spec.weighs_tokens and spec.weight.over == "sequence"


def weighs_units(spec: Spec) -> bool:
    """Tell whether all tokens of a turn or a sequence have its weight."""
    return spec.weight is not None and not spec.weighs_tokens


def full(spec: Spec) -> bool:
    """Tell whether more is asked for than what costs next to nothing."""
    return spec.detail == "full"


def _tokens_clamped(f: Findings) -> Number:
    tokens = f.tokens
    return 0.0 if tokens.is_within(tokens.clamp) else torch.count_nonzero(tokens.clamped() - tokens.d)


def _token_squares(f: Findings, side: Literal["raw", "bounded"]) -> Number:
    """0-d: the sum over measured tokens of the square of a weight's ratio - 1, before or after the bounds."""
    weight = f.spec.weight
    assert weight is not None
    if weight.level == "token" and weight.token_clamp is None and (side == "raw" or not weight.bounded):
        return f.tokens.sum_excess2
    if side == "bounded" and f.few is not None:
        return f.few.squares()
    x = getattr(f.weighing, side)
    return (f.units_measured * x * x).sum() if weighs_units(f.spec) else squares(select(f.tokens.measured, x))


def _token_extrema(f: Findings, side: Literal["raw", "bounded"]) -> tuple[Number, Number]:
    """(-minimum, maximum) of a weight's ratio - 1, over measured tokens or over the units that have one."""
    if f.few is not None:
        ends = f.tokens.excess_ends
        return f.few.extrema(ends) if side == "bounded" else ends
    return extrema(getattr(f.weighing, side), f.units_measured > 0 if weighs_units(f.spec) else f.tokens.measured)


def _count_outside(f: Findings, side: Literal["above", "below"]) -> Number:
    """0-d: measured tokens whose raw weight lies "above" or "below" the bound."""
    weight, weighing = f.spec.weight, f.weighing
    assert weight is not None
    assert weighing is not None
    low, high = grown(weighing.bounds.low, weighing.bounds.high, weighing.growth)
    bound, beyond = (high, above) if side == "above" else (low, below)
    if not weight.per_token:
        return (f.units_measured * beyond(weighing.log_ratio, bound)).sum()
    if bound is None:
        return f.n_measured.new_zeros(()) if f.few is None else 0.0
    if f.few is not None:
        return f.few.count(*(None, high) if side == "above" else (low, None))
    which = beyond(weighing.log_ratio, bound)
    return torch.count_nonzero(which if f.tokens.measured is None else which & f.tokens.measured)


def _token_weights(at: At, when: Callable[[Spec], bool]) -> list[Aggregate]:
    """Rows of weights over tokens, taken where the weights are: of every token, or of its turn or sequence."""
    return [
        total("raw2", at, lambda f: _token_squares(f, "raw"), when),
        total("weight2", at, lambda f: _token_squares(f, "bounded"), when),
        total("tokens_above", at, lambda f: _count_outside(f, "above"), when),
        total("tokens_below", at, lambda f: _count_outside(f, "below"), when),
        extremes("raw", at, lambda f: _token_extrema(f, "raw"), when),
        extremes("weight", at, lambda f: _token_extrema(f, "bounded"), when),
    ]


# In the order of `Statistics`, where sums and maxima, and those of tokens and of sequences, are stretches of their own.
# The rows of criteria follow, then those of FULL.
AGGREGATES: list[Aggregate] = [
    Aggregate(("abs_d", "d2", "k3", "ratio", "ratio2"), (), "tokens", lambda f: f.tokens.sums()),
    total("tokens_clamped", "tokens", _tokens_clamped),
    *_token_weights("tokens", weighs_tokens),
    total("raw_plain", "tokens", lambda f: select(f.tokens.measured, f.weighing.ratio).sum(), weighs_prefixes),
    total("raw_plain2", "tokens", lambda f: squares(select(f.tokens.measured, f.weighing.ratio)), weighs_prefixes),
    total("weight_plain", "tokens", lambda f: select(f.tokens.measured, f.weighing.weight).sum(), weighs_prefixes),
    total("weight_plain2", "tokens", lambda f: squares(select(f.tokens.measured, f.weighing.weight)), weighs_prefixes),
    extremes("d", "tokens", lambda f: f.tokens.extrema),
    # Sequences.
    total("tokens", "sequences", lambda s: s.tokens(s.facts.tokens)),
    total("tokens_outside", "call", lambda s: s.tokens_outside, local=True),
    total("tokens_measured", "sequences", lambda s: s.tokens(s.facts.measured)),
    total("tokens_nonfinite", "sequences", lambda s: s.nonfinite),
    total("tokens_kept", "sequences", lambda s: s.tokens(s.facts.kept)),
    total("sequences", "sequences", lambda s: s.nonempty),
    total("sequences_measured", "sequences", lambda s: s.measured),
    total("sequences_kept", "sequences", lambda s: s.standing),
    total("sequences_without_survivors", "sequences", lambda s: s.without_survivors()),
    of_column("d", "d"),
    of_column("train_ppl", "train_ppl"),
    of_column("rollout_ppl", "rollout_ppl"),
    of_column("train_log_ppl", "train_log_ppl"),
    of_column("rollout_log_ppl", "rollout_log_ppl"),
    of_column("log_ppl_diff", "gap"),
    of_column("log_ppl_abs_diff", "abs_gap"),
    of_column("ppl_ratio", "ppl_ratio"),
    of_column("chi2_sequence", "chi2"),
    of_column("abs_sum_d", "size"),
    total("sequences_clamped", "measured", lambda s: s.sequences_clamped()),
    extremes("log_ppl_diff", "call", lambda s: s.ends("gap")),
    Aggregate((), ("max_abs_sum_d",), "call", lambda s: (s.max_size,)),
    # Weights, over tokens and over sequences. Of token weights a sequence has the mean.
    of_column("raw", ("measured", "raw"), weighted),
    of_column("weight", ("measured", "bounded"), weighted),
    of_column("sequence_raw", "raw", weighted),
    of_column("sequence_raw2", ("raw", "raw"), weighted),
    of_column("sequence_weight", "bounded", weighted),
    of_column("sequence_weight2", ("bounded", "bounded"), weighted),
    total("sequences_above", "measured", lambda s: s.beyond("upper"), weighted),
    total("sequences_below", "measured", lambda s: s.beyond("lower"), weighted),
    # Products of ratios can all be next to 0, where sums around 1 cancel; the sample size needs plain ones.
    of_column("sequence_raw_plain", "ratio", weighted),
    of_column("sequence_raw_plain2", ("ratio", "ratio"), weighted),
    of_column("sequence_weight_plain", "weight", weighted),
    of_column("sequence_weight_plain2", ("weight", "weight"), weighted),
    extremes("sequence_raw", "call", lambda s: s.ends("raw"), weighted),
    extremes("sequence_weight", "call", lambda s: s.ends("bounded"), weighted),
    *_token_weights("blocks", weighs_units),
    of_column("raw_plain", ("measured", "ratio"), weighs_sequences),
    total("raw_plain2", "measured", lambda s: s.facts.measured * s.facts.ratio * s.facts.ratio, weighs_sequences),
    of_column("weight_plain", ("measured", "weight"), weighs_sequences),
    total("weight_plain2", "measured", lambda s: s.facts.measured * s.facts.weight * s.facts.weight, weighs_sequences),
    *of_turns.AGGREGATES,
]


def criterion_aggregates(criterion: Criterion, own: str) -> list[Aggregate]:
    """The rows of a criterion.

    Args:
        criterion: The criterion.
        own: The name of the criterion in names of statistics.
    """
    label, value = criterion.label, f"{own}/value"
    names = (value, f"{value}2"), (f"max_{value}", f"-min_{value}")

    def over_tokens(f: Findings) -> tuple[Tensor, ...]:
        outcome = next(found for found in f.decision.outcomes if found.criterion.label == label)
        return _moments(criterion, outcome.value, outcome.among, f.spec)

    def over_units(s: AllSequences) -> tuple[Tensor, ...]:
        units = s.criteria[label].units
        among = units if criterion.over == "turn" else s.among_all(units)
        return _moments(criterion, s.criteria[label].value, among, s.spec)

    over = over_tokens if criterion.per_token else over_units
    return [
        total(f"{own}/units", "turns" if criterion.over == "turn" else "sequences", lambda s: s.criteria[label].units),
        total(f"{own}/tokens", "sequences", lambda s: s.criteria[label].tokens),
        total(f"{own}/sequences", "sequences", lambda s: s.criteria[label].tokens > 0),
        Aggregate(*names, "tokens" if criterion.per_token else "call", over),
    ]


def moment_values(
    criterion: Criterion, value: Tensor, among: Tensor | None, spec: Spec
) -> tuple[Tensor, Tensor | None]:
    """Give a criterion's values as its statistics take them, a ratio's around 1, and the units that count."""
    if criterion.statistic.log_space:
        value = value.clamp(-spec.clamp, spec.clamp)
        value = value + k3(value) if criterion.over == "token" else value.expm1()
    if criterion.statistic.may_be_nan():
        finite = value.isfinite()
        among = finite if among is None else among & finite
    return value, among


def _moments(criterion: Criterion, value: Tensor, among: Tensor | None, spec: Spec) -> tuple[Tensor, ...]:
    """Sum, sum of squares, maximum and -minimum of a criterion's value over its units; a ratio's around 1."""
    value, among = moment_values(criterion, value, among, spec)
    counted = select(among, value)
    if not criterion.statistic.log_space or exp(spec.clamp) > LARGEST_STATISTIC:
        # Squares of what is larger would overflow float32.
        counted = counted.clamp(-LARGEST_STATISTIC, LARGEST_STATISTIC)
    low, high = extrema(value, among)
    square = counted.dot(counted) if counted.dim() == 1 and criterion.over != "token" else squares(counted)
    return counted.sum(), square, high, low


def _probabilities(f: Findings) -> tuple[Tensor, ...]:
    # Around 1, where most probabilities are, and in float64, so that the correlation does not cancel.
    p, q = (select(f.tokens.measured, probability(x) - 1.0) for x in (f.tokens.rollout, f.tokens.train))
    gap, p, q = (p - q).abs(), p.double(), q.double()
    largest = extrema(gap, f.tokens.measured)[1]
    return p.sum(), q.sum(), squares(p), squares(q), (p * q).sum(), gap.sum(), largest


def _divergences(f: Findings) -> tuple[Tensor, ...]:
    d = f.tokens.clamped()
    reverse = k3(-d)
    # log cosh(D / 2), where cosh D - 1 is half the sum of the two k3: nothing cancels next to D = 0.
    js = (0.25 * (f.tokens.k3 + reverse)).log1p().mul_(0.5)
    error = torch.where(d < 0.0, reverse - d, f.tokens.excess)
    return reverse.sum(), js.sum(), error.sum(), torch.count_nonzero(d.abs() > LOG_2)


# After the criteria's rows. The histogram of D, of which every bin is a sum, has its place in schema.py.
FULL = [
    Aggregate(
        ("p", "q", "p2", "q2", "pq", "abs_prob_diff"),
        ("max_abs_prob_diff",),
        "tokens",
        _probabilities,
        full,
    ),
    Aggregate(("k3_back", "log_cosh", "factor", "tokens_beyond_2"), (), "tokens", _divergences, full),
]


@cached(maxsize=1024)
def rows_at(spec: Spec, *places: At) -> list[Aggregate]:
    """The rows of a Spec that are taken at some places. Not for compiled regions, which cannot see the cache."""
    return [row for row in aggregates_of(spec) if row.at in places]


class Rows(NamedTuple):
    """Rows that are taken together, apart by how.

    Attributes:
        ones: The names of sums, and what gives them.
        named: The names of sums of columns of `AllSequences`.
        columns: Those columns.
        several: What gives several numbers, the names of the sums among them, and those of the maxima, which follow.
    """

    ones: tuple[tuple[str, Callable[[Any], Number]], ...]
    named: tuple[str, ...]
    columns: tuple[Column, ...]
    several: tuple[tuple[Callable[[Any], tuple[Number, ...]], tuple[str, ...], tuple[str, ...]], ...]

    @classmethod
    def of(cls, rows: list[Aggregate]) -> Rows:
        """Sort rows."""
        found = [row for row in rows if row.column is not None]
        return cls(
            tuple((row.sums[0], row.one) for row in rows if row.one is not None and row.column is None),
            tuple(row.sums[0] for row in found),
            tuple(row.column for row in found if row.column is not None),
            tuple((row.value, row.sums, row.maxima) for row in rows if row.one is None),
        )


@cached(maxsize=256)
def aggregates_of(spec: Spec, names: tuple[str, ...] | None = None) -> list[Aggregate]:
    """The rows of the statistics under a Spec.

    Args:
        spec: The Spec.
        names: The names of the criteria in names of statistics; None: their labels.
    """
    own = tuple(criterion.label for criterion in spec.criteria) if names is None else names
    rows = [row for row in AGGREGATES if row.when(spec)]
    for criterion, name in zip(spec.criteria, own, strict=True):
        rows += criterion_aggregates(criterion, name)
    return rows + [row for row in FULL if row.when(spec)]

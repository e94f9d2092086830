"""The native statistics, a row each: what is taken on the device, from tokens and from sequences.

Sums of ratios lie around 1, all others around 0, so that variances do not cancel. Of weights, whose mean may lie at
either, there are squares around both, and `variance_of_weight` in formulas.py chooses. To add one, add its row: of
tokens it is taken of the batch and of every label, through `Sums`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..definition.bounds import above, below, grown
from ..definition.correction import Outcome
from ..definition.findings import Findings
from ..definition.tokens import LARGEST_STATISTIC, Number, Tokens, k3, probability, select, tensor_of, ulps
from ..definition.weights import kept_tokens
from ..specs.caches import cached
from ..specs.correction import Criterion, Spec
from .all_sequences import AllSequences, OfColumns
from .formulas import exp
from .rows import Aggregate, At, always, both_ends, ends_of_column, of_column, over_tokens, total
from .sums import OfBatch, OfTokens, Reducer, Sums, by_weight, squares_of_weight, sum_of_weight

# The log of a ratio of 2.
LOG_2 = 0.6931471805599453
# A log-prob of exactly 0 or -1 may be a filler where the other one is so far from it.
FAR = 1.0
# The largest distance that int32 holds; only numbers of unequal sign are further apart.
MOST_ULPS = 2**31 - 1


def _weighted(spec: Spec) -> bool:
    return spec.weight is not None


def _weighs_tokens(spec: Spec) -> bool:
    return spec.weighs_tokens


def _squares_its_own(spec: Spec) -> bool:
    """Whether a weight of tokens has squares around 1 that differ from the ratio's."""
    return spec.weight is not None and spec.weight.per_token and not spec.weight.is_token_ratio


def _weighs_units(spec: Spec) -> bool:
    return spec.weight is not None and not spec.weighs_tokens


def _full(spec: Spec) -> bool:
    return spec.detail == "full"


def _counting(which: Callable[[Findings], Tensor | None]) -> OfTokens:
    """The formula of the number of tokens that are True; None: all of them."""
    return lambda f, by: (by.count(which(f)),)


def _count_some(by: Sums, which: Tensor | None) -> tuple[Number]:
    """Count tokens; None: there is none."""
    return (by.none() if which is None else by.count(which),)


def _count_outside(side: Literal["above", "below"]) -> OfTokens:
    """The formula of the measured tokens whose weight before the bounds lies "above" or "below" them."""

    def formula(f: Findings, by: Sums) -> tuple[Number]:
        weighing, (here, counted) = f.weighing, by_weight(f, by)
        assert weighing is not None
        low, high = grown(weighing.bounds.low, weighing.bounds.high, weighing.growth)
        bound, beyond = (high, above) if side == "above" else (low, below)
        return (here.none() if bound is None else here.count(beyond(weighing.log_ratio, bound), counted),)

    return formula


def _ends_of_weight(field: str) -> OfTokens:
    """The formula of the ends of a field of `Weighing`."""

    def formula(f: Findings, by: Sums) -> tuple[Number, Number]:
        here, counted = by_weight(f, by)
        return here.ends(getattr(f.weighing, field), counted)

    return formula


def _weights(at: At, when: Callable[[Spec], bool], squares_its_own: Callable[[Spec], bool]) -> list[Aggregate]:
    """Rows of weights over tokens, taken where the weights are: of every token, or of its turn or sequence."""
    return [
        Aggregate(("raw2",), (), at, when, squares_of_weight("ratio")),
        Aggregate(("raw_around_one2",), (), at, squares_its_own, squares_of_weight("excess")),
        Aggregate(("weight2",), (), at, when, squares_of_weight("weight")),
        Aggregate(("weight_around_one2",), (), at, when, squares_of_weight("weight_excess")),
        Aggregate(("tokens_above",), (), at, when, _count_outside("above")),
        Aggregate(("tokens_below",), (), at, when, _count_outside("below")),
        Aggregate((), both_ends("raw"), at, when, _ends_of_weight("ratio")),
        Aggregate((), both_ends("weight"), at, when, _ends_of_weight("weight")),
    ]


# In the order of `Statistics`, where sums and maxima, of tokens and of sequences, are stretches of their own.
# The rows of turns follow, then those of criteria, then FULL.
AGGREGATES: list[Aggregate] = [
    over_tokens("abs_d", "sum", lambda f: f.tokens.size),
    over_tokens("d2", "squares", lambda f: f.tokens.saturated),
    over_tokens("k3", "sum", lambda f: f.tokens.k3),
    over_tokens("ratio", "sum", lambda f: f.tokens.excess),
    over_tokens("ratio2", "squares", lambda f: f.tokens.excess),
    over_tokens("tokens_clamped", "count", lambda f: f.tokens.size > f.spec.clamp),
    *_weights("tokens", _weighs_tokens, _squares_its_own),
    Aggregate((), both_ends("d"), "tokens", of_tokens=lambda f, by: by.ends(f.tokens.d, f.tokens.measured)),
    # Sequences.
    total("tokens", "sequences", lambda s: s.facts.tokens, always, _counting(lambda f: f.tokens.valid)),
    Aggregate(("tokens_outside",), (), "call", of_all=lambda s: (s.tokens_outside,), local=True),
    # Counted behind the backends, in padded batches without a mask.
    Aggregate(("sequences_padded",), (), "call", of_all=lambda s: (0 * s.tokens_outside,), local=True),
    total("tokens_measured", "sequences", lambda s: s.facts.measured, always,
          _counting(lambda f: f.tokens.measured)),
    total("tokens_nonfinite", "sequences", lambda s: s.nonfinite, always, lambda f, by: _count_some(by, f.tokens.bad)),
    total("tokens_differing", "sequences", lambda s: s.facts.differing, always,
          _counting(lambda f: f.tokens.differing)),
    total("tokens_kept", "sequences", lambda s: s.facts.kept, always,
          _counting(lambda f: kept_tokens(f.tokens, f.decision))),
    total("sequences", "sequences", lambda s: s.nonempty),
    total("sequences_measured", "sequences", lambda s: s.measured),
    total("sequences_differing", "sequences", lambda s: s.differing),
    total("sequences_kept", "sequences", lambda s: s.standing),
    total("sequences_without_survivors", "sequences", lambda s: s.without_survivors()),
    of_column("d", "d", always, lambda f, by: (by.sum(f.tokens.saturated),)),
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
    ends_of_column("log_ppl_diff", "gap"),
    Aggregate((), ("max_abs_sum_d",), "measured", of_all=lambda s: s.ends("size")[:1]),
    # Weights, over tokens and over sequences. Of token weights a sequence has the mean.
    of_column("raw", ("measured", "ratio"), _weighted, sum_of_weight("ratio", "excess")),
    of_column("weight", ("measured", "weight"), _weighted, sum_of_weight("weight", "weight_excess")),
    of_column("sequence_raw", "ratio", _weighted),
    of_column("sequence_raw2", ("ratio", "ratio"), _weighted),
    of_column("sequence_raw_around_one2", ("excess", "excess"), _weighted),
    of_column("sequence_weight", "weight", _weighted),
    of_column("sequence_weight2", ("weight", "weight"), _weighted),
    of_column("sequence_weight_around_one2", ("weight_excess", "weight_excess"), _weighted),
    total("sequences_above", "measured", lambda s: s.beyond("upper"), _weighted),
    total("sequences_below", "measured", lambda s: s.beyond("lower"), _weighted),
    ends_of_column("sequence_raw", "ratio", _weighted),
    ends_of_column("sequence_weight", "weight", _weighted),
    *_weights("blocks", _weighs_units, _weighs_units),
]  # fmt: skip


def criterion_aggregates(criterion: Criterion, own: str) -> list[Aggregate]:
    """The rows of a criterion; `own` is its name in the statistics."""
    label, value, per_token = criterion.label, f"{own}/value", criterion.per_token
    names = (value, f"{value}2"), both_ends(value)

    def outcome_of(f: Findings) -> Outcome:
        return next(outcome for outcome in f.decision.outcomes if outcome.criterion.label == label)

    def over_tokens(f: Findings, by: Sums) -> tuple[Number, ...]:
        outcome = outcome_of(f)
        return _moments(criterion, outcome.value, outcome.counted, f.spec, by)

    def over_units(s: AllSequences) -> tuple[Number, ...]:
        units = s.criteria[label].units
        counted = units if criterion.over == "turn" else s.unless_all(units)
        return _moments(criterion, s.criteria[label].value, counted, s.spec, s.by)

    def lost(f: Findings, by: Sums) -> tuple[Number]:
        return _count_some(by, _lost(outcome_of(f), f.tokens))

    at: At = "turns" if criterion.over == "turn" else "sequences"
    units = _counting(lambda f: outcome_of(f).counted) if per_token else None
    return [
        total(f"{own}/units", at, lambda s: s.criteria[label].units, always, units),
        total(f"{own}/tokens", "sequences", lambda s: s.criteria[label].tokens, always, lost),
        total(f"{own}/sequences", "sequences", lambda s: s.criteria[label].tokens > 0),
        Aggregate(*names, "tokens", of_tokens=over_tokens) if per_token else Aggregate(*names, at, of_all=over_units),
    ]


def _lost(outcome: Outcome, tokens: Tokens) -> Tensor | None:
    """Bool per token: valid, and one criterion rejected it; None: it can reject none."""
    lost = outcome.dropped
    if lost is None and outcome.failed is not None:
        lost = tokens.sequences.spread(outcome.failed).expand(tokens.d.shape)
    elif lost is None and outcome.failed_turns is not None:
        lost = tokens.units("turn").spread(outcome.failed_turns).expand(tokens.d.shape)
    return lost if lost is None or tokens.valid is None else lost & tokens.valid


def _moments(
    criterion: Criterion, value: Tensor, counted: Tensor | None, spec: Spec, by: Reducer
) -> tuple[Number, Number, Number, Number]:
    """Sum, sum of squares, maximum and -minimum of a criterion's value over its units.

    Sums of a ratio are around 1, and so are ends in float64, which tokens' need not be.
    """
    end = None
    if criterion.statistic.log_space:
        log_ratio = value.clamp(-spec.clamp, spec.clamp)
        value = log_ratio + k3(log_ratio) if criterion.over == "token" else log_ratio.expm1()
        end = log_ratio.exp() if criterion.over == "token" else None
    there = select(counted, value)
    if not criterion.statistic.log_space or exp(spec.clamp) > LARGEST_STATISTIC:
        # Squares of what is larger would overflow float32.
        there = there.clamp(-LARGEST_STATISTIC, LARGEST_STATISTIC)
    return (
        by.sum(there),
        by.squares(there, dot=criterion.over != "token"),
        *by.ends(value if end is None else end, counted),
    )


def _probabilities(f: Findings, by: Sums) -> tuple[Number, ...]:
    # Around 1, where most probabilities are, and in float64, so that the correlation does not cancel.
    p, q = (select(f.tokens.measured, probability(x) - 1.0) for x in (f.tokens.rollout, f.tokens.train))
    gap, p, q = (p - q).abs(), p.double(), q.double()
    largest, _ = by.ends(gap, f.tokens.measured)
    return by.sum(p), by.sum(q), by.squares(p), by.squares(q), by.sum(p * q), by.sum(gap), largest


def _ulps(tokens: Tokens, by: Sums) -> tuple[Number, ...]:
    finite = tokens.d.isfinite() if tokens.propagate else None
    apart = ulps(select(finite, tokens.train), select(finite, tokens.rollout)).clamp(max=MOST_ULPS)
    largest, _ = by.ends(apart.double(), None)
    return (tensor_of(largest).clamp(min=0.0),)


def _fillers(tokens: Tokens, by: Sums) -> tuple[Number, ...]:
    far = tokens.size > FAR
    return tuple(by.count(far & ((x == 0.0) | (x == -1.0))) for x in (tokens.train, tokens.rollout))


def _divergences(tokens: Tokens, by: Sums) -> tuple[Number, ...]:
    d = tokens.clamped()
    reverse = k3(-d)
    # log cosh(D / 2), where cosh D - 1 is half the sum of the two k3: nothing cancels next to D = 0.
    js = (0.25 * (tokens.k3 + reverse)).log1p().mul_(0.5)
    error = torch.where(d < 0.0, reverse - d, tokens.excess)
    return by.sum(reverse), by.sum(js), by.sum(error), by.count(d.abs() > LOG_2)


class Diagnosis(NamedTuple):
    """Statistics that plain torch takes of the tokens of every backend; with detail="full" alone."""

    sums: tuple[str, ...]
    maxima: tuple[str, ...]
    of: Callable[[Tokens, Sums], tuple[Number, ...]]

    def row(self) -> Aggregate:
        """Make its row, to which every rank of `Ranks.sequence` adds its own tokens."""
        return Aggregate(self.sums, self.maxima, "diagnosis", _full, lambda f, by: self.of(f.tokens, by), local=True)


DIAGNOSES = (
    Diagnosis((), ("max_ulps",), _ulps),
    Diagnosis(("tokens_train_filled", "tokens_rollout_filled"), (), _fillers),
    Diagnosis(("k3_back", "log_cosh", "factor", "tokens_beyond_2"), (), _divergences),
)
# Their names, sums and maxima.
DIAGNOSED = tuple(
    tuple(chain(*parts)) for parts in ([each.sums for each in DIAGNOSES], [each.maxima for each in DIAGNOSES])
)


def diagnosis_of(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The sums and the maxima of `DIAGNOSES`, float64, of the tokens of a batch that kernels have measured."""
    by, sums, maxima = OfBatch(tokens.d), [], []
    for diagnosis in DIAGNOSES:
        values = [tensor_of(x).double() for x in diagnosis.of(tokens, by)]
        sums += values[: len(diagnosis.sums)]
        maxima += values[len(diagnosis.sums) :]
    return torch.stack(sums), torch.stack(maxima)


# After the criteria's rows. The histogram of D has one sum for each bin; schema.py places it.
FULL = [
    Aggregate(("p", "q", "p2", "q2", "pq", "abs_prob_diff"), ("max_abs_prob_diff",), "tokens", _full, _probabilities),
    *(diagnosis.row() for diagnosis in DIAGNOSES),
]


@cached(maxsize=1024)
def rows_at(spec: Spec, *places: At) -> list[Aggregate]:
    """The rows of a Spec that are taken at some places."""
    return [row for row in aggregates_of(spec) if row.at in places]


class Rows(NamedTuple):
    """Rows that are taken together, apart by how."""

    each: tuple[tuple[str, Callable[[AllSequences], Tensor]], ...]  # sums of a value of each sequence or turn
    # What gives several numbers, the names of its sums, and of the maxima that follow.
    several: tuple[tuple[Callable[..., tuple[Number, ...]], tuple[str, ...], tuple[str, ...]], ...]
    columns: OfColumns  # the sums and maxima of columns

    @classmethod
    def of(cls, rows: list[Aggregate]) -> Rows:
        """Sort rows."""
        of_columns = [(row, row.column) for row in rows if row.column is not None]
        # No `or`, because torch 2.11's compiler asks no function for its truth.
        several = [
            (row.of_tokens if row.of_all is None else row.of_all, row.sums, row.maxima)
            for row in rows
            if row.each is None
        ]
        return cls(
            tuple((row.sums[0], row.each) for row in rows if row.each is not None),
            tuple((value, names, ends) for value, names, ends in several if value is not None),
            OfColumns(
                tuple((row.sums[0], column) for row, column in of_columns if row.sums),
                tuple((row.maxima, column) for row, column in of_columns if row.maxima and isinstance(column, str)),
            ),
        )


@cached(maxsize=256)
def aggregates_of(spec: Spec, names: tuple[str, ...] | None = None) -> list[Aggregate]:
    """The rows of the statistics under a Spec; `names` names the criteria in them, None: their labels."""
    own = tuple(criterion.label for criterion in spec.criteria) if names is None else names
    rows = [row for row in AGGREGATES if row.when(spec)]
    if spec.measures_turns:
        from . import turns

        rows += [row for row in turns.AGGREGATES if row.when(spec)]
    for criterion, name in zip(spec.criteria, own, strict=True):
        rows += criterion_aggregates(criterion, name)
    return rows + [row for row in FULL if row.when(spec)]

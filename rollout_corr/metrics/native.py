"""The native statistics and metrics, a row each. To add a metric, add its row, and that of its sum if it has a new one.

Sums of ratios lie around 1, all others around 0, so that variances do not cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from rollout_corr.definition.findings import Findings, SequenceFacts, above, below
from rollout_corr.definition.tokens import LARGEST_LOG_PERPLEXITY, LARGEST_STATISTIC, extrema, k3, probability, select
from rollout_corr.metrics.histogram import percentile
from rollout_corr.metrics.limits import healthy
from rollout_corr.metrics.rows import (
    Aggregate,
    At,
    Metric,
    Over,
    Values,
    extremes,
    maximum,
    mean,
    mean_around,
    minimum,
    plain,
    ratio_of,
    squared,
    std,
    total,
)
from rollout_corr.spec.correction import Criterion, Spec
from rollout_corr.spec.thresholds import log_bound

PERCENTILES = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 99.99)


# --- statistics ---


class AllSequences:
    """The facts of all sequences of a batch, [S] each, and what several statistics derive from them."""

    def __init__(self, facts: SequenceFacts, tokens_outside: Tensor, spec: Spec) -> None:
        self.facts, self.tokens_outside, self.spec = facts, tokens_outside, spec
        n = facts.measured.clamp(min=1)
        self.measured, self.nonempty = facts.measured > 0, facts.tokens > 0
        self.log_train_ppl, self.log_rollout_ppl = -facts.train / n, -facts.rollout / n
        # From the sum of D, which is exact, and not from the difference of two large sums.
        self.gap, self.size = -facts.d / n, facts.d.abs()
        # In the order in which criteria are run: over tokens, then over sequences.
        run = sorted(spec.criteria, key=lambda criterion: criterion.over != "token")
        self.criteria = {criterion.label: found for criterion, found in zip(run, facts.criteria, strict=True)}


def weighted(spec: Spec) -> bool:
    """Tell whether there is a weight."""
    return spec.weight is not None


def weighs_tokens(spec: Spec) -> bool:
    """Tell whether every token has a weight of its own."""
    return spec.weighs_tokens


def weighs_sequences(spec: Spec) -> bool:
    """Tell whether all tokens of a sequence have its weight."""
    return spec.weight is not None and not spec.weighs_tokens


def squares(x: Tensor) -> Tensor:
    """0-d: the sum of squares."""
    return (x * x).sum()


def perplexity(log_perplexity: Tensor) -> Tensor:
    """Exponentiate, capped so that it stays finite."""
    return log_perplexity.clamp(max=LARGEST_LOG_PERPLEXITY).exp()


def _tokens_clamped(f: Findings) -> Tensor:
    clamped, d = f.tokens.clamped(), f.tokens.d
    return f.n_measured.sum() * 0 if clamped is d else torch.count_nonzero(clamped - d)


def _token_squares(f: Findings, x: Tensor) -> Tensor:
    """0-d: the sum over measured tokens of the square of a weight's ratio - 1."""
    if x is f.tokens.excess:
        return f.excess2
    return (f.n_measured * x * x).sum() if weighs_sequences(f.spec) else squares(select(f.tokens.measured, x))


def _token_extrema(f: Findings, x: Tensor) -> tuple[Tensor, Tensor]:
    """(-minimum, maximum) of a weight's ratio - 1, over measured tokens or over the sequences that have one."""
    return extrema(x, f.n_measured > 0 if weighs_sequences(f.spec) else f.tokens.measured)


def _count_outside(f: Findings, side: Literal["above", "below"]) -> Tensor:
    """0-d: measured tokens whose raw weight lies "above" or "below" the bound."""
    weight, weighing = f.spec.weight, f.weighing
    assert weight is not None
    assert weighing is not None
    bound, beyond = (weight.upper, above) if side == "above" else (weight.lower, below)
    if not weight.per_token:
        return (f.n_measured * beyond(weighing.log_ratio, log_bound(bound))).sum()
    if f.beyond is not None:
        return f.n_measured.new_tensor(getattr(f.beyond, side))
    if bound is None:
        return f.n_measured.sum() * 0
    which = beyond(weighing.log_ratio, log_bound(bound))
    return torch.count_nonzero(which if f.tokens.measured is None else which & f.tokens.measured)


def _token_weights(at: At, when: Callable[[Spec], bool]) -> list[Aggregate]:
    """Rows of weights over tokens, taken where the weights are: of every token, or of its sequence."""
    return [
        total("raw2", at, lambda f: _token_squares(f, f.weighing.raw), when),
        total("weight2", at, lambda f: _token_squares(f, f.weighing.bounded), when),
        total("tokens_above", at, lambda f: _count_outside(f, "above"), when),
        total("tokens_below", at, lambda f: _count_outside(f, "below"), when),
        extremes("raw", at, lambda f: _token_extrema(f, f.weighing.raw), when),
        extremes("weight", at, lambda f: _token_extrema(f, f.weighing.bounded), when),
    ]


# In the order of `Statistics`, where sums and maxima, and those of tokens and of sequences, are stretches of their own.
# The rows of criteria follow, then those of FULL.
AGGREGATES: list[Aggregate] = [
    total("abs_d", "tokens", lambda f: f.tokens.saturated.abs().sum()),
    total("d2", "tokens", lambda f: squares(f.tokens.saturated)),
    total("k3", "tokens", lambda f: f.tokens.k3.sum()),
    total("ratio", "tokens", lambda f: f.tokens.excess.sum()),
    total("ratio2", "tokens", lambda f: f.excess2),
    total("tokens_clamped", "tokens", _tokens_clamped),
    *_token_weights("tokens", weighs_tokens),
    extremes("d", "tokens", lambda f: f.tokens.extrema),
    # Sequences.
    total("tokens", "sequences", lambda s: s.facts.tokens),
    total("tokens_outside", "call", lambda s: s.tokens_outside, local=True),
    total("tokens_measured", "sequences", lambda s: s.facts.measured),
    total("tokens_nonfinite", "sequences", lambda s: s.facts.nonfinite),
    total("tokens_kept", "sequences", lambda s: s.facts.kept),
    total("sequences", "sequences", lambda s: s.nonempty),
    total("sequences_measured", "sequences", lambda s: s.measured),
    total("sequences_kept", "sequences", lambda s: s.facts.keep & s.nonempty),
    total("sequences_without_survivors", "sequences", lambda s: s.facts.keep & s.nonempty & (s.facts.kept == 0)),
    total("d", "measured", lambda s: s.facts.d),
    total("train_ppl", "measured", lambda s: perplexity(s.log_train_ppl)),
    total("rollout_ppl", "measured", lambda s: perplexity(s.log_rollout_ppl)),
    total("train_log_ppl", "measured", lambda s: s.log_train_ppl),
    total("rollout_log_ppl", "measured", lambda s: s.log_rollout_ppl),
    total("log_ppl_diff", "measured", lambda s: s.gap),
    total("log_ppl_abs_diff", "measured", lambda s: s.gap.abs()),
    total("ppl_ratio", "measured", lambda s: perplexity(s.gap)),
    total("chi2_sequence", "measured", lambda s: (2.0 * s.facts.d.clamp(-s.spec.clamp, s.spec.clamp)).expm1()),
    total("abs_sum_d", "measured", lambda s: s.size),
    total("sequences_clamped", "measured", lambda s: s.size > s.spec.clamp),
    extremes("log_ppl_diff", "call", lambda s: extrema(s.gap, s.measured)),
    Aggregate((), ("max_abs_sum_d",), "call", lambda s: extrema(s.size, s.measured)[1:]),
    # Weights, over tokens and over sequences. Of token weights a sequence has the mean.
    total("raw", "measured", lambda s: s.facts.raw * s.facts.measured, weighted),
    total("weight", "measured", lambda s: s.facts.bounded * s.facts.measured, weighted),
    total("sequence_raw", "measured", lambda s: s.facts.raw, weighted),
    total("sequence_raw2", "measured", lambda s: s.facts.raw * s.facts.raw, weighted),
    total("sequence_weight", "measured", lambda s: s.facts.bounded, weighted),
    total("sequence_weight2", "measured", lambda s: s.facts.bounded * s.facts.bounded, weighted),
    total("sequences_above", "measured", lambda s: above(s.facts.log_weight, log_bound(s.spec.weight.upper)), weighted),
    total("sequences_below", "measured", lambda s: below(s.facts.log_weight, log_bound(s.spec.weight.lower)), weighted),
    # Products of ratios can all be next to 0, where sums around 1 cancel; the sample size needs plain ones.
    total("sequence_raw_plain", "measured", lambda s: s.facts.ratio, weighted),
    total("sequence_raw_plain2", "measured", lambda s: s.facts.ratio * s.facts.ratio, weighted),
    total("sequence_weight_plain", "measured", lambda s: s.facts.weight, weighted),
    total("sequence_weight_plain2", "measured", lambda s: s.facts.weight * s.facts.weight, weighted),
    extremes("sequence_raw", "call", lambda s: extrema(s.facts.raw, s.measured), weighted),
    extremes("sequence_weight", "call", lambda s: extrema(s.facts.bounded, s.measured), weighted),
    *_token_weights("blocks", weighs_sequences),
    total("raw_plain", "measured", lambda s: s.facts.measured * s.facts.ratio, weighs_sequences),
    total("raw_plain2", "measured", lambda s: s.facts.measured * s.facts.ratio * s.facts.ratio, weighs_sequences),
    total("weight_plain", "measured", lambda s: s.facts.measured * s.facts.weight, weighs_sequences),
    total("weight_plain2", "measured", lambda s: s.facts.measured * s.facts.weight * s.facts.weight, weighs_sequences),
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

    def over_sequences(s: AllSequences) -> tuple[Tensor, ...]:
        return _moments(criterion, s.criteria[label].value, s.criteria[label].units, s.spec)

    over = over_tokens if criterion.over == "token" else over_sequences
    return [
        total(f"{own}/units", "sequences", lambda s: s.criteria[label].units),
        total(f"{own}/tokens", "sequences", lambda s: s.criteria[label].tokens),
        total(f"{own}/sequences", "sequences", lambda s: s.criteria[label].tokens > 0),
        Aggregate(*names, "tokens" if criterion.over == "token" else "call", over),
    ]


def _moments(criterion: Criterion, value: Tensor, among: Tensor | None, spec: Spec) -> tuple[Tensor, ...]:
    """Sum, sum of squares, maximum and -minimum of a criterion's value over its units; a ratio's around 1."""
    if criterion.statistic.log_space:
        value = value.clamp(-spec.clamp, spec.clamp)
        value = value.expm1() if criterion.over == "sequence" else value + k3(value)
    if criterion.statistic.source == "caller":
        finite = value.isfinite()
        among = finite if among is None else among & finite
    # Squares of what is larger would overflow float32.
    counted = select(among, value).clamp(-LARGEST_STATISTIC, LARGEST_STATISTIC)
    low, high = extrema(value, among)
    return counted.sum(), squares(counted), high, low


def _probabilities(f: Findings) -> tuple[Tensor, ...]:
    # Around 1, where most probabilities are, and in float64, so that the correlation does not cancel.
    p, q = (select(f.tokens.measured, probability(x) - 1.0) for x in (f.tokens.rollout, f.tokens.train))
    gap, p, q = (p - q).abs(), p.double(), q.double()
    largest = extrema(gap, f.tokens.measured)[1]
    return p.sum(), q.sum(), squares(p), squares(q), (p * q).sum(), gap.sum(), largest


# After the criteria's rows. The histogram of D, of which every bin is a sum, has its place in schema.py.
FULL = [
    Aggregate(
        ("p", "q", "p2", "q2", "pq", "abs_prob_diff"),
        ("max_abs_prob_diff",),
        "tokens",
        _probabilities,
        lambda spec: spec.detail == "full",
    )
]


@lru_cache(maxsize=256)
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


# --- metrics ---

EACH = Over("-", None)
TOKENS = Over("measured tokens", "tokens_measured")
SEQUENCES = Over("measured sequences", "sequences_measured")
VALID = Over("valid tokens", "tokens")
NONEMPTY = Over("non-empty sequences", "sequences")


def _ess(v: Values, n: float, name: str) -> float:
    """(sum w)^2 / (n sum w^2), from plain sums or, at token level, from sums of w - 1 and (w - 1)^2."""
    if f"{name}_plain" in v:
        weights, squared = v[f"{name}_plain"], v[f"{name}_plain2"]
    else:
        weights, squared = n + v[name], n + 2.0 * v[name] + v[f"{name}2"]
    return max(0.0, min(1.0, ratio_of(weights * weights, n * squared)))


def _percentile(v: Values, n: float, percent: float) -> float:
    return percentile(v, percent)


def _correlation(v: Values, n: float) -> float:
    """Pearson correlation of the two probabilities; 0 where either is constant."""
    mean_p, mean_q = ratio_of(v["p"], n), ratio_of(v["q"], n)
    square_p, square_q = ratio_of(v["p2"], n), ratio_of(v["q2"], n)
    variance_p, variance_q = square_p - squared(mean_p), square_q - squared(mean_q)
    # The variance of a constant is rounding noise, and its correlation would say nothing.
    if variance_p <= 1e-12 * square_p or variance_q <= 1e-12 * square_q:
        return 0.0
    covariance = ratio_of(v["pq"], n) - mean_p * mean_q
    return max(-1.0, min(1.0, ratio_of(covariance, math.sqrt(variance_p * variance_q))))


# fmt: off
ALWAYS = [
    Metric("tokens", "valid tokens inside sequences", "tokens", EACH, "-", plain("tokens")),
    Metric("tokens_outside", "valid tokens that belong to no sequence", "tokens", EACH, healthy("tokens_outside"),
           plain("tokens_outside")),
    Metric("tokens_nonfinite", "valid tokens whose D is NaN or infinite", "tokens", EACH, healthy("tokens_nonfinite"),
           plain("tokens_nonfinite")),
    Metric("tokens_clamped", "measured tokens with |D| > clamp", "tokens", EACH, "near 0", plain("tokens_clamped")),
    Metric("tokens_kept", "valid tokens that train after rejection", "tokens", EACH, "-", plain("tokens_kept")),
    Metric("tokens_kept_fraction", "tokens_kept / tokens", "fraction", VALID, healthy("tokens_kept_fraction"),
           mean("tokens_kept")),
    Metric("sequences", "sequences with a valid token", "sequences", EACH, "-", plain("sequences")),
    Metric("sequences_clamped", "sequences with |sum D| > clamp", "sequences", EACH, "near 0",
           plain("sequences_clamped")),
    Metric("sequences_kept", "non-empty sequences whose keep is True", "sequences", EACH, "-", plain("sequences_kept")),
    Metric("sequences_kept_fraction", "sequences_kept / sequences", "fraction", NONEMPTY, "> 0.5",
           mean("sequences_kept")),
    Metric("sequences_without_survivors", "kept sequences that lost every token one by one", "sequences", EACH,
           "near 0", plain("sequences_without_survivors")),
    Metric("d_mean", "mean D, each saturated at +-1024", "nats", TOKENS, "near 0", mean("d")),
    Metric("d_abs_mean", "mean |D|, each saturated at 1024", "nats", TOKENS, healthy("d_abs_mean"), mean("abs_d")),
    Metric("d_std", "population standard deviation of D", "nats", TOKENS, "< 0.1", std("d")),
    Metric("d_abs_max", "max |D|", "nats", TOKENS, healthy("d_abs_max"),
           lambda v, n: max(v["max_d"], v["-min_d"]) + 0.0 if n else 0.0),
    Metric("d_min", "min D", "nats", TOKENS, "> -5", minimum("d")),
    Metric("d_max", "max D", "nats", TOKENS, "< 5", maximum("d")),
    Metric("kl_k1", "mean -D: estimates KL(rollout || train)", "nats", TOKENS, "near 0",
           lambda v, n: ratio_of(0.0 - v["d"], n)),
    Metric("kl_k2", "mean D^2 / 2", "nats", TOKENS, "< 0.01", lambda v, n: ratio_of(0.5 * v["d2"], n)),
    Metric("kl_k3", "mean e^D - 1 - D, D clamped", "nats", TOKENS, healthy("kl_k3"), mean("k3")),
    Metric("ratio_mean", "mean e^D, D clamped", "ratio", TOKENS, "near 1", mean_around(1.0, "ratio")),
    Metric("ratio_std", "population standard deviation of e^D", "ratio", TOKENS, "< 0.1", std("ratio")),
    Metric("chi2_token", "mean e^(2D) - 1, D clamped", "ratio", TOKENS, healthy("chi2_token"),
           lambda v, n: ratio_of(v["ratio2"] + 2.0 * v["ratio"], n)),
    Metric("chi2_sequence", "mean e^(2 clamp(sum D)) - 1", "ratio", SEQUENCES, healthy("chi2_sequence"),
           mean("chi2_sequence")),
    Metric("sum_d_abs_mean", "mean |sum D|: T x KL", "nats", SEQUENCES, "< clamp / 2", mean("abs_sum_d")),
    Metric("sum_d_abs_max", "max |sum D|", "nats", SEQUENCES, "< clamp", maximum("abs_sum_d")),
    Metric("train_ppl", "mean exp(-mean train_logp)", "perplexity", SEQUENCES, "like rollout_ppl", mean("train_ppl")),
    Metric("rollout_ppl", "mean exp(-mean rollout_logp)", "perplexity", SEQUENCES, "-", mean("rollout_ppl")),
    Metric("train_log_ppl", "mean of -mean train_logp", "nats", SEQUENCES, "like rollout's", mean("train_log_ppl")),
    Metric("rollout_log_ppl", "mean of -mean rollout_logp", "nats", SEQUENCES, "-", mean("rollout_log_ppl")),
    Metric("log_ppl_diff", "mean of -mean D: mean rollout_logp - mean train_logp, with D saturated at +-1024", "nats",
           SEQUENCES, "near 0", mean("log_ppl_diff")),
    Metric("log_ppl_abs_diff", "mean of |mean D|", "nats", SEQUENCES, healthy("log_ppl_abs_diff"),
           mean("log_ppl_abs_diff")),
    Metric("log_ppl_diff_max", "maximum of -mean D", "nats", SEQUENCES, "near 0", maximum("log_ppl_diff")),
    Metric("log_ppl_diff_min", "minimum of -mean D", "nats", SEQUENCES, "near 0", minimum("log_ppl_diff")),
    Metric("ppl_ratio", "mean exp(-mean D)", "ratio", SEQUENCES, "near 1", mean("ppl_ratio")),
]


def weight_metrics(spec: Spec) -> list[Metric]:
    """The metrics of a weight, over tokens and over sequences."""
    rows = []
    near_0 = "; at token level within 6e-8 mean(1 + |D|) / mean(w^2)"
    for level, units, over in (("", "tokens", TOKENS), ("sequence_", "sequences", SEQUENCES)):
        for key, name, words in (
            (f"{level}weight", f"{level}weight", "weight after the bounds"),
            (f"{level}weight_raw", f"{level}raw", "weight before the bounds"),
        ):
            rows += [
                Metric(f"{key}_mean", f"mean {words}", "ratio", over, "near 1", mean_around(1.0, name)),
                Metric(f"{key}_std", f"population standard deviation of the {words}", "ratio", over, "< 1", std(name)),
                Metric(f"{key}_min", f"min {words}", "ratio", over, "-", minimum(name, 1.0)),
                Metric(f"{key}_max", f"max {words}", "ratio", over, "-", maximum(name, 1.0)),
                Metric(f"{key}_ess", f"(sum w)^2 / (n sum w^2) of the {words}{near_0}", "fraction", over,
                       healthy("weight_ess"), partial(_ess, name=name)),
            ]
        rows += [
            Metric(f"{level}weight_{side}_fraction", f"units whose raw weight lies {side} the bound", "fraction", over,
                   "< 0.1", mean(f"{units}_{side}"))
            for side in ("above", "below")
        ]
    if spec.weight is not None and spec.weight.normalize == "batch":
        name, _, centre = batch_mean(spec)
        rows.append(
            Metric("weight_batch_mean", "the mean that weights were divided by (unless it is <= 1e-8)", "ratio",
                   TOKENS if spec.weighs_tokens else SEQUENCES, "near 1", mean_around(centre, name))
        )
    return rows


def batch_mean(spec: Spec) -> tuple[str, str, float]:
    """The sums of weights and of their units that make the mean of `normalize="batch"`, and around what weights lie."""
    if spec.weighs_tokens:
        return "weight", "tokens_measured", 1.0
    return "sequence_weight_plain", "sequences_measured", 0.0


def criterion_metrics(criterion: Criterion) -> list[Metric]:
    """The metrics of a criterion, under its label."""
    label, value = criterion.label, f"{criterion.label}/value"
    units = "measured tokens" if criterion.over == "token" else "sequences with a token to sum over"
    over, centre = Over(units, f"{label}/units"), 1.0 if criterion.statistic.log_space else 0.0
    return [
        Metric(f"{label}/rejected_tokens_fraction", "tokens that it rejected", "fraction", VALID, "< 0.1",
               mean(f"{label}/tokens")),
        Metric(f"{label}/rejected_sequences_fraction", "non-empty sequences that lost a token to it", "fraction",
               NONEMPTY, "< 0.1", mean(f"{label}/sequences")),
        Metric(f"{label}/mean", "mean of its statistic, each saturated at +-2^37", "its own", over, "inside the bounds",
               mean_around(centre, value)),
        Metric(f"{label}/std", "population standard deviation of its statistic, saturated likewise", "its own", over,
               "-", std(value)),
        Metric(f"{label}/min", "minimum of its statistic", "its own", over, "-", minimum(value, centre)),
        Metric(f"{label}/max", "maximum of its statistic", "its own", over, "-", maximum(value, centre)),
    ]


FULL_METRICS = [
    *(
        Metric(f"d_p{percent:g}", f"percentile {percent:g} of D, from the histogram (within 1/8 of its value)", "nats",
               TOKENS, "-", partial(_percentile, percent=percent))
        for percent in PERCENTILES
    ),
    Metric("train_prob_mean", "mean exp(train_logp)", "probability", TOKENS, "like rollout's", mean_around(1.0, "q")),
    Metric("rollout_prob_mean", "mean exp(rollout_logp)", "probability", TOKENS, "-", mean_around(1.0, "p")),
    Metric("prob_abs_diff_mean", "mean |exp(train_logp) - exp(rollout_logp)|", "probability", TOKENS, "< 0.02",
           mean("abs_prob_diff")),
    Metric("prob_abs_diff_max", "max |exp(train_logp) - exp(rollout_logp)|", "probability", TOKENS, "< 0.5",
           maximum("abs_prob_diff")),
    Metric("prob_correlation", "Pearson correlation of the two probabilities (0 where either is constant)", "-", TOKENS,
           "> 0.99", _correlation),
]
# fmt: on


def metrics_of(spec: Spec) -> list[Metric]:
    """The rows of the native metrics under a Spec, in the order in which they are reported."""
    rows = list(ALWAYS)
    if spec.weight is not None:
        rows += weight_metrics(spec)
    for criterion in spec.criteria:
        rows += criterion_metrics(criterion)
    return rows + FULL_METRICS if spec.detail == "full" else rows

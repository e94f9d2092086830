"""The native metrics of `correct`, a row each: key, formula in words, unit, healthy range.

Their sums are rows of aggregates.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from ..specs.caches import cached
from ..specs.correction import Criterion, Spec
from .formulas import maximum, mean, mean_around, minimum, plain, std, std_of_weight
from .limits import BY_KEY, healthy
from .rows import EACH, TURNS, Metric, Over, Readers

PERCENTILES = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 99.99)
PERCENTILES_OF_WEIGHTS = (1.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0)
# Sizes of D whose share of tokens detail="full" reports: edges of the histogram's bins, so no sum is taken for them.
TAILS = (0.25, 1.0, 4.0)

# The ten that docs/dashboard.md tells to look at, in its order.
DASHBOARD = (
    "kl_rollout_train_k3", "ratio_mean", "logratio_abs_max", "logratio_abs_mean", "chi2_train_rollout",
    "sequence_log_ppl_diff_mean", "tokens_kept_fraction", "sequences_kept_fraction", "weight_ess", "tokens_nonfinite",
)  # fmt: skip

AROUND_ONE = re.compile(r"(ppo_)?ratio2?|.*_around_one2")

TOKENS = Over("measured tokens", "tokens_measured")
SEQUENCES = Over("measured sequences", "sequences_measured")
VALID = Over("valid tokens", "tokens")
NONEMPTY = Over("non-empty sequences", "sequences")


def is_around_one(name: str) -> bool:
    """True for statistics of ratios, which are of the difference from 1, and for squares of weights around 1."""
    return AROUND_ONE.fullmatch(name) is not None


def percentiles_of_weight(spec: Spec) -> list[Metric]:
    """The percentiles of a weight, over the units that it is of."""
    weight = spec.weight
    if weight is None or weight.over == "prefix":
        return []
    key, over = {
        "token": ("weight", TOKENS), "turn": ("turn_weight", TURNS), "sequence": ("sequence_weight", SEQUENCES)
    }[weight.over]  # fmt: skip
    raw = f"{weight.over}_raw"
    formula = f"exp(percentile_of_weights(v, log(0.0 - '-min_{raw}'), log('max_{raw}'), PERCENT))"
    if weight.over == "token":
        clamp = min(spec.clamp, weight.token_clamp or spec.clamp)
        formula = f"exp(within(percentile(v, PERCENT), {clamp}))"
    words = "of the weight before the bounds, from the histogram of its logarithm (which is within 1/8 of its value)"
    return [
        Metric(f"{key}_before_bounds_p{percent:g}", f"percentile {percent:g} {words}", "ratio", over, "-",
               formula.replace("PERCENT", f"{percent:g}"))
        for percent in PERCENTILES_OF_WEIGHTS
    ]  # fmt: skip


# fmt: off
ALWAYS = [
    Metric("tokens", "valid tokens inside sequences", "tokens", EACH, "-", plain("tokens")),
    Metric("tokens_outside", "valid tokens that belong to no sequence", "tokens", EACH, healthy("tokens_outside"),
           plain("tokens_outside")),
    Metric("sequences_padded", "rows of a padded batch without a mask that begin or end with 8 tokens (at most a "
           "quarter of the row) whose log-probs are all one number on both sides, such as 0", "sequences", EACH, "0",
           plain("sequences_padded")),
    Metric("tokens_nonfinite", "valid tokens whose D is NaN or infinite", "tokens", EACH, healthy("tokens_nonfinite"),
           plain("tokens_nonfinite")),
    Metric("tokens_differing", "valid tokens whose two log-probs are not equal: D is not 0, or not finite", "tokens",
           EACH, "-", plain("tokens_differing")),
    Metric("tokens_differing_fraction", "tokens_differing / tokens; 0 where engine and trainer agree bit by bit",
           "fraction", VALID, "-", mean("tokens_differing")),
    Metric("tokens_clamped", "measured tokens with |D| > clamp", "tokens", EACH, "near 0", plain("tokens_clamped")),
    Metric("tokens_kept", "valid tokens left after rejection", "tokens", EACH, "-", plain("tokens_kept")),
    Metric("tokens_kept_fraction", "tokens_kept / tokens", "fraction", VALID, healthy("tokens_kept_fraction"),
           mean("tokens_kept")),
    Metric("sequences", "sequences with a valid token", "sequences", EACH, "-", plain("sequences")),
    Metric("sequences_differing", "sequences with a token that differs", "sequences", EACH, "-",
           plain("sequences_differing")),
    Metric("sequences_clamped", "sequences with |sum D| > clamp", "sequences", EACH, "near 0",
           plain("sequences_clamped")),
    Metric("sequences_kept", "non-empty sequences whose keep is True", "sequences", EACH, "-", plain("sequences_kept")),
    Metric("sequences_kept_fraction", "sequences_kept / sequences", "fraction", NONEMPTY, "> 0.5",
           mean("sequences_kept")),
    Metric("sequences_without_survivors", "kept sequences that lost every token one by one", "sequences", EACH,
           "near 0", plain("sequences_without_survivors")),
    Metric("logratio_mean", "mean D, each saturated at +-1024", "nats", TOKENS, "near 0", mean("d")),
    Metric("logratio_abs_mean", "mean |D|, each saturated at 1024", "nats", TOKENS, healthy("logratio_abs_mean"),
           mean("abs_d")),
    Metric("logratio_std", "population standard deviation of D", "nats", TOKENS, "< 0.1", std("d")),
    Metric("logratio_abs_max", "max |D|", "nats", TOKENS, healthy("logratio_abs_max"),
           "larger('max_d', '-min_d') + 0.0"),
    Metric("logratio_min", "min D", "nats", TOKENS, f"> {-BY_KEY['logratio_abs_max'].watch:g}", minimum("d")),
    Metric("logratio_max", "max D", "nats", TOKENS, healthy("logratio_abs_max"), maximum("d")),
    Metric("kl_rollout_train_k1", "mean -D: estimates KL(rollout || train)", "nats", TOKENS, "near 0",
           "(0.0 - 'd') / n"),
    Metric("kl_rollout_train_k2", "mean D^2 / 2: about KL(rollout || train) where D is small", "nats", TOKENS,
           healthy("kl_rollout_train_k3"), "0.5 * 'd2' / n"),
    Metric("kl_rollout_train_k3", "mean e^D - 1 - D, D clamped: estimates KL(rollout || train)", "nats", TOKENS,
           healthy("kl_rollout_train_k3"), mean("k3")),
    Metric("ratio_mean", "mean e^D, D clamped", "ratio", TOKENS, "near 1", mean_around(1.0, "ratio")),
    Metric("ratio_std", "population standard deviation of e^D", "ratio", TOKENS, "< 0.1", std("ratio")),
    Metric("chi2_train_rollout", "mean e^(2D) - 1, D clamped: estimates chi2(train || rollout)", "ratio", TOKENS,
           healthy("chi2_train_rollout"),
           "('ratio2' + 2.0 * 'ratio') / n"),
    Metric("sequence_chi2_train_rollout", "mean e^(2 clamp(sum D)) - 1", "ratio", SEQUENCES,
           healthy("sequence_chi2_train_rollout"), mean("chi2_sequence")),
    Metric("sequence_logratio_abs_mean", "mean |sum D|: near T x KL where long", "nats", SEQUENCES, "< clamp / 2",
           mean("abs_sum_d")),
    Metric("sequence_logratio_abs_max", "max |sum D|", "nats", SEQUENCES, "< clamp", maximum("abs_sum_d")),
    Metric("sequence_train_ppl_mean", "mean exp(-mean train_logp)", "perplexity", SEQUENCES, "like rollout's",
           mean("train_ppl")),
    Metric("sequence_rollout_ppl_mean", "mean exp(-mean rollout_logp)", "perplexity", SEQUENCES, "-",
           mean("rollout_ppl")),
    Metric("sequence_train_log_ppl_mean", "mean of -mean train_logp", "nats", SEQUENCES, "like rollout's",
           mean("train_log_ppl")),
    Metric("sequence_rollout_log_ppl_mean", "mean of -mean rollout_logp", "nats", SEQUENCES, "-",
           mean("rollout_log_ppl")),
    Metric("sequence_log_ppl_diff_mean",
           "mean of -mean D: mean rollout_logp - mean train_logp, with D saturated at +-1024", "nats", SEQUENCES,
           "near 0", mean("log_ppl_diff")),
    Metric("sequence_log_ppl_diff_abs_mean", "mean of |mean D|", "nats", SEQUENCES,
           healthy("sequence_log_ppl_diff_abs_mean"), mean("log_ppl_abs_diff")),
    Metric("sequence_log_ppl_diff_max", "maximum of -mean D", "nats", SEQUENCES, "near 0", maximum("log_ppl_diff")),
    Metric("sequence_log_ppl_diff_min", "minimum of -mean D", "nats", SEQUENCES, "near 0", minimum("log_ppl_diff")),
    Metric("sequence_ppl_ratio_mean", "mean exp(-mean D)", "ratio", SEQUENCES, "near 1", mean("ppl_ratio")),
]


def weight_metrics(spec: Spec) -> list[Metric]:
    """The metrics of a weight, over tokens, over sequences, and over turns where it is a turn's."""
    of_sequence = weight_of_sequence(spec)
    whose = "weight" if of_sequence == "sequence_weight" else "weight of a sequence (mean of its tokens)"
    levels = [("", "weight", "weight", "tokens", TOKENS), ("sequence_", of_sequence, whose, "sequences", SEQUENCES)]
    if spec.weighs_turns:
        levels.append(("turn_", "turn_weight", "weight", "turns", TURNS))
    rows, is_ratio = [], spec.weight is not None and spec.weight.is_token_ratio
    for level, weight, whose, units, over in levels:
        for key, name, words in (
            (weight, f"{level}weight", f"{whose} after the bounds"),
            (f"{weight}_before_bounds", f"{level}raw", f"{whose} before the bounds"),
        ):
            around_one = "ratio2" if name == "raw" and is_ratio else f"{name}_around_one2"
            rows += [
                Metric(f"{key}_mean", f"mean {words}", "ratio", over, "near 1", mean(name)),
                Metric(f"{key}_std", f"population standard deviation of the {words}", "ratio", over, "< 1",
                       std_of_weight(name, around_one)),
                Metric(f"{key}_min", f"min {words}", "ratio", over, "-", minimum(name)),
                Metric(f"{key}_max", f"max {words}", "ratio", over, "-", maximum(name)),
                Metric(f"{key}_ess", f"(sum w)^2 / (n sum w^2) of the {words}", "fraction", over,
                       healthy("weight_ess"), f"fraction('{name}' * '{name}' / (n * '{name}2'))"),
            ]
        rows += [
            Metric(f"{weight}_{side}_{bound}_fraction", f"{units} whose {whose} lies {side} `{bound}`", "fraction",
                   over, "< 0.1", mean(f"{units}_{side}"))
            for side, bound in (("above", "upper"), ("below", "lower"))
        ]
    if spec.weight is not None and spec.weight.normalize == "batch":
        name, _ = batch_mean(spec)
        over = TOKENS if spec.weighs_tokens else TURNS if spec.weighs_turns else SEQUENCES
        rows.append(
            Metric("weight_divisor", "the mean that weights were divided by (unless it is <= 1e-8)", "ratio", over,
                   "near 1", mean(name))
        )
    return rows


def weight_of_sequence(spec: Spec) -> str:
    """Return the name of a sequence's weight in keys: its own, or the mean over tokens that have their own weights."""
    own = spec.weight is not None and spec.weight.over == "sequence"
    return "sequence_weight" if own else "sequence_mean_weight"


def batch_mean(spec: Spec) -> tuple[str, str]:
    """The sums of weights and of their units that make the mean of `normalize="batch"`."""
    if spec.weighs_tokens:
        return "weight", "tokens_measured"
    return ("turn_weight", "turns_measured") if spec.weighs_turns else ("sequence_weight", "sequences_measured")


def criterion_metrics(criterion: Criterion) -> list[Metric]:
    """The metrics of a criterion, under its label."""
    label, value = criterion.label, f"{criterion.label}/value"
    units = "measured tokens" if criterion.per_token else f"{criterion.over}s with a token to sum over"
    over, center = Over(units, f"{label}/units"), 1.0 if criterion.statistic.log_space else 0.0
    end_center = 0.0 if criterion.over == "token" else center
    return [
        Metric(f"{label}/tokens_rejected_fraction", "tokens that it rejected", "fraction", VALID, "< 0.1",
               mean(f"{label}/tokens")),
        Metric(f"{label}/sequences_rejected_fraction", "non-empty sequences that lost a token to it", "fraction",
               NONEMPTY, "< 0.1", mean(f"{label}/sequences")),
        Metric(f"{label}/mean", "mean of its statistic, each saturated at +-2^37", "its own", over, "inside the bounds",
               mean_around(center, value)),
        Metric(f"{label}/std", "population standard deviation of its statistic, saturated likewise", "its own", over,
               "-", std(value)),
        Metric(f"{label}/min", "minimum of its statistic", "its own", over, "-", minimum(value, end_center)),
        Metric(f"{label}/max", "maximum of its statistic", "its own", over, "-", maximum(value, end_center)),
    ]


FULL_METRICS = [
    *(
        Metric(f"logratio_p{percent:g}", f"percentile {percent:g} of D, from the histogram (within 1/8 of its value)",
               "nats", TOKENS, "-", f"percentile(v, {percent:g})")
        for percent in PERCENTILES
    ),
    Metric("train_prob_mean", "mean exp(train_logp)", "probability", TOKENS, "like rollout's", mean_around(1.0, "q")),
    Metric("rollout_prob_mean", "mean exp(rollout_logp)", "probability", TOKENS, "-", mean_around(1.0, "p")),
    Metric("prob_diff_abs_mean", "mean |exp(train_logp) - exp(rollout_logp)|", "probability", TOKENS, "< 0.02",
           mean("abs_prob_diff")),
    Metric("prob_diff_abs_max", "max |exp(train_logp) - exp(rollout_logp)|", "probability", TOKENS, "< 0.5",
           maximum("abs_prob_diff")),
    Metric("logp_ulps_max", "max distance of the two log-probs in units of the last place, both rounded to float32: "
           "how many numbers apart; saturated at 2^31 - 1", "ulps", TOKENS, "-", maximum("ulps")),
    *(
        Metric(f"tokens_{side}_filled", f"measured tokens with |D| > 1 whose {side}_logp is exactly 0 or -1, after the "
               "kept mass is taken off if the other side knows it", "tokens", EACH, "near 0",
               plain(f"tokens_{side}_filled"))
        for side in ("train", "rollout")
    ),
    Metric("kl_train_rollout_k3", "mean e^-D - 1 + D, D clamped: k3 of KL(train || rollout), as if the trainer had "
           "sampled the tokens", "nats", TOKENS, "like kl_rollout_train_k3", mean("k3_back")),
    Metric("js_divergence", "mean log cosh(D / 2), D clamped: the mean of both policies' k3 to their mixture", "nats",
           TOKENS, "near kl_rollout_train_k3 / 4", mean("log_cosh")),
    Metric("ratio_error_mean", "mean e^|D|, D clamped: the larger of the two probabilities over the smaller", "ratio",
           TOKENS, "< 1.05", mean_around(1.0, "factor")),
    Metric("ratio_beyond_2_fraction", "measured tokens whose ratio is above 2 or below 1/2: |D| > ln 2", "fraction",
           TOKENS, "< 0.01", mean("tokens_beyond_2")),
    *(
        Metric(f"logratio_beyond_{bound:g}_fraction", f"measured tokens with finite |D| >= {bound:g}, from the "
               f"histogram: the ratio is {math.exp(bound):.3g} or more, or its inverse or less", "fraction", TOKENS,
               "-", f"beyond(v, {bound:g}) / n")
        for bound in TAILS
    ),
    Metric("prob_correlation", "Pearson correlation of the two probabilities (0 where either is constant)", "-", TOKENS,
           "> 0.99", "correlation('p', 'q', 'p2', 'q2', 'pq', n)"),
]
# fmt: on


@cached(maxsize=256)
def metrics_of(spec: Spec) -> tuple[Metric, ...]:
    """The rows of the native metrics under a Spec, in the order in which they are reported."""
    rows = list(ALWAYS)
    if spec.measures_turns:
        from . import turns

        rows += turns.METRICS
    if spec.weight is not None:
        rows += weight_metrics(spec)
    for criterion in spec.criteria:
        rows += criterion_metrics(criterion)
    return (*rows, *percentiles_of_weight(spec), *FULL_METRICS) if spec.detail == "full" else tuple(rows)


def on_dashboard(rows: Iterable[Metric]) -> tuple[Metric, ...]:
    """The rows that a dashboard shows, in its order."""
    by_key = {row.key: row for row in rows}
    return tuple(by_key[key] for key in DASHBOARD if key in by_key)


@cached(maxsize=256)
def dashboard_of(spec: Spec) -> Readers:
    """The metrics of a Spec that a dashboard shows."""
    return Readers.of(on_dashboard(metrics_of(spec)))


@cached(maxsize=256)
def readers_of(spec: Spec) -> Readers:
    """Sort the metrics of a Spec by how they are read, once for all calls."""
    return Readers.of(metrics_of(spec))

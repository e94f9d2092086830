"""verl's metrics: the keys of verl 0.9.1, by its formulas; docs/dropins_in_depth.md has what differs.

What verl averages over rows it averages over all of them: an empty row (no valid token) counts there with a mean
log-prob of 0, a sum of D of 0 and a mean weight of 0. So it does here, and the number of rows is a statistic.
Exponents of perplexities are capped at 500, and nothing is NaN unless Spec.nonfinite is "propagate".

A criterion is reported under its label if that names the option of `rollout_rs` which it is. No other criterion has
keys of its own, but what it rejects is part of `rollout_rs_masked_fraction`. A "ratio" criterion with the label of a k1
option (k1_bounds="ratio") is reported as k1, the negated log-ratio, and its bounds are mirrored accordingly.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...definition.bounds import outside
from ...definition.correction import Outcome
from ...definition.facts import Named
from ...definition.findings import Findings
from ...definition.tokens import LARGEST_STATISTIC, extrema, select
from ...metrics.collect import totals
from ...metrics.peers import Columns, Interval
from ...specs.correction import Criterion, Spec, Weight
from ...specs.statistics import log_bound
from ..shared.metrics import (
    EPSILON,
    Values,
    beyond_one,
    count,
    exp,
    k3_beyond_clamp,
    log_difference,
    mean,
    negated,
    perplexity,
    population_std,
    prefixed,
    sides,
    squared,
    std_of_weight,
    unbiased_std,
    weight_sides,
)
from .options import RS_OPTIONS

PREFIX = "rollout_corr/"

LOCAL_SUMS: tuple[str, ...] = ()


def columns(spec: Spec, names: Sequence[str]) -> Columns:
    """Names of the statistics."""
    of_tokens, of_sequences = ["k3_beyond"], ["log_difference", "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio"]
    token_maxima, sequence_maxima = [], ["max_log_ppl_diff", "-min_log_ppl_diff"]
    if spec.weight is not None:
        of_sequences += ["means_above", "means_below"]
        if spec.weight.per_token:
            of_tokens += ["tokens_below"]
        else:
            of_sequences += ["rows_above", "rows_below"]
            sequence_maxima += ["max_log_weight", "-min_log_weight"]
    for criterion, own in zip(spec.criteria, names, strict=True):
        if not _is_option(criterion):
            continue
        over_tokens = criterion.over == "token"
        units = of_tokens if over_tokens else of_sequences
        units += [f"{own}/{name}" for name in ("clamped", "clamped2")]
        of_sequences += [f"{own}/{name}" for name in ("stat", "row", "row2", "row_above", "row_below")]
        sequence_maxima += [f"{own}/max_row", f"{own}/-min_row"]
        if over_tokens:
            of_tokens += [f"{own}/{name}" for name in ("above", "below")]
            token_maxima += [f"{own}/max_stat", f"{own}/-min_stat"]
    if spec.criteria:
        of_sequences += ["rows_rejected"]
    found = Columns(
        token_sums=tuple(of_tokens),
        sequence_sums=tuple(of_sequences),
        call_sums=("rows",),
        token_maxima=tuple(token_maxima),
        sequence_maxima=tuple(sequence_maxima),
    )
    return found.prefixed("verl")


def role(criterion: Criterion) -> str | None:
    """Return "option" for an option of `rollout_rs`, else None."""
    return "option" if _is_option(criterion) else None


def intervals(spec: Spec, names: Sequence[str]) -> dict[str, Interval]:
    """The bounds of the log-weight, and of each option's statistic."""
    found: dict[str, Interval] = {}
    if spec.weight is not None:
        low, high = _bounds(spec.weight)
        found["verl/log"] = log_bound(low), log_bound(high)
    of_options = zip(names, spec.criteria, strict=True)
    return found | {f"verl/{own}": _limits(criterion) for own, criterion in of_options if _is_option(criterion)}


def _is_option(criterion: Criterion) -> bool:
    stat = "k1" if criterion.stat == "ratio" else criterion.stat
    return RS_OPTIONS.get(criterion.label) == (stat, criterion.over, criterion.reduce)


def _bounds(weight: Weight) -> tuple[float | None, float | None]:
    """verl's lower bound of a truncated weight is 1/upper, for its metrics alone."""
    lower = weight.low
    if lower is None and weight.high is not None:
        lower = 1.0 / weight.high
    return lower, weight.high


# --- on the device ---


def collect(block: Findings, spec: Spec) -> tuple[Named, Named]:
    """Sums and maxima of some whole sequences. Only of those with a measured token: `metrics` adds the others."""
    some, n, difference = block.n_measured > 0, block.n_measured, log_difference(block)
    gap = difference / n.clamp(min=1)
    sums: Named = {"k3_beyond": k3_beyond_clamp(block.tokens)}
    rows: Named = {"log_difference": difference, "log_ppl_diff": gap, "log_ppl_abs_diff": gap.abs()}
    rows["ppl_ratio"] = select(some, perplexity(gap))
    maxima: Named = {}
    maxima["-min_log_ppl_diff"], maxima["max_log_ppl_diff"] = extrema(gap, some)
    if spec.weight is not None:
        _collect_weight(block, spec, spec.weight, sums, maxima, rows)
    for outcome in block.decision.outcomes:
        if _is_option(outcome.criterion):
            of_units = _collect_tokens if outcome.criterion.over == "token" else _collect_sequences
            of_units(outcome, block, sums, maxima, rows)
    if spec.criteria:
        rows["rows_rejected"] = block.facts.kept < block.facts.tokens
    sums.update(totals(rows, None))
    return prefixed("verl", sums), prefixed("verl", maxima)


def per_call(sums: Named, maxima: Named, spec: Spec) -> tuple[Named, Named]:
    """The number of rows, empty ones included."""
    return {"verl/rows": sums["rows"]}, {}


def _collect_weight(block: Findings, spec: Spec, weight: Weight, sums: Named, maxima: Named, rows: Named) -> None:
    tokens, weighing = block.tokens, block.weighing
    if weighing is None:
        return
    low, high = (log_bound(bound) for bound in _bounds(weight))
    weight_sides(block, spec, low, high, rows, maxima)
    if weight.per_token:
        sums["tokens_below"] = count(outside(weighing.log_ratio, low, None)[1], tokens.measured)


def _statistic(outcome: Outcome) -> tuple[Tensor, float | None, float | None]:
    """A criterion's statistic as verl's k1, k2 or k3, and the bounds within which it is kept."""
    value = -outcome.value if outcome.criterion.stat == "ratio" else outcome.value
    return value, *_limits(outcome.criterion)


def _limits(criterion: Criterion) -> Interval:
    """The bounds of a criterion's statistic as verl's k1, k2 or k3."""
    if criterion.stat == "ratio":
        return negated(log_bound(criterion.high)), negated(log_bound(criterion.low))
    return criterion.low if criterion.stat == "k1" else 0.0, criterion.high


def _collect_sequences(outcome: Outcome, block: Findings, sums: Named, maxima: Named, rows: Named) -> None:
    stat, low, high = _statistic(outcome)
    label, n = outcome.criterion.label, block.n_measured
    clamped = stat.clamp(low, high)
    _collect_rows(label, stat, outcome.among, low, high, maxima, rows)
    for name, x in (("stat", stat), ("clamped", clamped), ("clamped2", clamped * clamped)):
        rows[f"{label}/{name}"] = select(outcome.among, n * x)


def _collect_tokens(outcome: Outcome, block: Findings, sums: Named, maxima: Named, rows: Named) -> None:
    stat, low, high = _statistic(outcome)
    label, measured, n = outcome.criterion.label, outcome.among, block.n_measured
    # Float64: what lies at the bound lies far from the center, and its spread would drown in rounding.
    counted, clamped = select(measured, stat), select(measured, stat.clamp(low, high)).double()
    counted = counted.clamp(-LARGEST_STATISTIC, LARGEST_STATISTIC)
    rows[f"{label}/stat"] = block.tokens.sequences.sum(counted)
    _collect_rows(label, rows[f"{label}/stat"] / n.clamp(min=1), n > 0, low, high, maxima, rows)
    sums.update({f"{label}/clamped": clamped.sum(), f"{label}/clamped2": (clamped * clamped).sum()})
    for side, which in zip(("above", "below"), outside(stat, low, high), strict=True):
        sums[f"{label}/{side}"] = count(which, measured)
    maxima[f"{label}/-min_stat"], maxima[f"{label}/max_stat"] = extrema(stat, measured)


def _collect_rows(
    label: str, row: Tensor, some: Tensor | None, low: float | None, high: float | None, maxima: Named, rows: Named
) -> None:
    rows.update({f"{label}/row": select(some, row), f"{label}/row2": select(some, row * row)})
    rows.update(sides(f"{label}/row", row, low, high, some))
    maxima[f"{label}/-min_row"], maxima[f"{label}/max_row"] = extrema(row, some)


# --- on the host ---


def metrics(values: Values, spec: Spec) -> dict[str, float]:
    """verl's keys."""
    found: dict[str, float] = {}
    if spec.weight is not None:
        found |= _importance(values, spec, spec.weight)
    for criterion in filter(_is_option, spec.criteria):
        found |= _rejection(values, criterion)
    if spec.criteria:
        found["rollout_rs_masked_fraction"] = mean(values["tokens"] - values["tokens_kept"], values["tokens"])
        found["rollout_rs_seq_masked_fraction"] = mean(values["verl/rows_rejected"], values["verl/rows"])
    found |= _off_policy(values)
    if not values["tokens_measured"]:
        found = dict.fromkeys(found, 0.0)
    return {PREFIX + key: value for key, value in found.items()}


def _empty(v: Values) -> float:
    """Rows without a measured token."""
    return v["verl/rows"] - v["sequences_measured"]


def _with_empty(v: Values, largest: float, of_empty: float) -> float:
    """A maximum over all rows, from the one over measured rows."""
    return max(largest, of_empty) if _empty(v) else largest


def _importance(v: Values, spec: Spec, weight: Weight) -> dict[str, float]:
    n, rows, empty = v["tokens_measured"], v["verl/rows"], _empty(v)
    lower, upper = _bounds(weight)
    found: dict[str, float] = {}
    average, square = mean(v["weight"], n), mean(v["weight2"], n)
    if weight.per_token:
        found["rollout_is_max"] = v["max_weight"]
        found["rollout_is_min"] = 0.0 - v["-min_weight"]
        found["rollout_is_ratio_fraction_high"] = mean(v["tokens_above"], n)
        found["rollout_is_ratio_fraction_low"] = mean(v["verl/tokens_below"], n)
    else:
        empty_above, empty_below = beyond_one(lower, upper)
        found["rollout_is_max"] = exp(min(_with_empty(v, v["verl/max_log_weight"], 0.0), spec.clamp))
        found["rollout_is_min"] = exp(-_with_empty(v, v["verl/-min_log_weight"], 0.0))
        found["rollout_is_ratio_fraction_high"] = mean(v["verl/rows_above"] + empty * empty_above, rows)
        found["rollout_is_ratio_fraction_low"] = mean(v["verl/rows_below"] + empty * empty_below, rows)
    found["rollout_is_mean"] = average
    found["rollout_is_std"] = std_of_weight(v["weight"], v["weight2"], v["weight_around_one2"], n)
    found["rollout_is_eff_sample_size"] = squared(average + EPSILON) / square if square > 0.0 else 0.0
    # The mean weight of an empty row is 0.
    around_one = v["sequence_weight_around_one2"] + empty
    found["rollout_is_seq_mean"] = mean(v["sequence_weight"], rows)
    found["rollout_is_seq_std"] = std_of_weight(
        v["sequence_weight"], v["sequence_weight2"], around_one, rows, unbiased=True
    )
    found["rollout_is_seq_max"] = v["max_sequence_weight"]
    found["rollout_is_seq_min"] = 0.0 - _with_empty(v, v["-min_sequence_weight"], 0.0)
    farthest = max(v["max_sequence_weight"] - 1.0, v["-min_sequence_weight"] + 1.0)
    found["rollout_is_seq_max_deviation"] = _with_empty(v, farthest, 1.0)
    below = v["verl/means_below"] + empty * (lower is not None and lower > 0.0)
    found["rollout_is_seq_fraction_high"] = mean(v["verl/means_above"], rows)
    found["rollout_is_seq_fraction_low"] = mean(below, rows)
    if weight.outside == "zero":
        found["rollout_is_oob_ratio"] = mean(v["tokens_above"] + v["tokens_below"], n)
    if weight.normalize == "batch":
        by_row = mean(v["sequence_weight"], v["sequences_measured"])
        factor = average if weight.per_token else by_row
        found["rollout_is_batch_norm_factor"] = factor if factor > EPSILON else 1.0
    return found


def _rejection(v: Values, criterion: Criterion) -> dict[str, float]:
    label, tokens = criterion.label, v["tokens_measured"]
    over_tokens = criterion.over == "token"
    rows = v["sequences_measured"] if over_tokens else v[f"{label}/units"]

    def own(name: str) -> float:
        return v[f"verl/{label}/{name}"]

    high, low = mean(own("row_above"), rows), mean(own("row_below"), rows)
    largest, smallest = (own("max_row"), -own("-min_row")) if rows else (0.0, 0.0)
    found = {
        "mean": mean(own("stat"), tokens),
        "max": own("max_stat") if over_tokens else largest,
        "min": -own("-min_stat") if over_tokens else smallest,
        "fraction_high": mean(own("above"), tokens) if over_tokens else high,
        "fraction_low": mean(own("below"), tokens) if over_tokens else low,
        "std": population_std(own("clamped"), own("clamped2"), tokens),
        "seq_mean": mean(own("row"), rows),
        "seq_std": unbiased_std(own("row"), own("row2"), rows),
        "seq_max": largest,
        "seq_min": smallest,
        "seq_max_deviation": max(largest, -smallest),
        "seq_fraction_high": high,
    }
    if criterion.stat in ("k1", "ratio"):
        found["seq_fraction_low"] = low
    found["masked_fraction"] = mean(v[f"{label}/tokens"], v["tokens"])
    found["seq_masked_fraction"] = mean(v[f"{label}/sequences"], v["sequences"])
    return {f"rollout_rs_{label}_{name}": value for name, value in found.items()}


def _off_policy(v: Values) -> dict[str, float]:
    n, rows, empty = v["tokens_measured"], v["verl/rows"], _empty(v)
    return {
        "training_ppl": mean(v["train_ppl"] + empty, rows),
        "training_log_ppl": mean(v["train_log_ppl"], rows),
        "kl": mean(v["verl/log_difference"], n),
        "k3_kl": mean(v["k3"] + v["verl/k3_beyond"], n),
        "rollout_ppl": mean(v["rollout_ppl"] + empty, rows),
        "rollout_log_ppl": mean(v["rollout_log_ppl"], rows),
        "log_ppl_diff": mean(v["verl/log_ppl_diff"], rows),
        "log_ppl_abs_diff": mean(v["verl/log_ppl_abs_diff"], rows),
        "log_ppl_diff_max": _with_empty(v, v["verl/max_log_ppl_diff"], 0.0),
        "log_ppl_diff_min": 0.0 - _with_empty(v, v["verl/-min_log_ppl_diff"], 0.0),
        "ppl_ratio": mean(v["verl/ppl_ratio"] + empty, rows),
        "chi2_token": mean(v["ratio2"] + 2.0 * v["ratio"], n),
        "chi2_seq": mean(v["chi2_sequence"], rows),
    }

"""verl's metrics: the keys of verl 0.9.1, by its formulas; docs/dropins_in_depth.md has what differs.

What verl averages over rows it averages over all of them: an empty row (no valid token) counts there with a mean
log-prob of 0, a sum of D of 0 and a mean weight of 0. So it does here, and the number of rows is a statistic.
Exponents of perplexities are capped at 500, and nothing is NaN unless Spec.nonfinite is "propagate".

A criterion is reported under its label if that names the option of `rollout_rs` which it is. No other criterion has
keys of its own, but what it rejects is part of `rollout_rs_masked_fraction`. A "ratio" criterion with the label of a k1
option (k1_bounds="ratio") is reported as k1, the negated log-ratio, and its bounds are mirrored accordingly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...definition.bounds import outside
from ...definition.correction import Outcome
from ...definition.facts import Named
from ...definition.findings import Findings
from ...definition.tokens import LARGEST_STATISTIC, extrema, select
from ...metrics.collect import totals
from ...metrics.peers import Columns, Interval
from ...specs.caches import cached
from ...specs.correction import Criterion, Spec, Weight
from ...specs.statistics import log_bound
from ..shared.metrics import (
    EPSILON,
    SIDES,
    beyond_one,
    count,
    k3_beyond_clamp,
    log_difference,
    negated,
    perplexity,
    prefixed,
    sides,
    weight_sides,
    with_empty,
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

N, ROWS, SOME = "'tokens_measured'", "'verl/rows'", "'sequences_measured'"
# Rows without a measured token.
EMPTY = f"({ROWS} - {SOME})"


@cached(maxsize=64)
def formulas(spec: Spec) -> Mapping[str, str]:
    """verl's keys; all 0 without a measured token."""
    found = {} if spec.weight is None else _importance(spec, spec.weight)
    for criterion in filter(_is_option, spec.criteria):
        found |= _rejection(criterion)
    if spec.criteria:
        found["rollout_rs_masked_fraction"] = "('tokens' - 'tokens_kept') / 'tokens'"
        found["rollout_rs_seq_masked_fraction"] = f"'verl/rows_rejected' / {ROWS}"
    return {PREFIX + key: f"{formula} if {N} else 0.0" for key, formula in (found | OFF_POLICY).items()}


def _largest(of_measured: str, of_empty: str) -> str:
    """A maximum over all rows, from the one over measured rows."""
    return f"(larger({of_measured}, {of_empty}) if {EMPTY} else {of_measured})"


def _most(name: str) -> str:
    return _largest(f"'{name}'", "0.0")


OFF_POLICY = {
    "training_ppl": f"('train_ppl' + {EMPTY}) / {ROWS}",
    "training_log_ppl": f"'train_log_ppl' / {ROWS}",
    "kl": f"'verl/log_difference' / {N}",
    "k3_kl": f"('k3' + 'verl/k3_beyond') / {N}",
    "rollout_ppl": f"('rollout_ppl' + {EMPTY}) / {ROWS}",
    "rollout_log_ppl": f"'rollout_log_ppl' / {ROWS}",
    "log_ppl_diff": f"'verl/log_ppl_diff' / {ROWS}",
    "log_ppl_abs_diff": f"'verl/log_ppl_abs_diff' / {ROWS}",
    "log_ppl_diff_max": _most("verl/max_log_ppl_diff"),
    "log_ppl_diff_min": f"0.0 - {_most('verl/-min_log_ppl_diff')}",
    "ppl_ratio": f"('verl/ppl_ratio' + {EMPTY}) / {ROWS}",
    "chi2_token": f"('ratio2' + 2.0 * 'ratio') / {N}",
    "chi2_seq": f"'chi2_sequence' / {ROWS}",
}


def _importance(spec: Spec, weight: Weight) -> dict[str, str]:
    lower, upper = _bounds(weight)
    beyond = zip(SIDES, beyond_one(lower, upper), strict=True)
    above, below = (with_empty(f"'verl/rows_{side}'", EMPTY, counts) for side, counts in beyond)

    average, square = f"'weight' / {N}", f"'weight2' / {N}"
    of_tokens = {
        "rollout_is_max": "'max_weight'",
        "rollout_is_min": "0.0 - '-min_weight'",
        "rollout_is_ratio_fraction_high": f"'tokens_above' / {N}",
        "rollout_is_ratio_fraction_low": f"'verl/tokens_below' / {N}",
    }
    of_rows = {
        "rollout_is_max": f"exp(smaller({_most('verl/max_log_weight')}, {spec.clamp!r}))",
        "rollout_is_min": f"exp(-{_most('verl/-min_log_weight')})",
        "rollout_is_ratio_fraction_high": f"{above} / {ROWS}",
        "rollout_is_ratio_fraction_low": f"{below} / {ROWS}",
    }
    sums = "'sequence_weight', 'sequence_weight2'"
    farthest = "larger('max_sequence_weight' - 1.0, '-min_sequence_weight' + 1.0)"
    # The mean weight of an empty row is 0.
    low = with_empty("'verl/means_below'", EMPTY, lower is not None and lower > 0.0)
    found = (of_tokens if weight.per_token else of_rows) | {
        "rollout_is_mean": average,
        "rollout_is_std": f"std_of_weight('weight', 'weight2', 'weight_around_one2', {N})",
        "rollout_is_eff_sample_size": f"(squared({average} + {EPSILON}) / ({square}) if {square} > 0.0 else 0.0)",
        "rollout_is_seq_mean": f"'sequence_weight' / {ROWS}",
        "rollout_is_seq_std": f"unbiased_std_of_weight({sums}, 'sequence_weight_around_one2' + {EMPTY}, {ROWS})",
        "rollout_is_seq_max": "'max_sequence_weight'",
        "rollout_is_seq_min": f"0.0 - {_most('-min_sequence_weight')}",
        "rollout_is_seq_max_deviation": _largest(farthest, "1.0"),
        "rollout_is_seq_fraction_high": f"'verl/means_above' / {ROWS}",
        "rollout_is_seq_fraction_low": f"{low} / {ROWS}",
    }
    if weight.outside == "zero":
        found["rollout_is_oob_ratio"] = f"('tokens_above' + 'tokens_below') / {N}"
    if weight.normalize == "batch":
        factor = average if weight.per_token else f"'sequence_weight' / {SOME}"
        found["rollout_is_batch_norm_factor"] = f"({factor} if {factor} > {EPSILON} else 1.0)"
    return found


def _rejection(criterion: Criterion) -> dict[str, str]:
    label, over_tokens = criterion.label, criterion.over == "token"
    rows = SOME if over_tokens else f"'{label}/units'"

    def own(name: str) -> str:
        return f"'verl/{label}/{name}'"

    high, low = f"{own('row_above')} / {rows}", f"{own('row_below')} / {rows}"
    largest, smallest = f"({own('max_row')} if {rows} else 0.0)", f"(-{own('-min_row')} if {rows} else 0.0)"
    found = {
        "mean": f"{own('stat')} / {N}",
        "max": own("max_stat") if over_tokens else largest,
        "min": f"-{own('-min_stat')}" if over_tokens else smallest,
        "fraction_high": f"{own('above')} / {N}" if over_tokens else high,
        "fraction_low": f"{own('below')} / {N}" if over_tokens else low,
        "std": f"population_std({own('clamped')}, {own('clamped2')}, {N})",
        "seq_mean": f"{own('row')} / {rows}",
        "seq_std": f"unbiased_std({own('row')}, {own('row2')}, {rows})",
        "seq_max": largest,
        "seq_min": smallest,
        "seq_max_deviation": f"larger({largest}, -{smallest})",
        "seq_fraction_high": high,
    }
    if criterion.stat in ("k1", "ratio"):
        found["seq_fraction_low"] = low
    found["masked_fraction"] = f"'{label}/tokens' / 'tokens'"
    found["seq_masked_fraction"] = f"'{label}/sequences' / 'sequences'"
    return {f"rollout_rs_{label}_{name}": formula for name, formula in found.items()}

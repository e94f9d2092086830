"""The native metrics of the oracle, each straight from the formula in the table of metrics."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

from oracles.correction import measured, rejects_nonfinite
from oracles.numbers import D_RANGE, STAT_RANGE, add, clamp, exp, k3, probability, saturate

PERCENTILES = 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 99.99
PERCENTILES_OF_WEIGHTS = 1, 5, 25, 50, 75, 95, 99


def mean(values):
    values = list(values)
    return add(values) / len(values) if values else 0.0


def std(values):
    """Population, by the two-pass formula."""
    center = mean(values)
    return math.sqrt(mean([(v - center) ** 2 for v in values]))


def ess(values):
    return add(values) ** 2 / (len(values) * add(v * v for v in values)) if any(values) else 0.0


def pearson(xs, ys):
    """0 where either is constant: its variance is rounding, next to its squares around 1."""
    if any(std(zs) ** 2 <= 1e-12 * mean((z - 1.0) ** 2 for z in zs) for zs in (xs, ys)):
        return 0.0
    mx, my = mean(xs), mean(ys)
    return mean((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / (std(xs) * std(ys))


def percentile(values, percent):
    """The smallest value that at least `percent` per cent of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100.0 * len(ordered)) - 1, 0)] if ordered else 0.0


def extremes(prefix, values):
    return {f"{prefix}_min": min(values, default=0.0), f"{prefix}_max": max(values, default=0.0)}


def metrics(answer, spec):
    """Every native metric of one batch. Percentiles are exact ones, not those of a histogram."""
    rows = [[row[t] for t in measured(row, range(len(row)))] for row in answer.tokens]
    rows = [row for row in rows if row]
    tokens = [token for row in rows for token in row]
    found = counts(answer, spec, rows) | of_d(spec, rows) | perplexities(rows)
    if spec.measures_turns:
        found |= of_turns(answer, spec)
    if spec.weight is not None:
        found |= of_weights(answer, spec)
    for outcome in answer.outcomes:
        found |= of_criterion(answer, spec, outcome)
    if spec.detail == "full":
        found |= of_probabilities(spec, tokens)
    if spec.weight is not None and spec.weight.normalize in ("sequence", "group"):
        found |= of_divisors(answer, spec)
    if spec.reads_entropy:
        found |= of_entropy(answer, found["kl_rollout_train_k3"])
    if spec.reads_versions:
        found |= of_ages(answer)
    return found


def at_valid(answer, value):
    """A value, of sequence and place, at every valid token."""
    pairs = zip(answer.sequences, answer.tokens, strict=True)
    return [value(q, t) for q, row in pairs for t, token in enumerate(row) if token is not None]


def counts(answer, spec, rows):
    valid = [sum(t is not None for t in row) for row in answer.tokens]
    kept = [n - sum(lost) for n, lost in zip(valid, answer.rejected, strict=True)]
    differing = [[t is not None and (not t.finite or t.d != 0.0) for t in row] for row in answer.tokens]
    stands = list(zip(answer.keep, valid, kept, strict=True))
    found = {
        "tokens": sum(valid),
        "tokens_nonfinite": sum(t is not None and not t.finite for row in answer.tokens for t in row),
        "tokens_differing": sum(map(sum, differing)),
        "tokens_clamped": sum(abs(t.d) > spec.clamp for row in rows for t in row),
        "tokens_kept": sum(kept),
        "sequences": sum(n > 0 for n in valid),
        "sequences_differing": sum(map(any, differing)),
        "sequences_clamped": sum(abs(add(saturate(t.d, D_RANGE) for t in row)) > spec.clamp for row in rows),
        "sequences_kept": sum(n > 0 and keep for keep, n, _ in stands),
        "sequences_without_survivors": sum(n > 0 and keep and not some for keep, n, some in stands),
    }
    for unit in ("tokens", "sequences"):
        found[f"{unit}_kept_fraction"] = found[f"{unit}_kept"] / found[unit] if found[unit] else 0.0
    found["tokens_differing_fraction"] = found["tokens_differing"] / found["tokens"] if found["tokens"] else 0.0
    return found


def of_d(spec, rows):
    d = [t.d for row in rows for t in row]
    summed = [saturate(x, D_RANGE) for x in d]
    ratio = [exp(clamp(x, spec.clamp)) for x in d]
    totals = [add(saturate(t.d, D_RANGE) for t in row) for row in rows]
    return extremes("logratio", d) | {
        "logratio_mean": mean(summed),
        "logratio_abs_mean": mean([abs(x) for x in summed]),
        "logratio_std": std(summed),
        "logratio_abs_max": max(map(abs, d), default=0.0),
        "kl_rollout_train_k1": -mean(summed),
        "kl_rollout_train_k2": mean([x * x / 2.0 for x in summed]),
        "kl_rollout_train_k3": mean([k3(clamp(x, spec.clamp)) for x in d]),
        "ratio_mean": mean(ratio),
        "ratio_std": std(ratio),
        "chi2_train_rollout": mean([math.expm1(2.0 * clamp(x, spec.clamp)) for x in d]),
        "sequence_chi2_train_rollout": mean([math.expm1(2.0 * clamp(x, spec.clamp)) for x in totals]),
        "sequence_logratio_abs_mean": mean([abs(x) for x in totals]),
        "sequence_logratio_abs_max": max(map(abs, totals), default=0.0),
    }


def perplexities(rows):
    train = [-mean([t.train for t in row]) for row in rows]
    rollout = [-mean([t.rollout for t in row]) for row in rows]
    differences = [-mean([saturate(t.d, D_RANGE) for t in row]) for row in rows]
    return extremes("sequence_log_ppl_diff", differences) | {
        "sequence_train_ppl_mean": mean([exp(x) for x in train]),
        "sequence_rollout_ppl_mean": mean([exp(x) for x in rollout]),
        "sequence_train_log_ppl_mean": mean(train),
        "sequence_rollout_log_ppl_mean": mean(rollout),
        "sequence_log_ppl_diff_mean": mean(differences),
        "sequence_log_ppl_diff_abs_mean": mean([abs(x) for x in differences]),
        "sequence_ppl_ratio_mean": mean([exp(x) for x in differences]),
    }


def of_turns(answer, spec):
    """Metrics of turns; those of a place are over the tokens of the first, middle or last measured turns."""
    found = {"turns": 0, "turns_kept": 0}
    sums, places = [], {"first": [], "middle": [], "last": []}
    for sequence, row, keep in zip(answer.sequences, answer.tokens, answer.keep_turns, strict=True):
        turns = sequence.units("turn")
        for turn, kept in zip(turns, keep, strict=True):
            some = any(row[t] is not None for t in turn)
            found["turns"] += some
            found["turns_kept"] += some and kept
        some = [[row[t].d for t in measured(row, turn)] for turn in turns]
        some = [ds for ds in some if ds]
        for i, ds in enumerate(some):
            places["first" if i == 0 else "last" if i == len(some) - 1 else "middle"] += ds
            sums.append(add(saturate(d, D_RANGE) for d in ds))
    found |= {
        "turns_kept_fraction": found["turns_kept"] / found["turns"] if found["turns"] else 0.0,
        "turn_chi2_train_rollout": mean([math.expm1(2.0 * clamp(x, spec.clamp)) for x in sums]),
        "turn_logratio_abs_mean": mean([abs(x) for x in sums]),
        "turn_logratio_abs_max": max(map(abs, sums), default=0.0),
    }
    for name, ds in places.items():
        found[f"{name}_turn_token_kl_rollout_train_k1"] = -mean([saturate(d, D_RANGE) for d in ds])
        found[f"{name}_turn_token_logratio_abs_mean"] = mean([abs(saturate(d, D_RANGE)) for d in ds])
        found[f"{name}_turn_token_kl_rollout_train_k3"] = mean([k3(clamp(d, spec.clamp)) for d in ds])
    return found


def of_weights(answer, spec):
    """Per token; per sequence, by the mean of its tokens' weights unless it has its own; per turn that has its own."""
    weight = spec.weight
    of_tokens = [
        [one for one in zip(*columns, strict=True) if one[0] is not None]
        for columns in zip(answer.raw, answer.bounded, answer.growths, strict=True)
    ]
    of_tokens = [row for row in of_tokens if row]
    levels = {
        "weight": [unit for row in of_tokens for unit in row],
        "sequence_weight" if weight.over == "sequence" else "sequence_mean_weight": [
            (mean(raw for raw, _, _ in row), mean(w for _, w, _ in row), 1.0) for row in of_tokens
        ],
    }
    if weight.over == "turn":
        levels["turn_weight"] = [(raw, w, 1.0) for units in answer.units for raw, w in units]
    found = {}
    for name, values in levels.items():
        for key, ws in ((name, [w for _, w, _ in values]), (f"{name}_before_bounds", [raw for raw, _, _ in values])):
            found |= {f"{key}_mean": mean(ws), f"{key}_std": std(ws), f"{key}_ess": ess(ws)} | extremes(key, ws)
        above = [weight.upper is not None and raw > weight.upper**growth for raw, _, growth in values]
        below = [weight.lower is not None and raw < weight.lower**growth for raw, _, growth in values]
        found |= {f"{name}_above_upper_fraction": mean(above), f"{name}_below_lower_fraction": mean(below)}
    if spec.detail == "full" and weight.over != "prefix":
        key = {"token": "weight"}.get(weight.over, f"{weight.over}_weight")
        raws = [raw for raw, _, _ in levels[key]]
        found |= {f"{key}_before_bounds_p{percent}": percentile(raws, percent) for percent in PERCENTILES_OF_WEIGHTS}
    if weight.normalize == "batch":
        found["weight_divisor"] = mean(w for units in answer.units for _, w in units)
    return found


def of_divisors(answer, spec):
    """The means by which weights of sequences were divided, but of those that a token which is not finite rejects."""
    rows = zip(answer.divided, answer.units, answer.tokens, strict=True)
    some = [x for x, units, row in rows if x is not None and units and not rejects_nonfinite(spec, [row])]
    divisors = [x for x in some if not x <= 1e-8]
    return extremes("sequence_weight_divisor", divisors) | {"sequences_undivided": len(some) - len(divisors)}


def of_criterion(answer, spec, outcome):
    values = [v for row in outcome.values for v in row if v is not None]
    if outcome.criterion.stat in ("entropy", "external"):
        values = [v for v in values if math.isfinite(v)]
    center = 1.0 if outcome.criterion.stat == "ratio" else 0.0
    if outcome.criterion.stat == "ratio":
        values = [exp(clamp(v, spec.clamp)) for v in values]
    summed = [center + clamp(v - center, STAT_RANGE) for v in values]
    lost = [sum(row) for row in outcome.dropped]
    valid = [sum(t is not None for t in row) for row in answer.tokens]
    tokens, sequences = sum(valid), sum(map(bool, valid))
    found = {
        "tokens_rejected_fraction": sum(lost) / tokens if tokens else 0.0,
        "sequences_rejected_fraction": sum(map(bool, lost)) / sequences if sequences else 0.0,
        "mean": mean(summed),
        "std": std(summed),
        "min": min(values, default=0.0),
        "max": max(values, default=0.0),
    }
    return {f"{outcome.criterion.label}/{key}": value for key, value in found.items()}


def ulps(x):
    """The place of a number among all float32, by their bits: those below 0 count down."""
    (bits,) = struct.unpack("i", struct.pack("f", x))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def reaches(d, bound):
    """Whether |D| is a bound or more once it is a float32, whose bits the histogram counts by."""
    return struct.unpack("f", struct.pack("f", min(abs(d), 1e6)))[0] >= bound


def of_probabilities(spec, tokens):
    """Those of the full detail; the Jensen-Shannon divergence as NeMo RL has it, by k3 of each to their mean."""
    p, q = [probability(t.rollout) for t in tokens], [probability(t.train) for t in tokens]
    gaps = [abs(a - b) for a, b in zip(p, q, strict=True)]
    d = [clamp(t.d, spec.clamp) for t in tokens]
    # The log of the mean of both probabilities, over the rollout's.
    middle = [math.log1p(0.5 * math.expm1(x)) for x in d]
    return {f"logratio_p{percent:g}": percentile([t.d for t in tokens], percent) for percent in PERCENTILES} | {
        "train_prob_mean": mean(q),
        "rollout_prob_mean": mean(p),
        "prob_diff_abs_mean": mean(gaps),
        "prob_diff_abs_max": max(gaps, default=0.0),
        "prob_correlation": pearson(p, q),
        "logp_ulps_max": max(
            (min(2**31 - 1, abs(ulps(t.train) - ulps(t.rollout))) for t in tokens if t.finite), default=0
        ),
        "tokens_train_filled": sum(t.train in (0.0, -1.0) and abs(t.d) > 1.0 for t in tokens),
        "tokens_rollout_filled": sum(t.rollout in (0.0, -1.0) and abs(t.d) > 1.0 for t in tokens),
        "kl_train_rollout_k3": mean([k3(-x) for x in d]),
        "js_divergence": mean([0.5 * (k3(x - m) + k3(-m)) for x, m in zip(d, middle, strict=True)]),
        "ratio_error_mean": mean([exp(abs(x)) for x in d]),
        "ratio_beyond_2_fraction": mean([float(abs(x) > math.log(2.0)) for x in d]),
        **{
            f"logratio_beyond_{tau}_fraction": mean([float(t.finite and reaches(t.d, tau)) for t in tokens])
            for tau in (0.25, 1, 4)
        },
    }


def of_entropy(answer, k3_mean):
    """Those of the entropy, at valid tokens where it is finite."""
    valid = at_valid(answer, lambda q, t: q.external["entropy"][t])
    finite = [h for h in valid if math.isfinite(h)]
    average = mean(finite)
    gaps = [h + t for h, t in at_valid(answer, lambda q, t: (q.external["entropy"][t], q.train[t]))]
    gaps = [gap for gap in gaps if math.isfinite(gap)]
    return extremes("entropy", finite) | {
        "entropy_gap_mean": mean(gaps),
        "entropy_gap_std": std(gaps),
        "entropy_mean": average,
        "tokens_entropy_nonfinite": len(valid) - len(finite),
        "kl_rollout_train_k3_over_entropy": k3_mean / average if average else 0.0,
    }


def of_ages(answer):
    ages = at_valid(answer, lambda q, t: q.age(t))
    return extremes("age", ages) | {
        "age_mean": mean(ages),
        "tokens_stale_fraction": mean([float(age > 0) for age in ages]),
        "tokens_newer": sum(age < 0 for age in ages),
    }


def of_label(answer, labels, label):
    """The answer, as if only the tokens of one label were valid: their weights and rejections stay what they were."""

    def chosen(rows, nothing):
        pairs = (zip(*one, strict=True) for one in zip(rows, labels, strict=True))
        return [[value if own == label else nothing for value, own in pair] for pair in pairs]

    outcomes = [
        replace(
            one,
            dropped=chosen(one.dropped, False),
            values=chosen(one.values, None) if one.criterion.over in ("token", "prefix") else one.values,
        )
        for one in answer.outcomes
    ]
    raw, bounded = chosen(answer.raw, None), chosen(answer.bounded, None)
    rejected, tokens = chosen(answer.rejected, False), chosen(answer.tokens, None)
    return replace(answer, tokens=tokens, outcomes=outcomes, raw=raw, bounded=bounded, rejected=rejected)

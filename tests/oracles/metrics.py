"""The native metrics of the third oracle, each straight from the formula in the table of metrics."""

from __future__ import annotations

import math

from oracles.correction import D_RANGE, STAT_RANGE, add, clamp, exp, k3, probability, saturate, statistic


def mean(values):
    return add(values) / len(values) if values else 0.0


def std(values):
    """Population, by the two-pass formula."""
    center = mean(values)
    return math.sqrt(mean([(v - center) ** 2 for v in values]))


def ess(values):
    return add(values) ** 2 / (len(values) * add(v * v for v in values)) if any(values) else 0.0


def pearson(xs, ys):
    mx, my = mean(xs), mean(ys)
    dx, dy = [x - mx for x in xs], [y - my for y in ys]
    scale = math.sqrt(add(d * d for d in dx) * add(d * d for d in dy))
    return add(a * b for a, b in zip(dx, dy, strict=True)) / scale if scale > 1e-12 else 0.0


def percentile(values, percent):
    """The smallest value that at least `percent` per cent of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100.0 * len(ordered)) - 1, 0)] if ordered else 0.0


def extremes(found, prefix, values):
    found[f"{prefix}_min"] = min(values, default=0.0)
    found[f"{prefix}_max"] = max(values, default=0.0)


def metrics(answer, spec):
    """Every native metric of one batch. Percentiles are exact ones of D, not those of a histogram."""
    valid = [[t for t in row if t is not None] for row in answer.tokens]
    rows = [[t for t in row if t.measured] for row in valid]
    rows = [row for row in rows if row]
    found = counts(answer, spec, valid, rows)
    found.update(of_d(spec, rows))
    found.update(perplexities(rows))
    if spec.weight is not None:
        found.update(of_weights(answer, spec))
    for criterion, outcome in zip(spec.criteria, answer.outcomes, strict=True):
        found.update(of_criterion(answer, spec, criterion, outcome, valid))
    if spec.detail == "full":
        found.update(of_probabilities(rows))
        found.update(of_both_ways(spec, rows))
    if spec.reads_entropy:
        found.update(of_entropy(answer, found["kl_rollout_train_k3"]))
    if spec.reads_versions:
        found.update(of_ages(answer))
    return found


def of_entropy(answer, k3):
    """Those of the entropy, at valid tokens where it is finite."""
    valid = [
        h
        for row, of_row in zip(answer.tokens, answer.entropies, strict=True)
        for token, h in zip(row, of_row, strict=True)
        if token is not None
    ]
    finite = [h for h in valid if math.isfinite(h)]
    average = mean(finite)
    return {
        "entropy_mean": average,
        "entropy_max": max(finite, default=0.0),
        "entropy_min": min(finite, default=0.0),
        "tokens_entropy_nonfinite": len(valid) - len(finite),
        "kl_rollout_train_k3_over_entropy": k3 / average if average else 0.0,
    }


def of_ages(answer):
    ages = [
        age
        for row, of_row in zip(answer.tokens, answer.ages, strict=True)
        for token, age in zip(row, of_row, strict=True)
        if token is not None
    ]
    stale = mean([float(age > 0) for age in ages])
    return {"age_mean": mean(ages), "age_max": max(ages, default=0.0), "age_min": min(ages, default=0.0)} | {
        "tokens_stale_fraction": stale,
        "tokens_newer": sum(age < 0 for age in ages),
    }


def counts(answer, spec, valid, rows):
    kept = [
        [t is not None and not gone for t, gone in zip(row, lost, strict=True)]
        for row, lost in zip(answer.tokens, answer.rejected, strict=True)
    ]
    nonempty = [s for s, row in enumerate(valid) if row]
    found = {
        "tokens": sum(len(row) for row in valid),
        "tokens_nonfinite": sum(not t.finite for row in valid for t in row),
        "tokens_clamped": sum(abs(t.d) > spec.clamp for row in rows for t in row),
        "tokens_kept": sum(sum(row) for row in kept),
        "sequences": len(nonempty),
        "sequences_clamped": sum(abs(add(saturate(t.d, D_RANGE) for t in row)) > spec.clamp for row in rows),
        "sequences_kept": sum(answer.keep[s] for s in nonempty),
        "sequences_without_survivors": sum(answer.keep[s] and not any(kept[s]) for s in nonempty),
    }
    for unit in ("tokens", "sequences"):
        found[f"{unit}_kept_fraction"] = found[f"{unit}_kept"] / found[unit] if found[unit] else 0.0
    return found


def of_d(spec, rows):
    d = [t.d for row in rows for t in row]
    summed = [saturate(x, D_RANGE) for x in d]
    ratio = [exp(clamp(x, spec.clamp)) for x in d]
    totals = [add(saturate(t.d, D_RANGE) for t in row) for row in rows]
    found = {
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
    extremes(found, "logratio", d)
    return found


def perplexities(rows):
    train = [-mean([t.train for t in row]) for row in rows]
    rollout = [-mean([t.rollout for t in row]) for row in rows]
    differences = [-mean([saturate(t.d, D_RANGE) for t in row]) for row in rows]
    found = {
        "sequence_train_ppl_mean": mean([exp(x) for x in train]),
        "sequence_rollout_ppl_mean": mean([exp(x) for x in rollout]),
        "sequence_train_log_ppl_mean": mean(train),
        "sequence_rollout_log_ppl_mean": mean(rollout),
        "sequence_log_ppl_diff_mean": mean(differences),
        "sequence_log_ppl_diff_abs_mean": mean([abs(x) for x in differences]),
        "sequence_ppl_ratio_mean": mean([exp(x) for x in differences]),
    }
    extremes(found, "sequence_log_ppl_diff", differences)
    return found


def of_weights(answer, spec):
    """Per token over measured tokens; per sequence over sequences that have one, by the mean of its tokens' weights."""
    weight, found = spec.weight, {}
    pairs = [
        [rest for token, *rest in zip(*columns, strict=True) if token is not None and token.measured]
        for columns in zip(answer.tokens, answer.raw, answer.bounded, answer.growths, strict=True)
    ]
    pairs = [row for row in pairs if row]
    units = {
        "": [pair for row in pairs for pair in row],
        "sequence_": [
            (mean([raw for raw, _, _ in row]), mean([bounded for _, bounded, _ in row]), 1.0) for row in pairs
        ],
    }
    for level, values in units.items():
        raws = [raw for raw, _, _ in values]
        name = "sequence_mean_weight" if level and weight.over != "sequence" else f"{level}weight"
        for key, ws in ((name, [bounded for _, bounded, _ in values]), (f"{name}_before_bounds", raws)):
            found.update({f"{key}_mean": mean(ws), f"{key}_std": std(ws), f"{key}_ess": ess(ws)})
            extremes(found, key, ws)
        found[f"{name}_above_upper_fraction"] = mean(
            [float(weight.upper is not None and w > weight.upper**growth) for w, _, growth in values]
        )
        found[f"{name}_below_lower_fraction"] = mean(
            [float(weight.lower is not None and w < weight.lower**growth) for w, _, growth in values]
        )
    if weight.normalize == "batch":
        level = "" if weight.per_token else "sequence_"
        found["weight_divisor"] = found[f"{level}weight_mean"]
    return found


def of_criterion(answer, spec, criterion, outcome, valid):
    if criterion.over != "sequence":
        values = [v for row in outcome.values for v in row if v is not None]
    else:
        values = [v for v in outcome.values if v is not None]
    if criterion.stat == "ratio":
        values = [exp(clamp(v, spec.clamp)) for v in values]
    summed = [clamp(v, STAT_RANGE) for v in values]
    lost = [sum(row) for row in outcome.dropped]
    tokens, sequences = sum(len(row) for row in valid), sum(bool(row) for row in valid)
    found = {
        "tokens_rejected_fraction": sum(lost) / tokens if tokens else 0.0,
        "sequences_rejected_fraction": sum(map(bool, lost)) / sequences if sequences else 0.0,
        "mean": mean(summed),
        "std": std(summed),
        "min": min(values, default=0.0),
        "max": max(values, default=0.0),
    }
    return {f"{criterion.label}/{key}": value for key, value in found.items()}


def of_both_ways(spec, rows):
    """As NeMo RL writes the Jensen-Shannon divergence: k3 of each policy to the mean of the two probabilities."""
    d = [clamp(t.d, spec.clamp) for row in rows for t in row]
    # The log of the mean of both probabilities, over that of the rollout.
    middle = [math.log1p(0.5 * math.expm1(x)) for x in d]
    return {
        "kl_train_rollout_k3": mean([k3(-x) for x in d]),
        "js_divergence": mean([0.5 * (k3(x - m) + k3(-m)) for x, m in zip(d, middle, strict=True)]),
        "ratio_error_mean": mean([exp(abs(x)) for x in d]),
        "ratio_beyond_2_fraction": mean([float(abs(x) > math.log(2.0)) for x in d]),
    }


def of_probabilities(rows):
    tokens = [t for row in rows for t in row]
    p, q = [probability(t.rollout) for t in tokens], [probability(t.train) for t in tokens]
    gaps = [abs(statistic("prob_diff", t, None)) for t in tokens]
    found = {
        "train_prob_mean": mean(q),
        "rollout_prob_mean": mean(p),
        "prob_diff_abs_mean": mean(gaps),
        "prob_diff_abs_max": max(gaps, default=0.0),
        "prob_correlation": pearson(p, q),
    }
    for percent in (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 99.99):
        found[f"logratio_p{percent:g}"] = percentile([t.d for t in tokens], percent)
    return found

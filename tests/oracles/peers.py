"""The peers' metrics as plain Python loops in float64, from the descriptions of the peers alone; slow and obvious.

A batch is a list of rows, a row a list of (train_logp, rollout_logp, valid). It shares nothing with the package.
"""

from __future__ import annotations

import math

SAFE = 20.0


def clamp(x, low, high):
    return max(low, min(high, x))


def safe_exp(x):
    return math.exp(clamp(x, -SAFE, SAFE))


def average(values):
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


def population(values):
    """Biased standard deviation; 0 for one value."""
    center = average(values)
    return math.sqrt(average((x - center) ** 2 for x in values)) if len(values) > 1 else 0.0


def spread(values):
    """Unbiased; 0 for one value."""
    return population(values) * math.sqrt(len(values) / max(len(values) - 1, 1))


def k_of(name, d):
    d = clamp(d, -SAFE, SAFE)
    return {"k1": -d, "k2": 0.5 * d * d, "k3": math.expm1(d) - d}[name]


def deltas(rows):
    """D of the valid tokens, row by row."""
    return [[old - rollout for old, rollout, valid in row if valid] for row in rows]


def mean_logs(rows):
    """Per row: mean train and mean rollout log-prob over valid tokens, 0 for an empty row."""
    valid = [[(old, rollout) for old, rollout, ok in row if ok] for row in rows]
    return [(average(o for o, _ in row), average(r for _, r in row)) for row in valid]


# --- verl ---


def verl(rows, level=None, upper=None, lower=None, normalize=False, options=()):
    """rollout_is = level, with a lower bound for IcePop; options: (name, lower, upper), k1's bounds in log space."""
    found = verl_off_policy(rows)
    if level:
        found |= verl_weights(rows, level, upper, lower, normalize)
    if options:
        found |= verl_rejection(rows, options)
    return {"rollout_corr/" + key: value for key, value in found.items()}


def verl_off_policy(rows):
    logs, d = mean_logs(rows), deltas(rows)
    tokens = [x for row in d for x in row]
    gaps = [b - a for a, b in logs]
    return {
        "training_ppl": average(math.exp(-a) for a, _ in logs),
        "training_log_ppl": average(-a for a, _ in logs),
        "kl": average(-x for x in tokens),
        "k3_kl": average(math.expm1(x) - x for x in tokens),
        "rollout_ppl": average(math.exp(-b) for _, b in logs),
        "rollout_log_ppl": average(-b for _, b in logs),
        "log_ppl_diff": average(gaps),
        "log_ppl_abs_diff": average(abs(gap) for gap in gaps),
        "log_ppl_diff_max": max(gaps),
        "log_ppl_diff_min": min(gaps),
        "ppl_ratio": average(math.exp(gap) for gap in gaps),
        "chi2_token": average(safe_exp(x) ** 2 for x in tokens) - 1.0,
        "chi2_seq": average(safe_exp(math.fsum(row)) ** 2 for row in d) - 1.0,
    }


def verl_weights(rows, level, upper, lower, normalize):
    d = deltas(rows)
    sums = [math.fsum(row) for row in d]
    raw = [[safe_exp(x if level == "token" else s) for x in row] for row, s in zip(d, sums, strict=True)]
    low = 1.0 / upper if lower is None else lower

    def applied(w):
        if lower is None:
            return min(w, upper)
        return w if lower <= w <= upper else 0.0

    weights = [[applied(w) for w in row] for row in raw]
    flat, flat_raw = [w for row in weights for w in row], [w for row in raw for w in row]
    found = {"rollout_is_mean": average(flat)}
    if level == "token":
        found["rollout_is_max"], found["rollout_is_min"] = max(flat), min(flat)
        found["rollout_is_ratio_fraction_high"] = average(w > upper for w in flat_raw)
        found["rollout_is_ratio_fraction_low"] = average(w < low for w in flat_raw)
    else:
        found["rollout_is_max"], found["rollout_is_min"] = math.exp(min(max(sums), SAFE)), math.exp(min(sums))
        found["rollout_is_ratio_fraction_high"] = average(s > math.log(upper) for s in sums)
        found["rollout_is_ratio_fraction_low"] = average(s < math.log(low) for s in sums)
    found["rollout_is_std"] = population(flat)
    center = average(flat)
    squares = average((w / (center + 1e-8)) ** 2 for w in flat)
    found["rollout_is_eff_sample_size"] = 1.0 / squares if squares else 0.0
    q, q_raw = [average(row) for row in weights], [average(row) for row in raw]
    found["rollout_is_seq_mean"], found["rollout_is_seq_std"] = average(q), spread(q)
    found["rollout_is_seq_max"], found["rollout_is_seq_min"] = max(q), min(q)
    found["rollout_is_seq_max_deviation"] = max(abs(x - 1.0) for x in q)
    found["rollout_is_seq_fraction_high"] = average(x > upper for x in q_raw)
    found["rollout_is_seq_fraction_low"] = average(x < low for x in q_raw)
    if lower is not None:
        found["rollout_is_oob_ratio"] = average(w < lower or w > upper for w in flat_raw)
    if normalize:
        factor = average(flat) if level == "token" else average(x for x, row in zip(q, d, strict=True) if row)
        found["rollout_is_batch_norm_factor"] = factor if factor > 1e-8 else 1.0
    return found


def verl_rejection(rows, options):
    d = deltas(rows)
    found, every_keep = {}, [[True] * len(row) for row in d]
    for name, low, high in options:
        unit, k = name.rsplit("_", 1)
        token = [[k_of(k, x) for x in row] for row in d]
        reduce = {
            "token": average,
            "seq_sum": math.fsum,
            "seq_mean": average,
            "seq_max": lambda row: max(row, default=0.0),
        }
        row_values = [reduce[unit](row) for row in token]
        stats = token if unit == "token" else [[r] * len(row) for r, row in zip(row_values, token, strict=True)]
        least = -math.inf if k != "k1" else low
        keep = [[least <= x <= high for x in row] for row in stats]
        every_keep = [[a and b for a, b in zip(x, y, strict=True)] for x, y in zip(every_keep, keep, strict=True)]
        flat = [x for row in stats for x in row]
        valid = [r for r, row in zip(row_values, d, strict=True) if row]
        tested = flat if unit == "token" else valid
        p = f"rollout_rs_{name}_"
        found[p + "mean"] = average(flat)
        found[p + "max"], found[p + "min"] = max(tested), min(tested)
        found[p + "fraction_high"] = average(x > high for x in tested)
        found[p + "fraction_low"] = average(x < low for x in tested) if k == "k1" else 0.0
        found[p + "std"] = population([clamp(x, low if k == "k1" else 0.0, high) for x in flat])
        found[p + "seq_mean"], found[p + "seq_std"] = average(valid), spread(valid)
        found[p + "seq_max"], found[p + "seq_min"] = max(valid), min(valid)
        found[p + "seq_max_deviation"] = max(abs(r) for r in valid)
        found[p + "seq_fraction_high"] = average(r > high for r in valid)
        if k == "k1":
            found[p + "seq_fraction_low"] = average(r < low for r in valid)
        found[p + "masked_fraction"] = average(not ok for row in keep for ok in row)
        found[p + "seq_masked_fraction"] = average(not all(row) for row in keep if row)
    found["rollout_rs_masked_fraction"] = average(not ok for row in every_keep for ok in row)
    found["rollout_rs_seq_masked_fraction"] = average(not all(row) for row in every_keep)
    return found


# --- xtuner: one pack ---


def xtuner(rows, level=None, mode="truncate", upper=None, lower=None, mask=None, veto=None):
    """Thresholds (lower, upper) for mask and veto; the mask's default to those of the weight."""
    found = xtuner_mismatch(rows)
    if level:
        found |= xtuner_weights(rows, level, mode, upper, lower, mask or (lower, upper), veto)
    return {"mismatch/" + key: value for key, value in found.items()}


def xtuner_mismatch(rows):
    ((p, q),) = mean_logs([[token for row in rows for token in row]])
    d = [x for row in deltas(rows) for x in row]
    gap = q - p
    return {
        "valid": float(bool(d)),
        "mismatch_training_ppl": math.exp(-p),
        "mismatch_training_log_ppl": -p,
        "mismatch_kl": average(-x for x in d),
        "mismatch_k3_kl": average(math.expm1(x) - x for x in d),
        "mismatch_rollout_ppl": math.exp(-q),
        "mismatch_rollout_log_ppl": -q,
        "mismatch_log_ppl_diff": gap,
        "mismatch_log_ppl_abs_diff": abs(gap),
        "mismatch_log_ppl_diff_max": gap,
        "mismatch_log_ppl_diff_min": gap,
        "mismatch_ppl_ratio": math.exp(gap),
        "mismatch_logprob_abs_diff": average(abs(x) for x in d),
    }


def log(x):
    return math.log(x) if x > 0.0 else -math.inf


def xtuner_weights(rows, level, mode, upper, lower, mask, veto):
    d = deltas(rows)
    of_rows = [math.fsum(row) if level == "sequence" else average(row) for row in d]
    raw = [[safe_exp(x if level == "token" else s) for x in row] for row, s in zip(d, of_rows, strict=True)]
    flat, count = [w for row in raw for w in row], sum(len(row) for row in d)
    bad = [[veto is not None and not log(veto[0]) <= x <= log(veto[1]) for x in row] for row in d]
    found = {
        "rollout_is_veto_fraction": average(any(row) for row in bad if row),
        "rollout_is_catastrophic_token_fraction": average(x for row in bad for x in row),
        "rollout_is_mean": average(flat),
    }
    if level == "token":
        found["rollout_is_max"], found["rollout_is_min"] = max(flat, default=-math.inf), min(flat, default=math.inf)
        high, low = [w > upper for w in flat], [w < lower for w in flat]
    else:
        found["rollout_is_max"], found["rollout_is_min"] = math.exp(min(max(of_rows), SAFE)), math.exp(min(of_rows))
        repeat = [1] * len(d) if level == "sequence" else [len(row) for row in d]
        units = [s for s, times in zip(of_rows, repeat, strict=True) for _ in range(times)]
        high, low = [s > log(upper) for s in units], [s < log(lower) for s in units]
    found["rollout_is_ratio_fraction_high"], found["rollout_is_ratio_fraction_low"] = average(high), average(low)
    clamped = [clamp(w, lower, upper) for w in flat]
    found["rollout_is_std"] = population(clamped)
    center = average(clamped)
    squares = average((c / (center + 1e-8)) ** 2 for c in clamped)
    found["rollout_is_eff_sample_size"] = 1.0 / squares if count else math.inf
    s = [average(row) for row in raw if row]
    found["rollout_is_seq_mean"], found["rollout_is_seq_std"] = average(s), spread(s)
    found["rollout_is_seq_max"], found["rollout_is_seq_min"] = max(s, default=0.0), min(s, default=0.0)
    found["rollout_is_seq_max_deviation"] = max((abs(x - 1.0) for x in s), default=0.0)
    found["rollout_is_seq_fraction_high"] = average(x > upper for x in s)
    found["rollout_is_seq_fraction_low"] = average(x < lower for x in s)
    if mode != "truncate":
        rejected = [[not mask[0] <= w <= mask[1] for w in row] for row in raw]
        found["rollout_is_masked_fraction"] = average(x for row in rejected for x in row)
        whole = [any(row) for row in rejected]
        if level != "token":
            whole = [not mask[0] <= safe_exp(x) <= mask[1] for x in of_rows]
        found["rollout_is_seq_masked_fraction"] = average(whole)
    return found


# --- SkyRL ---


def skyrl(rows, tis=None, cap=None, sequence_mask=None, bounds=None, outlier=None, token_mask=None):
    """Bounds are (lower, upper); a row's slots are its length, so pad the rows as SkyRL does."""
    left = [[bool(valid) for _, _, valid in row] for row in rows]
    d = [[old - rollout if valid else 0.0 for old, rollout, valid in row] for row in rows]
    ratios = [[safe_exp(x) for x in row] for row in d]
    slots = [r * ok for row, oks in zip(ratios, left, strict=True) for r, ok in zip(row, oks, strict=True)]
    found = {
        "is_ratio_mean": math.fsum(slots) / max(sum(map(sum, left)), 1),
        "is_ratio_std": spread(slots),
        "is_ratio_max": max(slots),
        "is_ratio_min": min(slots),
    }
    if outlier:
        low, high = (-math.inf if outlier[0] is None else outlier[0]), (math.inf if outlier[1] is None else outlier[1])
        over = [any(ok and r > high for r, ok in zip(*pair, strict=True)) for pair in zip(ratios, left, strict=True)]
        under = [any(ok and r < low for r, ok in zip(*pair, strict=True)) for pair in zip(ratios, left, strict=True)]
        found["outlier_seq_masked_ratio"] = average(a or b for a, b in zip(over, under, strict=True))
        found["outlier_seq_over_high_ratio"], found["outlier_seq_under_low_ratio"] = average(over), average(under)
        left = [[ok and not (a or b) for ok in oks] for oks, a, b in zip(left, over, under, strict=True)]
    if token_mask:
        inside = [[token_mask[0] <= r <= token_mask[1] for r in row] for row in ratios]
        pairs = [(i, ok) for a, b in zip(inside, left, strict=True) for i, ok in zip(a, b, strict=True)]
        found["token_mask_ratio"] = sum(ok and not i for i, ok in pairs) / max(sum(ok for _, ok in pairs), 1)
        left = [[i and ok for i, ok in zip(a, b, strict=True)] for a, b in zip(inside, left, strict=True)]
    survivors = [[x for x, ok in zip(row, oks, strict=True) if ok] for row, oks in zip(d, left, strict=True)]
    if tis == "token":
        found["tis_token_clip_high_ratio"] = average(safe_exp(x) > cap for row in survivors for x in row)
    if tis == "sequence":
        found["tis_seq_clip_high_ratio"] = average(safe_exp(math.fsum(row)) > cap for row in survivors)
    if sequence_mask:
        ratio = [safe_exp(average(row) if sequence_mask == "geo" else math.fsum(row)) for row in survivors]
        p = f"{sequence_mask}_sequence_mask_"
        found[p + "masked_ratio"] = average(not bounds[0] <= r <= bounds[1] for r in ratio)
        found[p + "over_high_ratio"] = average(r > bounds[1] for r in ratio)
        found[p + "under_low_ratio"] = average(r < bounds[0] for r in ratio)
    return found

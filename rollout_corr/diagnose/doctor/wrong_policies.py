"""Causes of policies that differ: another distribution, a mismatch that grows, a difference that is real."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ...metrics import limits
from ..measure.measurement import Measurement
from ..measure.profiles import PROBABILITY_BINS, PROBABILITY_LABELS, Excess
from .cause import POLICIES, SAMPLED, TAILS, TRAIN, Metrics, Signs, cause, percent

# Of policies that differ for a reason that is no bug.
CORRECT = "Corrections are made for this: `rollout-corr what-if` shows what each would do."

# Of policies that differ by more.
BROKEN = (
    "Compare the logits of one prompt on both sides, right after the weights are sent: rope, attention mask and "
    "packing, sliding window, the format of the KV cache, dropout, the scale of a LoRA adapter, a layer or a shard "
    "that was not sent. Corrections are made for smaller differences."
)


def _mean_ratio(metrics: Metrics) -> tuple[float, float]:
    """Return the mean of exp(D) and its standard error. Over tokens that the rollout policy sampled it is near 1."""
    return metrics["ratio_mean"], metrics["ratio_std"] / math.sqrt(max(1.0, metrics["tokens"]))


@cause(
    "error",
    "Sample with top_p=1, top_k=-1, min_p=0 for training; or give the trainer the same sampling mask; or have the "
    "engine return raw log-probs and accept that it did not sample from them; or pass the log of the mass that each "
    "token's truncation kept: Batch(kept_mass=KeptMass(log_mass)), which a dump takes too. A constant can also come "
    "from vocabulary rows that are only padding, or from a head that is not tied on one side.",
    hides=("temperature", *SAMPLED),
    views=(TRAIN, "probability"),
)
def renormalized(measured: Measurement, metrics: Metrics) -> Signs | None:
    """Ratios average below 1 and D is hardly ever positive: top-p, top-k, min-p, or a constant."""
    ratio, error = _mean_ratio(metrics)
    mean = metrics["logratio_mean"]
    plain, sharper, slight = _truncated(measured, metrics)
    # Truncation takes nothing away where a token is nearly certain; a constant does.
    constant = metrics["logratio_std"] < 0.25 * abs(mean)
    if measured.evidence.finite < 50 or not (plain or sharper or slight):
        return None
    related = measured.evidence.fit["log_prob_correlation"] > limits.CONSTANT_RELATED
    if metrics["logratio_p1"] < limits.TRUNCATED_LEAST and not (constant and related):
        return None
    title = (
        "the rollout log-probs are of a truncated distribution (top-p, top-k, min-p), or one side's are of something "
        "else than the sampled token"
    )
    if constant:
        title = "the rollout log-probs are larger by a constant: a softmax over fewer tokens on one side"
    elif not plain and not sharper:
        title = "ratios average a little below 1: sampling that was truncated slightly (top-p near 1, min-p)?"
    return Signs(
        title,
        (
            f"the mean ratio exp(D) is {ratio:.4f} +- {error:.4f}, {(1.0 - ratio) / error:.0f} standard errors below "
            "1: the probability mass that truncation kept. Over tokens that a policy sampled, ratios average to 1",
            f"tokens with D > 0 make up {percent(_upwards(metrics))} of sum |D|, usually half; half of all D lie below "
            f"{metrics['logratio_p50']:.3g}, one in a hundred below {metrics['logratio_p1']:.3g}",
        ),
        {
            "ratio_mean": ratio,
            "ratio_mean_error": error,
            "positive_fraction": _upwards(metrics),
            **{name: metrics[name] for name in ("logratio_p1", "logratio_p50", "logratio_mean", "logratio_std")},
        },
        1.0 - ratio,
        severity="error" if plain or sharper else "warning",
        also=("temperature",) if sharper else (),
    )


def is_truncated_later(measured: Measurement, metrics: Metrics) -> bool:
    """Return whether ratios lie below 1 as of a truncated policy, and not by the first tokens of sequences alone."""
    _, d, magnitude, *_ = measured.evidence.positions.groups()[1:].sum((0, 1)).tolist()
    plain, _, slight = _truncated(measured, metrics)
    return (plain or slight) and 0.5 * (magnitude + d) < limits.TRUNCATED_UPWARDS * magnitude


def _unseen(measured: Measurement) -> float:
    """Return by how much the mean ratio may be too low, whatever its error.

    A token that the trainer calls nearly impossible takes up to 1 from the sum of ratios. Tokens that would give it
    back are those that the engine calls impossible, and are not sampled.
    """
    return measured.evidence.far / max(1, measured.evidence.finite)


def _upwards(metrics: Metrics) -> float:
    """Return the share of the sum of |D| where D is positive."""
    mean, magnitude = metrics["logratio_mean"], metrics["logratio_abs_mean"]
    return min(1.0, max(0.0, 0.5 * (magnitude + mean) / magnitude)) if magnitude else 0.5


def _truncated(measured: Measurement, metrics: Metrics) -> tuple[bool, bool, bool]:
    """Return whether ratios lie below 1 as of a truncated policy: plainly, under a temperature, or slightly."""
    ratio, error = _mean_ratio(metrics)
    upwards = _upwards(metrics)
    slope = measured.evidence.sharpness.found()
    # Under a temperature D is still positive for some tokens. Top-k alone takes more from flat contexts, whose
    # tokens are unlikely: D grows with the log-prob, and is hardly ever positive.
    sharper = abs(slope.slope) > max(0.1, limits.SLOPE_ERRORS * slope.error) and slope.slope > -0.8
    sharper = (
        sharper
        and ratio + limits.RATIO_ERRORS * error < 0.995
        and (0.05 if slope.slope < 0.0 else 0.12) < upwards < 0.4
    )
    # Forced tokens lower the mean ratio too, by few tokens far off.
    tally = measured.evidence.by_sequence
    forced = tally.far[0].k3 > 0.5 * tally.k3
    slight = 0.97 < ratio < 0.998 - limits.RATIO_ERRORS * error and upwards < 0.45 and not forced
    below = metrics["logratio_p99"] < limits.TRUNCATED_LIFTED or 1.0 - ratio > _unseen(measured)
    plain = ratio + limits.RATIO_ERRORS * error < 0.985 and upwards < limits.TRUNCATED_UPWARDS and below
    return plain, sharper, slight


@cause(
    "error",
    "Divide the trainer's logits by the sampling temperature before the softmax, once; and have the engine return "
    "log-probs after temperature (vLLM: logprobs_mode='processed_logprobs').",
    hides=("penalties", *SAMPLED),
    views=(TRAIN, "probability"),
)
def temperature(measured: Measurement, metrics: Metrics) -> Signs | None:
    """D follows the log-prob and that explains most of it: one policy is sharper everywhere."""
    found = measured.evidence.sharpness.found()
    slope, share = found.slope, found.share
    if measured.evidence.finite < 200 or metrics["logratio_abs_mean"] < limits.GROUP_MATTERS:
        return None
    if abs(slope) < max(limits.SLOPE_LEAST, limits.SLOPE_ERRORS * found.error) or slope < -0.8:
        return None
    truncated = _truncated(measured, metrics)[1]
    k3 = metrics["kl_rollout_train_k3"]
    whole = truncated or share >= limits.TEMPERATURE_MOST
    if not whole and (share < limits.TEMPERATURE_PART or k3 < limits.MATTERS_K3):
        return None
    sharper = "trainer" if slope > 0 else "engine"
    low, high = found.interval()
    title = f"a temperature was applied on one side only: the {sharper} has the sharper policy"
    if not whole:
        title = f"a part of the mismatch looks like a temperature: the {sharper} has the sharper policy"
    middle = 0.5 * (low + high)
    factor = middle if slope > 0 or middle <= 0.0 else 1.0 / middle
    if high - low < limits.TEMPERATURE_WIDE:
        title += f", by a factor of about {factor:.2f}"
    table = measured.probability.rows(PROBABILITY_LABELS, range(PROBABILITY_BINS))
    ends = "; ".join(f"{row.label}: {row.logratio_mean:+.3f}" for row in (table[0], table[len(table) // 2], table[-1]))
    explained = f"a temperature explains {percent(share)} of the mismatch"
    if not whole:
        explained += "; the rest is something else"
    if truncated:
        explained = "sampling was truncated as well, which makes the interval wide"
    versions = measured.evidence.values["versions"]
    sharpened = slope > 0 and bool(versions)
    same = f"a policy that became more confident since version {min(versions, default=0):g} looks the same"
    later = (f"{same}: compare tokens of the current version",) if sharpened else ()
    return Signs(
        title,
        (
            f"the engine's temperature is {between(low, high)} times the trainer's",
            f"D of unlikely tokens changes by {slope:+.3f} +- {found.error:.3f} per nat of their log-prob; {explained}",
            f"mean D by rollout probability: {ends}",
            *later,
        ),
        {
            "factor": factor,
            "temperature": middle,
            "temperature_low": low,
            "temperature_high": high,
            "slope": slope,
            "slope_error": found.error,
            "explained": share,
        },
        # A part stands behind the finding that the policies differ, whose strength is k3.
        min(1.0, abs(middle - 1.0)) if whole else share * min(1.0, k3),
        severity="warning" if sharpened or not whole else None,
        also=() if whole else ("different_policies", "penalties"),
    )


def between(low: float, high: float) -> str:
    """Say an interval: by its middle, or where it is wide by its ends."""
    if high - low < limits.TEMPERATURE_WIDE:
        return f"about {0.5 * (low + high):.2f} ({low:.2f} to {high:.2f})"
    return f"below {high:.2f}" if low < 0.1 else f"{low:.2f} to {high:.2f}"


@cause(
    "warning",
    "Limit how many versions a sample may be behind, and correct with token ratios. The mismatch that remains at the "
    "newest version comes from the engine itself.",
    hides=TAILS,
    views=("versions",),
)
def stale(measured: Measurement, metrics: Metrics) -> Signs | None:
    """Older weight versions differ more (needs `versions`)."""
    trend = _trend(measured, "versions")
    if len(trend) < 2:
        return None
    (oldest, old), (newest, new) = trend[0], trend[-1]
    correlation = _rank_correlation([level for _, level in trend])
    if correlation > -0.8 or old < limits.GROUP_TIMES * new or old < limits.GROUP_MATTERS:
        return None
    return Signs(
        "tokens of older weights differ more: the cause is staleness, not the engine",
        (
            f"mean |D| at equal probability is {old:.3g} for version {oldest} and {new:.3g} for version {newest}, "
            f"{old / new:.1f} times; rank correlation with the version {correlation:.2f} over {len(trend)} versions",
        ),
        {
            "oldest_version": oldest,
            "newest_version": newest,
            "oldest_logratio_abs_mean": old,
            "newest_logratio_abs_mean": new,
            "times": old / new,
            "rank_correlation": correlation,
            "versions": len(trend),
        },
        1.0 - new / old,
        severity=None if metrics["kl_rollout_train_k3"] > limits.MATTERS_K3 else "note",
    )


@cause(
    "warning",
    "Look at what accumulates: weights that are sent in low precision or in part, quantization scales that are not "
    "renewed, a cache that survives an update. Restart the engine from a checkpoint: if the mismatch is gone, the "
    "transfer of weights is the cause.",
    hides=TAILS,
    views=("steps",),
)
def drift(measured: Measurement, metrics: Metrics) -> Signs | None:
    """The mismatch grows with the steps (needs `steps`)."""
    trend = _trend(measured, "steps")
    if len(trend) < 5:
        return None
    third = len(trend) // 3 or 1
    levels = [level for _, level in trend]
    first, last = math.fsum(levels[:third]) / third, math.fsum(levels[-third:]) / third
    correlation = _rank_correlation(levels)
    if correlation < 0.8 or last < limits.GROUP_TIMES * first or last < limits.GROUP_MATTERS:
        return None
    return Signs(
        "the mismatch grows with the steps",
        (
            f"mean |D| at equal probability goes from {first:.3g} (first third of {len(trend)} steps) to {last:.3g} "
            f"(last third), {last / first:.1f} times; rank correlation with the step {correlation:.2f}",
        ),
        {
            "first_logratio_abs_mean": first,
            "last_logratio_abs_mean": last,
            "times": last / first,
            "rank_correlation": correlation,
            "steps": len(trend),
        },
        1.0 - first / last,
    )


@cause(
    "warning",
    "Sample without penalties: the trainer knows nothing about them. Or have the engine return log-probs before them "
    "(vLLM: logprobs_mode='raw_logprobs'), and accept that it did not sample from these.",
    hides=("positions", *SAMPLED),
)
def penalties(measured: Measurement, metrics: Metrics) -> Signs | None:
    """The engine makes tokens less likely that the sequence had before.

    A presence, frequency or repetition penalty.
    """
    sums = measured.evidence.repeats.groups()
    found = [one for cut in range(1, sums.shape[0]) if (one := _repeated(sums[:cut].sum(0), sums[cut:].sum(0)))]
    if not found:
        return None
    difference, error, repeated, rest, explained = max(found)
    if explained < limits.PENALTY_PART:
        return None
    return Signs(
        "the engine lowers the probability of tokens that repeat: a presence, frequency or repetition penalty",
        (
            f"mean D is {repeated:+.3f} for tokens that the sequence had before, or had more often, and {rest:+.3f} "
            "for the others",
            f"at equal probability they are {difference:.3f} +- {error:.3f} apart",
        ),
        {"repeated_logratio_mean": repeated, "new_logratio_mean": rest, "difference": difference},
        min(1.0, difference),
    )


def _repeated(few: Tensor, many: Tensor) -> tuple[float, float, float, float, float] | None:
    """Compare D of tokens that were there more often with D of the others.

    Returns by how much it is larger, the error of that, the mean D of both groups, and the share of the squares of D
    that the difference explains.

    Args:
        few, many: [probability bins, 4], sums of each group as of a `Profile`.
    """
    (n, d, _, d2), (m, e, _, e2) = (part.unbind(1) for part in (few, many))
    both = (n >= 5) & (m >= 5)
    weight = n * m / (n + m)
    new, seen = d / n, e / m
    variance = (d2 / n - new * new) / n + (e2 / m - seen * seen) / m
    weight, gap, variance = weight[both], (seen - new)[both], variance[both]
    if not weight.numel() or not float(variance.sum()):
        return None
    total = float(weight.sum())
    difference = float((weight * gap).sum()) / total
    error = math.sqrt(float((weight.square() * variance).sum())) / total
    repeated, rest, tokens = float(e.sum() / m.sum()), float(d.sum() / n.sum()), float(m.sum())
    # Else the others are lowered alone, as by another prompt, which tokens at the start feel most.
    lifted = max(
        limits.GROUP_MATTERS,
        limits.SIGN_ERRORS * math.sqrt(float(e2.sum()) / tokens - repeated * repeated) / math.sqrt(tokens),
    )
    lifted = max(lifted, limits.PENALTY_LIFTED * -rest)
    if (
        difference < max(limits.SLOPE_ERRORS * error, 4.0 * limits.GROUP_MATTERS)
        or not rest < -limits.GROUP_MATTERS < lifted < repeated
    ):
        return None
    explained = float((weight * gap.square()).sum()) / float((d2 + e2).sum())
    return difference, error, repeated, rest, explained


@cause(
    "warning",
    "Look at what depends on the position: rope scaling and its base, a sliding window, a quantized KV cache, "
    "context-parallel ranks that count positions from 0. Penalties of the sampler (presence, frequency, repetition) "
    "look like this too, because tokens repeat more and more: sample without them, or return log-probs before them.",
    hides=TAILS,
    views=("position",),
)
def positions(measured: Measurement, metrics: Metrics) -> Signs | None:
    """The mismatch grows with the position in the sequence."""
    excess = measured.evidence.positions
    groups = [i for i, tokens in enumerate(excess.tokens_of_each()) if tokens >= 50]
    early = [i for i in groups if i < 5]
    late = [i for i in groups if i >= 5]
    # In some sequences alone, which may be the long ones: `outliers` says in which.
    if not early or not late or measured.evidence.by_sequence.part() is not None:
        return None
    times = excess.over([late[-1]], early)
    here = _level(excess, [late[-1]])
    correlation = _rank_correlation(excess.each_over([[i] for i in groups], groups))
    if times < 1.5 * limits.GROUP_TIMES or here < limits.GROUP_MATTERS or correlation < 0.8:
        return None
    return Signs(
        "the mismatch grows along the sequence",
        (
            f"from position {2 ** late[-1] - 1} on, |D| is {times:.1f} times that of equally likely tokens among the "
            f"first 31; rank correlation with the logarithm of the position {correlation:.2f}",
        ),
        {"from_position": 2 ** late[-1] - 1, "times": times, "rank_correlation": correlation},
        1.0 - 1.0 / times,
    )


@cause(
    "warning",
    "The trainer is consistent, so look at the engine and at what is stored: its log-probs may be those of the "
    "sampling distribution, of other weights, or of other tokens than the ones kept.",
    hides=("different_policies",),
)
def engine_alone(measured: Measurement, metrics: Metrics) -> Signs | None:
    """Two passes of the trainer agree and the engine is off (needs `new_logp`)."""
    apart, engine = (measured.evidence.mean_distance(pair) for pair in ("new_train", "train_rollout"))
    if apart is None or engine is None or metrics["kl_rollout_train_k3"] < limits.HEALTHY_K3 or apart > 0.1 * engine:
        return None
    return Signs(
        "only the rollout log-probs are off: two passes of the trainer agree",
        (f"mean |new_logp - train_logp| is {apart:.3g}, mean |train_logp - rollout_logp| is {engine:.3g}",),
        {"new_train_abs_mean": apart, "train_rollout_abs_mean": engine},
        1.0 - apart / engine,
    )


@cause(
    "warning",
    "The trainer does not agree with itself: look for dropout, for kernels whose result depends on the "
    "batch, for a mixture of experts that routes or drops tokens differently. A policy that has learned between the "
    "passes does not look like this.",
    hides=("different_policies",),
)
def trainer_varies(measured: Measurement, metrics: Metrics) -> Signs | None:
    """Two passes of the trainer differ, and each is as far from the engine (needs `new_logp`)."""
    apart, engine = (measured.evidence.mean_distance(pair) for pair in ("new_train", "train_rollout"))
    if apart is None or engine is None or metrics["kl_rollout_train_k3"] < limits.HEALTHY_K3:
        return None
    of_train, of_new, of_both = measured.evidence.mean_squares()
    if (
        of_both < limits.PASSES_VARY * of_train
        or not of_train / limits.PASSES_ALIKE < of_new < of_train * limits.PASSES_ALIKE
    ):
        return None
    return Signs(
        "two passes of the trainer differ from one another as from the engine: dropout, or kernels that vary",
        (
            f"mean |new_logp - train_logp| is {apart:.3g}, mean |train_logp - rollout_logp| is {engine:.3g}",
            f"with differences cut at 1 nat, the mean square of new_logp - train_logp is {of_both:.3g}, of train_logp "
            f"- rollout_logp {of_train:.3g}, of new_logp - rollout_logp {of_new:.3g}; after learning the last would "
            "be the sum of the others",
        ),
        {"new_train_abs_mean": apart, "train_rollout_abs_mean": engine},
        min(1.0, of_both / (of_train + of_new)),
    )


@cause(
    "warning",
    "Look for kernels whose result depends on the size of the micro-batch, for dropout, for different padding or "
    "packing in the two passes; or an optimizer step lies between them after all.",
    asked="--on-policy",
)
def trainer_disagrees(measured: Measurement, metrics: Metrics) -> Signs | None:
    """With `--on-policy`: `new_logp` and `train_logp` have to be equal and are not."""
    apart = measured.evidence.mean_distance("new_train")
    if apart is None or apart < 1e-4:
        return None
    return Signs(
        "the trainer disagrees with itself on the same weights",
        (f"mean |new_logp - train_logp| is {apart:.3g}, and should be 0 (--on-policy)",),
        {"new_train_abs_mean": apart},
        min(1.0, apart),
    )


@cause(
    "warning",
    "Possible causes: raw log-probs under a sampling temperature, a constant that one side adds, log-probs of other "
    "weights than those that sampled; or the trainer has already been trained on these very tokens.",
    hides=POLICIES,
)
def not_the_sampler(measured: Measurement, metrics: Metrics) -> Signs | None:
    """The mean ratio is not 1, although it must be for tokens that were sampled from the rollout policy."""
    ratio, error = _mean_ratio(metrics)
    finite = measured.evidence.finite
    if finite < 50:
        return None
    # Where the policies agree, a mean ratio that is a little off says it too; else it may be their difference.
    agree = metrics["kl_rollout_train_k3"] < limits.HEALTHY_K3
    off = agree and limits.ratio_state(ratio, metrics["ratio_std"], finite) in ("watch", "alarm")
    unseen = _unseen(measured) if ratio < 1.0 else 0.0
    if not off and abs(ratio - 1.0) < limits.RATIO_ERRORS * error + 0.05 + unseen:
        return None
    return Signs(
        "the tokens were not sampled from the rollout log-probs",
        (
            f"the mean ratio exp(D) is {ratio:.4f} +- {error:.4f}, {abs(ratio - 1.0) / error:.0f} standard errors from "
            "1; over tokens sampled from the rollout log-probs it is 1, whatever the trainer's policy",
            f"mean D is {metrics['logratio_mean']:.3g}, its standard deviation {metrics['logratio_std']:.3g}",
        ),
        {
            "ratio_mean": ratio,
            "ratio_mean_error": error,
            "logratio_mean": metrics["logratio_mean"],
            "logratio_std": metrics["logratio_std"],
        },
        min(1.0, abs(ratio - 1.0)),
    )


@cause(
    "warning",
    "Both log-probs are raw, before temperature, top-p or penalties, so they agree anyway. Sample without these; or "
    "have the engine return processed log-probs (vLLM: logprobs_mode='processed_logprobs') and divide the trainer's "
    "logits by the same temperature.",
    # Both sides agree: no picture has it.
    views=(),
)
def raw_log_probs(measured: Measurement, metrics: Metrics) -> Signs | None:
    """The mean of `entropy` is not the mean of -log-prob.

    Tokens were sampled at another temperature, or with top-p.
    """
    found = measured.evidence.entropy()
    if found is None:
        return None
    entropy, difference, error = found
    complete = measured.evidence.groups_complete
    state = limits.sampler_state(difference, error, entropy, metrics["sequences"], complete)
    # Log-probs that differ may be off by as much: |E_q f - E_p f| <= std(f) * sqrt(chi2).
    room = measured.evidence.fit["train_std"] * math.sqrt(max(0.0, metrics["chi2_train_rollout"]))
    agree = metrics["kl_rollout_train_k3"] < limits.HEALTHY_K3
    if state == "healthy" or (abs(difference) < room and not (agree and state == "alarm")):
        return None
    sharper = difference > 0
    title = f"the tokens were sampled from a {'sharper' if sharper else 'flatter'} policy than either side reports"
    selected = sharper and state == "watch"
    if selected:
        title += ", or the likelier ones of several answers were kept"
    groups = ("all groups have the same number of answers, so none was selected",) if complete else ()
    return Signs(
        title,
        (
            f"the mean entropy is {entropy:.3f} nats, the mean of -train_logp {entropy - difference:.3f}, "
            f"{abs(difference) / error:.0f} standard errors apart; over tokens that this policy sampled they are equal",
            *groups,
        ),
        {"entropy_mean": entropy, "surprise_mean": entropy - difference, "difference_error": error},
        min(1.0, abs(difference) / max(entropy, 1e-9)),
        severity="note" if state == "watch" else None,
    )


@cause(
    "warning",
    f"{CORRECT} Dump versions and steps with the log-probs to tell staleness from precision. If the weights are fresh "
    "and the precision is the same, look for dropout in the trainer, a LoRA adapter at another scale, a layer that was "
    "not sent.",
)
def different_policies(measured: Measurement, metrics: Metrics) -> Signs | None:
    """The policies differ, and none of the signs above is there: staleness, low precision.

    Beyond a k3 of 0.1 a broken model.
    """
    k3 = metrics["kl_rollout_train_k3"]
    if k3 < limits.HEALTHY_K3:
        return None
    ratio, error = _mean_ratio(metrics)
    versions = measured.evidence.values["versions"]
    same = (
        ()
        if len(versions) != 1
        else (f"all tokens are of version {next(iter(versions))}: there is nothing to compare; dump more steps",)
    )
    title = "the policies differ, but no known bug explains it: staleness or low precision are the usual causes"
    advice = CORRECT if same else None
    if k3 > limits.BROKEN_K3:
        title = "the two policies are further apart than staleness or low precision usually explains"
        advice = BROKEN
    return Signs(
        title,
        (
            f"k3 is {k3:.3g} nats per token (healthy: below {limits.HEALTHY_K3:g}; stale or quantized engines: rarely "
            f"above {limits.BY_KEY['kl_rollout_train_k3'].alarm:g}), mean |D| {metrics['logratio_abs_mean']:.3g}, 99th "
            f"percentile of |D| {metrics['logratio_abs_p99']:.3g}",
            f"the mean ratio exp(D) is {ratio:.3f} +- {error:.3f}; it must average 1 over sampled tokens",
            *same,
        ),
        {name: metrics[name] for name in ("kl_rollout_train_k3", "logratio_abs_mean", "logratio_abs_p99")}
        | {"ratio_mean": ratio, "ratio_mean_error": error},
        min(1.0, k3),
        advice=advice,
    )


@cause(
    "note",
    "Do not weight or reject by the product over a sequence: it depends on length times KL, not on the quality of the "
    "sequence. Token weights and the geometric mean do not grow with the length.",
    views=("length",),
)
def long_products(measured: Measurement, metrics: Metrics) -> Signs | None:
    """Tokens agree, but products over a sequence are noise: a note."""
    if metrics["kl_rollout_train_k3"] > limits.HEALTHY_K3 or metrics["sequence_logratio_abs_mean"] < limits.CHANCE_SUM:
        return None
    return Signs(
        "products over these sequences are noise, though the tokens agree",
        (
            f"k3 is {metrics['kl_rollout_train_k3']:.2g} nats per token, yet the mean |sum of D| of a sequence is "
            f"{metrics['sequence_logratio_abs_mean']:.3g} nats over "
            f"{metrics['tokens'] / max(1.0, metrics['sequences']):.0f} tokens",
            f"the effective sample size is {percent(metrics['product/sequence_weight_before_bounds_ess'])} with "
            f"product weights, {percent(metrics['token/weight_before_bounds_ess'])} with token weights",
        ),
        {
            "kl_rollout_train_k3": metrics["kl_rollout_train_k3"],
            "sequence_logratio_abs_mean": metrics["sequence_logratio_abs_mean"],
            "tokens_per_sequence": metrics["tokens"] / max(1.0, metrics["sequences"]),
            "product_ess": metrics["product/sequence_weight_before_bounds_ess"],
            "token_ess": metrics["token/weight_before_bounds_ess"],
        },
        min(1.0, metrics["sequence_logratio_abs_mean"] / 20.0),
    )


def _trend(measured: Measurement, column: str) -> list[tuple[float, float]]:
    """Return (value, mean |D| at equal probability) by rising value of a column, where a value has enough tokens."""
    excess, seen = measured.evidence.columns[column], measured.evidence.values[column]
    if len(seen) < 2:
        return []
    everything = list(range(len(seen)))
    usual = _level(excess, everything)
    tokens = excess.tokens_of_each()
    known = [(value, group) for value, group in sorted(seen.items()) if tokens[group] >= 20]
    times = excess.each_over(([group] for _, group in known), everything)
    return [(value, usual * many) for (value, _), many in zip(known, times, strict=True)]


def _level(excess: Excess, groups: list[int]) -> float:
    """Return the mean |D| of groups of tokens."""
    count, magnitude = excess.table()
    return float(magnitude[groups].sum() / count[groups].sum())


def _rank_correlation(levels: Sequence[float]) -> float:
    """Return Spearman's correlation of the levels with 0, 1, 2, ..."""
    n = len(levels)
    if n < 2:
        return 0.0
    order = sorted(range(n), key=lambda i: levels[i])
    return 1.0 - 6.0 * sum((rank - i) ** 2 for rank, i in enumerate(order)) / (n * (n * n - 1))

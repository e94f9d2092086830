"""Signatures of policies that differ: another distribution, a mismatch that grows, a difference that is real."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollout_corr.diagnose.doctor.verdict import HEALTHY_K3, HEALTHY_SUM, MATTERS, TIMES, Verdict, percent
from rollout_corr.diagnose.measure.evidence import Excess
from rollout_corr.diagnose.measure.measuring import Measured
from rollout_corr.diagnose.measure.profiles import PROBABILITY_BINS, PROBABILITY_LABELS


def _mean_ratio(metrics: dict[str, float]) -> tuple[float, float]:
    """The mean ratio and its standard error. Under the policy that sampled, ratios average to 1."""
    return metrics["ratio_mean"], metrics["ratio_std"] / math.sqrt(max(1.0, metrics["tokens"]))


def renormalised(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """The engine's probabilities are larger by a factor: those of a truncated distribution."""
    ratio, error = _mean_ratio(metrics)
    mean, magnitude = metrics["d_mean"], metrics["d_abs_mean"]
    upwards = 0.5 * (magnitude + mean) / magnitude if magnitude else 0.5
    if not (ratio + 8.0 * error < 0.985 and upwards < 0.3):
        return None
    # Truncation takes away nothing where a token is nearly certain; a constant does.
    constant = metrics["d_std"] < 0.25 * abs(mean)
    title = "the rollout log-probs are of a truncated distribution (top-p, top-k, min-p)"
    if constant:
        title = "the rollout log-probs are larger by a constant: a softmax over fewer tokens on one side"
    return Verdict(
        "renormalised",
        "error",
        title,
        (
            f"the mean ratio is {ratio:.4f} +- {error:.4f}: the mass that truncation kept. Under the policy that "
            "sampled, it would be 1",
            f"D is hardly ever positive: {percent(upwards)} of sum |D|; percentiles 1 and 50 of D are "
            f"{metrics['d_p1']:.3g} and {metrics['d_p50']:.3g}; its mean is {mean:.3g}, its standard deviation "
            f"{metrics['d_std']:.3g}",
        ),
        "Sample with top_p=1, top_k=-1, min_p=0 for training; or give the trainer the same sampling mask; or have the "
        "engine return raw log-probs and accept that it did not sample from them. A constant can also be rows of the "
        "vocabulary that are only padding, or a head that is not tied on one side.",
        1.0 - ratio,
    )


def temperature(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """D follows the log-prob itself: one side is sharper than the other, everywhere."""
    fit = measured.evidence.fit
    if measured.evidence.finite < 200 or metrics["d_abs_mean"] < MATTERS:
        return None
    # A temperature keeps the order of likely and unlikely; policies that went apart lose it.
    if measured.evidence.log_prob_correlation() < 0.95:
        return None
    if abs(fit["correlation"]) < 0.55 or fit["explained"] < 0.5 or abs(fit["slope"]) < 0.01:
        return None
    sharper = "trainer" if fit["slope"] > 0 else "engine"
    table = measured.evidence.by_mean.rows(PROBABILITY_LABELS, range(PROBABILITY_BINS))
    ends = "; ".join(f"{row.label}: {row.d_mean:+.3f}" for row in (table[0], table[len(table) // 2], table[-1]))
    return Verdict(
        "temperature",
        "error",
        f"a temperature was applied on one side only: the {sharper}'s policy is the sharper one",
        (
            f"D against the log-prob: correlation {fit['correlation']:.2f}, slope {fit['slope']:.2f}; "
            f"{percent(fit['explained'])} of D's square is its mean at the token's probability",
            f"mean D by probability: {ends}",
        ),
        "Divide the trainer's logits by the sampling temperature before the softmax, once; and have the engine "
        "return log-probs after temperature (vLLM: logprobs_mode='processed_logprobs').",
        fit["explained"],
    )


def stale(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """Older weight versions differ more."""
    trend = _trend(measured, "versions")
    if trend is None or len(trend) < 2:
        return None
    (oldest, old), (newest, new) = trend[0], trend[-1]
    correlation = _rank_correlation([level for _, level in trend])
    if correlation > -0.8 or old < TIMES * new or old < MATTERS:
        return None
    return Verdict(
        "stale",
        "warning",
        "tokens of older weights differ more: staleness, not the engine",
        (
            f"mean |D| at equal probability is {old:.3g} for version {oldest:g} and {new:.3g} for version {newest:g}, "
            f"{old / new:.1f} times; rank correlation with the version {correlation:.2f} over {len(trend)} versions",
        ),
        "Bound how many versions a sample may be behind; correct with token ratios. What remains at the newest "
        "version is the engine's own mismatch.",
        1.0 - new / old,
    )


def drift(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """The mismatch grows from step to step."""
    trend = _trend(measured, "steps")
    if trend is None or len(trend) < 5:
        return None
    third = len(trend) // 3 or 1
    first, last = _mean(trend[:third]), _mean(trend[-third:])
    correlation = _rank_correlation([level for _, level in trend])
    if correlation < 0.8 or last < TIMES * first or last < MATTERS:
        return None
    return Verdict(
        "drift",
        "warning",
        "the mismatch grows with the steps",
        (
            f"mean |D| at equal probability goes from {first:.3g} (first third of {len(trend)} steps) to {last:.3g} "
            f"(last), {last / first:.1f} times; rank correlation with the step {correlation:.2f}",
        ),
        "Look at what adds up: weights that are sent in low precision or in part, quantisation scales that are not "
        "renewed, a cache that outlives an update. Restart the engine from a checkpoint: if that heals it, the "
        "sending is to blame.",
        1.0 - first / last,
    )


def positions(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """The mismatch grows along the sequence."""
    excess = measured.evidence.positions
    count, magnitude = excess.table()
    groups = [i for i in range(count.shape[0]) if float(count[i].sum()) >= 50]
    early = [i for i in groups if i < 5]
    late = [i for i in groups if i >= 5]
    if not early or not late:
        return None
    levels = [excess.over([i], groups) for i in groups]
    times = excess.over([late[-1]], early)
    here = float(magnitude[late[-1]].sum() / count[late[-1]].sum())
    correlation = _rank_correlation(levels)
    if times < 1.5 * TIMES or here < MATTERS or correlation < 0.8:
        return None
    return Verdict(
        "positions",
        "warning",
        "the mismatch grows along the sequence",
        (
            f"from position {2 ** late[-1] - 1} on, |D| is {times:.1f} times that of the first 31 tokens of the same "
            f"probability; rank correlation with the position {correlation:.2f} (in octaves)",
        ),
        "Look at what depends on the position: rope scaling and its base, a sliding window, a quantised KV cache, "
        "context parallel ranks whose positions begin anew.",
        1.0 - 1.0 / times,
    )


def engine_alone(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """Two passes of the trainer agree with one another and not with the engine."""
    policies = measured.evidence.policies
    tokens = policies.get("tokens", 0.0)
    if not tokens:
        return None
    apart, engine = policies["new_train"] / tokens, policies["train_rollout"] / tokens
    if metrics["kl_k3"] < HEALTHY_K3 or apart > 0.1 * engine:
        return None
    return Verdict(
        "engine_alone",
        "warning",
        "only the rollout log-probs are off: two passes of the trainer agree",
        (f"mean |new - train| is {apart:.3g}, mean |train - rollout| {engine:.3g}",),
        "The trainer is consistent, so look at the engine and at what is stored: its log-probs may be those of the "
        "sampling distribution, of other weights, or of other tokens than the ones kept.",
        1.0 - apart / engine,
    )


def trainer_disagrees(measured: Measured) -> Verdict | None:
    """Two passes of the trainer with the same weights differ."""
    policies = measured.evidence.policies
    tokens = policies.get("tokens", 0.0)
    if not tokens or policies["new_train"] / tokens < 1e-4:
        return None
    apart = policies["new_train"] / tokens
    return Verdict(
        "trainer_disagrees",
        "warning",
        "the trainer disagrees with itself on the same weights",
        (f"mean |new - train| is {apart:.3g} where it should be 0 (--on-policy)",),
        "Kernels that depend on the size of the micro-batch, dropout, another padding or packing in the two passes; "
        "or an optimizer step lies between them after all.",
        min(1.0, apart),
    )


def not_the_sampler(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """Ratios do not average to 1, so the rollout log-probs are not those of the policy that sampled."""
    ratio, error = _mean_ratio(metrics)
    if measured.evidence.finite < 50 or abs(ratio - 1.0) < 8.0 * error + 0.05:
        return None
    return Verdict(
        "not_the_sampler",
        "warning",
        "the tokens were not sampled from the rollout log-probs",
        (
            f"the mean ratio is {ratio:.4f} +- {error:.4f}; over tokens that a policy sampled, ratios to it average to "
            "1 whatever the other policy is",
            f"mean D {metrics['d_mean']:.3g}, standard deviation {metrics['d_std']:.3g}",
        ),
        "Raw log-probs beside a sampling temperature, a constant that one side adds, log-probs of other weights than "
        "those that sampled; or the trainer has already been trained on these very tokens.",
        min(1.0, abs(ratio - 1.0)),
    )


def different_policies(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """The policies differ, and nothing says that it is plumbing."""
    if metrics["kl_k3"] < HEALTHY_K3:
        return None
    ratio, error = _mean_ratio(metrics)
    return Verdict(
        "different_policies",
        "warning",
        "the two policies differ, with no sign of a bug: staleness or low precision",
        (
            f"k3 is {metrics['kl_k3']:.3g} nats a token (healthy: below {HEALTHY_K3:g}), mean |D| "
            f"{metrics['d_abs_mean']:.3g}, percentile 99 of |D| {metrics['abs_logp_p99']:.3g}",
            f"the mean ratio is {ratio:.3f} +- {error:.3f}; over what the rollout policy sampled it averages to 1",
        ),
        "This is what corrections are for: `rollout-corr what-if` shows what each would do. Dump versions and steps "
        "beside the log-probs to tell staleness from precision.",
        min(1.0, metrics["kl_k3"]),
    )


def long_products(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """Tokens agree well, and products over a sequence still say nothing."""
    if metrics["kl_k3"] > HEALTHY_K3 or metrics["sum_d_abs_mean"] < HEALTHY_SUM:
        return None
    return Verdict(
        "long_products",
        "note",
        "products over these sequences are noise, though the tokens agree",
        (
            f"k3 is {metrics['kl_k3']:.2g} nats a token, yet the mean |sum D| of a sequence is "
            f"{metrics['sum_d_abs_mean']:.3g} nats over {metrics['tokens'] / max(1.0, metrics['sequences']):.0f} "
            "tokens",
            f"effective sample size of product weights {percent(metrics['product/sequence_weight_raw_ess'])}, of "
            f"token weights {percent(metrics['token/weight_raw_ess'])}",
        ),
        "Do not weight or reject by the product over a sequence: T x KL decides there, not quality. Token weights "
        "and the geometric mean do not grow with the length.",
        min(1.0, metrics["sum_d_abs_mean"] / 20.0),
    )


def _mean(trend: Sequence[tuple[float, float]]) -> float:
    return math.fsum(level for _, level in trend) / len(trend)


def _trend(measured: Measured, column: str) -> list[tuple[float, float]] | None:
    """(value, mean |D| at equal probability) by rising value of a column, where a value has enough tokens."""
    excess, seen = measured.evidence.columns[column], measured.evidence.values[column]
    if len(seen) < 2:
        return None
    everything = list(range(len(seen)))
    usual = _level(excess, everything)
    known = [(value, group) for value, group in sorted(seen.items()) if excess.tokens([group]) >= 20]
    return [(value, usual * excess.over([group], everything)) for value, group in known]


def _level(excess: Excess, groups: list[int]) -> float:
    count, magnitude = excess.table()
    return float(magnitude[groups].sum() / count[groups].sum())


def _rank_correlation(levels: Sequence[float]) -> float:
    """Spearman's correlation with 0, 1, 2, ..."""
    n = len(levels)
    if n < 2:
        return 0.0
    order = sorted(range(n), key=lambda i: levels[i])
    ranks = [0] * n
    for rank, i in enumerate(order):
        ranks[i] = rank
    return 1.0 - 6.0 * sum((rank - i) ** 2 for i, rank in enumerate(ranks)) / (n * (n * n - 1))

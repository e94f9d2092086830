"""`warnings()`: sentences about metrics that deserve a look, by the bounds of [limits.py](limits.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..specs.correction import Spec
from .formulas import exp
from .limits import (
    BUGS,
    BY_KEY,
    FEWEST_TOKENS,
    FILLED,
    FILLED_TIMES,
    FILLED_TOKENS,
    NEAR_CLAMP,
    PADDED_SHARE,
    RELATED,
    UNRELATED,
    State,
    largest_state,
    ratio_state,
    sampler_error,
    sampler_state,
)
from .native import TOKENS, readers_of, weight_of_sequence

# What is filled in where log-probs are missing, and whose perplexity a float holds.
FILLERS = (0.0, -1.0)
SIDES = ("train", "rollout")
REMEDIES = {"train": "compute them with the trainer", "rollout": "ask the engine for them"}
LOOK = "rc.dump and `rollout-corr doctor` name the cause"


def warnings_of(values: Mapping[str, float], spec: Spec) -> list[str]:
    """Say in plain words which metrics deserve a look, from merged statistics by name."""
    metrics = readers_of(spec).read(values)
    sentences = []
    if metrics["tokens_nonfinite"]:
        sentences.append(
            f"{_tokens(metrics['tokens_nonfinite'], 'has', 'have')} a NaN or infinite log-ratio "
            f"(nonfinite={spec.nonfinite!r}): {BY_KEY['tokens_nonfinite'].hint}"
        )
    if metrics["tokens_outside"]:
        sentences.append(
            f"{_tokens(metrics['tokens_outside'], 'belongs', 'belong')} to no sequence of cu_seqlens: "
            f"{BY_KEY['tokens_outside'].hint}"
        )
    if not metrics["tokens"]:
        return [*sentences, "no valid token: the mask is 0 everywhere, or the batch is empty; nothing was measured"]
    sentences += _padding(metrics)
    measured = values[str(TOKENS.units)]
    wrong = _not_log_probs(metrics) if measured >= FEWEST_TOKENS else []
    if measured >= FEWEST_TOKENS and not wrong and metrics["logratio_abs_max"] == 0.0:
        wrong.append(
            "the two log-probs are identical at every token: both arguments may be the same "
            "tensor, or the trainer's values were stored as the engine's; nothing is corrected"
        )
    # Where the values are no log-probs, or none is finite, how far they are apart says nothing more.
    differ = _mismatch(metrics, values, measured) if measured and not wrong else []
    sentences += wrong or differ or _sampler(values)
    sentences += _kept(metrics, spec, bool(wrong or differ))
    if differ:
        sentences[-1] += f"; {LOOK}"
    return sentences + _weights(metrics, spec)


def warnings_of_loss(values: Mapping[str, float]) -> list[str]:
    """Name tokens whose loss has no number, from the merged statistics of a policy loss."""
    broken = values["loss_tokens_nonfinite"]
    if not broken:
        return []
    return [
        f"{_tokens(broken, 'has', 'have')} NaN or infinity in what the loss needs: look at new_logp, at the log-probs "
        "that it is compared with, at advantages and at weights"
    ]


def _tokens(count: float, does: str, do: str) -> str:
    return f"1 valid token {does}" if count == 1 else f"{count:.0f} valid tokens {do}"


def _not_log_probs(metrics: Mapping[str, float]) -> list[str]:
    """Recognize probabilities, negative log-likelihoods and fillers by their means over sequences."""
    sentences = []
    for side in SIDES:
        mean, perplexity = -metrics[f"sequence_{side}_log_ppl_mean"], metrics[f"sequence_{side}_ppl_mean"]
        if mean > 1e-3:
            sentences.append(
                f"{side}_logp: log-probs are at most 0, but these average {mean:+.3g} per sequence. Did you pass "
                "negative log-likelihoods, probabilities or a mask? Pass the log-probs of the sampled tokens"
            )
            continue
        for filler in FILLERS:
            # exp is strictly convex, so both means agree where all sequences have one mean.
            same = abs(mean - filler) < 1e-6 and abs(perplexity - exp(-filler)) < 1e-5
            certain = filler == 0.0 and max(metrics[f"sequence_{name}_log_ppl_mean"] for name in SIDES) < 1e-3
            if same and not (certain and metrics["logratio_abs_max"] > 0.0):
                sentences.append(
                    f"{side}_logp: {filler:g} at every token, a placeholder: the log-probs never arrived; "
                    f"{REMEDIES[side]}"
                )
    return sentences


def _padding(metrics: Mapping[str, float]) -> list[str]:
    """Recognize rows whose ends are no tokens, where the call has no mask."""
    padded, rows = metrics["sequences_padded"], metrics["sequences"]
    if padded < 2 or padded < PADDED_SHARE * rows:
        return []
    return [
        f"{padded:.0f} of {rows:.0f} rows begin or end with tokens that have one and the same value on both sides, "
        "such as 0, and no mask was given. Is this padding? Then pass mask=; otherwise padding counts as agreement "
        "and makes every metric look healthier than it is"
    ]


def _mild(state: State) -> str:
    return "watch: " if state == "watch" else ""


def _mismatch(metrics: Mapping[str, float], values: Mapping[str, float], measured: float) -> list[str]:
    """Compare the two policies with the limits."""
    sentences = _filled(metrics, measured)
    for key in ("kl_rollout_train_k3", "chi2_train_rollout", "logratio_abs_max"):
        limit, value = BY_KEY[key], metrics[key]
        state = largest_state(metrics, measured) if key == "logratio_abs_max" else limit.state(value)
        hint = limit.hint
        if key == "kl_rollout_train_k3":
            hint = _cause(metrics, values) or hint
        if state != "healthy":
            sentences.append(f"{_mild(state)}{key} is {value:.3g} (healthy: {limit.range}): {hint}")
    rated = ratio_state(metrics["ratio_mean"], metrics["ratio_std"], measured)
    if rated in ("watch", "alarm") and measured >= FEWEST_TOKENS:
        error = metrics["ratio_std"] / math.sqrt(measured)
        cause = (
            "top-p, top-k, min-p without its log_mass, a softmax over fewer tokens on one side"
            if metrics["ratio_mean"] < 1.0
            else "a shift or a constant"
        )
        sentences.append(
            f"{_mild(rated)}ratio_mean is {metrics['ratio_mean']:.4g} +- {error:.2g}, but it is 1 if the tokens "
            f"were sampled from the rollout policy; likely causes: {cause}, a temperature applied on one side only, "
            "weights other than those that sampled, or an update on these tokens before train_logp was computed"
        )
    return sentences


def _cause(metrics: Mapping[str, float], values: Mapping[str, float]) -> str | None:
    """Say what the call knows about the cause of a large k3: ages, and the correlation of the probabilities."""
    tokens, age = metrics["tokens"], values.get("age", 0.0)
    related = metrics.get("prob_correlation")
    if age > 0.0:
        return (
            f"tokens are {age / tokens:.3g} versions old on average, which raises it; if it is as large where "
            "age is 0, look for a temperature on one side, or for log-probs that are shifted by a token"
        )
    fresh = "all tokens are of the current version, so it is not staleness; " if "age" in values else ""
    if related is not None and related < UNRELATED:
        return (
            f"{fresh}the two probabilities hardly correlate ({related:.2f}): look for log-probs shifted by a token, "
            "gathered at the wrong index, or computed with other weights"
        )
    if related is not None and related > RELATED:
        old = "" if fresh else ", or old weights"
        return (
            f"{fresh}the two probabilities correlate ({related:.2f}), so they are of the same tokens: look for a "
            f"temperature on one side, a coarse precision{old}"
        )
    return f"{fresh}likely causes: a low-precision engine, which a correction is for; {BUGS}" if fresh else None


def _filled(metrics: Mapping[str, float], measured: float) -> list[str]:
    """Recognize fillers at a part of the tokens of one side, which `detail="full"` counts."""
    counts = [metrics.get(f"tokens_{side}_filled", 0.0) for side in SIDES]
    for side, count, other in zip(SIDES, counts, reversed(counts), strict=True):
        if count >= max(FILLED_TOKENS, FILLED * measured, FILLED_TIMES * other):
            return [
                f"{side}_logp is exactly 0 or -1 at {count:.0f} of {measured:.0f} tokens, and the other side more than "
                f"1 nat away: placeholders where log-probs are missing, or padding that the mask does not cover; "
                f"{REMEDIES[side]}, or mask these tokens"
            ]
    return []


def _sampler(values: Mapping[str, float]) -> list[str]:
    """Compare the entropy, where it is given, with log-probs of policies that agree."""
    paired = values.get("entropy_gap_tokens", 0.0)
    if paired < FEWEST_TOKENS:
        return []
    gap, entropy = values["entropy_gap"] / paired, values["entropy"] / values["entropy_tokens"]
    squares, cross, lengths = (values[f"entropy_gap_{name}"] for name in ("squares", "cross", "lengths"))
    if sampler_state(gap, sampler_error(squares, cross, lengths, gap, paired), entropy, values["sequences"]) != "alarm":
        return []
    return [
        f"the mean entropy is {entropy:.3g} and the mean negative log-prob {entropy - gap:.3g}: they would be equal if "
        "the tokens were sampled from these log-probs. Does the engine report raw log-probs (vLLM's default) of tokens "
        "that it samples with a temperature or top-p? Then the two policies agree, and ratios correct nothing: ask for "
        "processed log-probs, and divide the trainer's logits by the temperature"
    ]


def _kept(metrics: Mapping[str, float], spec: Spec, differ: bool) -> list[str]:
    """Say what rejection leaves; wider bounds are no remedy where the policies differ."""
    limit, share = BY_KEY["tokens_kept_fraction"], metrics["tokens_kept_fraction"]
    state = limit.state(share)
    # A bound that the batch decides rejects a share of it by design.
    if state == "healthy" or (state == "watch" and spec.asks_batch):
        return []
    hint = "first find out why the two policies differ; wider bounds train on what is broken" if differ else limit.hint
    if not metrics["tokens_kept"]:
        return [f"every token is rejected, so nothing trains: {hint}"]
    return [
        f"{_mild(state)}only {100 * share:.1f} % of the tokens and "
        f"{100 * metrics['sequences_kept_fraction']:.1f} % of the sequences are kept: {hint}"
    ]


def _weights(metrics: Mapping[str, float], spec: Spec) -> list[str]:
    """Say what the weights leave, and whether products of ratios mean anything."""
    sentences = []
    if spec.weight is not None:
        for side, bound, wrong in (("upper", spec.weight.upper, "below"), ("lower", spec.weight.lower, "above")):
            if isinstance(bound, float) and bound != 1.0 and (bound < 1.0) == (wrong == "below"):
                sentences.append(
                    f"Weight.{side} is {bound:g}, {wrong} 1: it moves the weights of tokens on which both policies "
                    "agree, whose ratio is 1; bounds are of the ratio, such as 0.5 to 2"
                )
        limit = BY_KEY["weight_ess" if spec.weight.per_token else "sequence_weight_ess"]
        ess = metrics["weight_ess" if spec.weight.per_token else f"{weight_of_sequence(spec)}_ess"]
        state = limit.state(ess)
        # 0 where every weight is 0: then all is rejected.
        if state != "healthy" and metrics["tokens_kept"]:
            sentences.append(
                f"{_mild(state)}effective sample size is {100 * ess:.1f} % of the batch after the bounds: {limit.hint}"
            )
    sequence_sums = spec.weight is not None and spec.weight.is_product
    sequence_sums |= any(criterion.statistic.log_space and criterion.reduce == "sum" for criterion in spec.criteria)
    if sequence_sums and metrics["sequence_logratio_abs_mean"] > NEAR_CLAMP * spec.clamp:
        sentences.append(
            "the sum of D over a sequence (its length T times KL) is "
            f"{metrics['sequence_logratio_abs_mean']:.1f} nats on average, near {spec.clamp:g}, where it is cut off "
            "(Spec.clamp): products of the ratios of such sequences carry no information; use token ratios or "
            "geometric means"
        )
    return sentences

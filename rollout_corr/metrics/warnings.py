"""`warnings()`: sentences about metrics that deserve a look, by the bounds of [limits.py](limits.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..specs.correction import Spec
from .limits import BY_KEY, FEWEST_TOKENS, NEAR_CLAMP, ratio_room
from .native import TOKENS, readers_of, weight_of_sequence
from .rows import exp

# What is filled in where log-probs are missing, and whose perplexity a float holds.
FILLERS = (0.0, -1.0)
SIDES = ("train", "rollout")


def warnings_of(values: Mapping[str, float], spec: Spec) -> list[str]:
    """Say in plain words which metrics deserve a look, from merged statistics by name."""
    metrics = readers_of(spec).read(values)
    found = []
    if metrics["tokens_nonfinite"]:
        found.append(
            f"{_tokens(metrics['tokens_nonfinite'], 'has', 'have')} a NaN or infinite log-ratio "
            f"(nonfinite={spec.nonfinite!r}): {BY_KEY['tokens_nonfinite'].hint}"
        )
    if metrics["tokens_outside"]:
        found.append(
            f"{_tokens(metrics['tokens_outside'], 'belongs', 'belong')} to no sequence of cu_seqlens: "
            f"{BY_KEY['tokens_outside'].hint}"
        )
    if not metrics["tokens"]:
        return [*found, "no valid token: the mask is 0 everywhere, or the batch is empty; nothing was measured"]
    measured = values[str(TOKENS.units)]
    wrong = _not_log_probs(metrics) if measured >= FEWEST_TOKENS else []
    if measured >= FEWEST_TOKENS and not wrong and metrics["logratio_abs_max"] == 0.0:
        wrong.append(
            "the two log-probs are identical at every token: both arguments may be the same "
            "tensor, or the trainer's values were stored as the engine's; nothing is corrected"
        )
    # Where the values are no log-probs, or none is finite, how far they are apart says nothing more.
    found += wrong or (_mismatch(metrics, measured) if measured else [])
    return found + _kept(metrics) + _weights(metrics, spec)


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
    found = []
    for side in SIDES:
        mean, perplexity = -metrics[f"sequence_{side}_log_ppl_mean"], metrics[f"sequence_{side}_ppl_mean"]
        if mean > 1e-3:
            found.append(
                f"{side}_logp: log-probs lie at or below 0, and these average to {mean:+.3g} over sequences: negative "
                "log-likelihoods, probabilities or a mask in their place? Pass log-probabilities of the sampled tokens"
            )
            continue
        for filler in FILLERS:
            # exp is strictly convex, so both means agree where all sequences have one mean.
            same = abs(mean - filler) < 1e-6 and abs(perplexity - exp(-filler)) < 1e-5
            certain = filler == 0.0 and max(metrics[f"sequence_{one}_log_ppl_mean"] for one in SIDES) < 1e-3
            if same and not (certain and metrics["logratio_abs_max"] > 0.0):
                remedy = "compute them with the trainer" if side == "train" else "ask the engine for them"
                found.append(
                    f"{side}_logp: {filler:g} at every token, a placeholder: the log-probs never arrived; {remedy}"
                )
    return found


def _mismatch(metrics: Mapping[str, float], measured: float) -> list[str]:
    """Compare the two policies with the limits."""
    found = []
    for key in ("kl_rollout_train_k3", "chi2_train_rollout", "logratio_abs_max"):
        limit = BY_KEY[key]
        state = limit.state(metrics[key])
        if state != "healthy":
            mild = "watch: " if state == "watch" else ""
            found.append(f"{mild}{key} is {metrics[key]:.3g} (healthy: {limit.range}): {limit.hint}")
    error = metrics["ratio_std"] / math.sqrt(measured) if measured else 0.0
    away = metrics["ratio_mean"] - 1.0
    if abs(away) > ratio_room(metrics["ratio_std"], measured):
        cause = (
            "top-p, top-k, min-p without its log_mass, a softmax over fewer tokens on one side"
            if away < 0
            else "a shift or a constant"
        )
        found.append(
            f"ratio_mean is {metrics['ratio_mean']:.4g} +- {error:.2g} and would be 1 if the tokens were sampled "
            f"from the rollout log-probs: {cause}, a temperature that one side lacks, other weights than those "
            "that sampled, or tokens that were trained on already"
        )
    return found


def _kept(metrics: Mapping[str, float]) -> list[str]:
    """Say what rejection leaves."""
    limit = BY_KEY["tokens_kept_fraction"]
    if not metrics["tokens_kept"]:
        return [f"everything is rejected, 0.0 % of the tokens train: {limit.hint}"]
    if limit.state(metrics["tokens_kept_fraction"]) != "alarm":
        return []
    return [
        f"only {100 * metrics['tokens_kept_fraction']:.1f} % of the tokens and "
        f"{100 * metrics['sequences_kept_fraction']:.1f} % of the sequences are kept: {limit.hint}"
    ]


def _weights(metrics: Mapping[str, float], spec: Spec) -> list[str]:
    """Say what the weights leave, and whether products of ratios mean anything."""
    found = []
    if spec.weight is not None:
        limit = BY_KEY["weight_ess" if spec.weight.per_token else "sequence_weight_ess"]
        ess = metrics["weight_ess" if spec.weight.per_token else f"{weight_of_sequence(spec)}_ess"]
        # 0 where every weight is 0: then all is rejected.
        if limit.state(ess) == "alarm" and metrics["tokens_kept"]:
            found.append(f"effective sample size is {100 * ess:.1f} % of the batch after the bounds: {limit.hint}")
    sequence_sums = spec.weight is not None and spec.weight.is_product
    sequence_sums |= any(criterion.statistic.log_space and criterion.reduce == "sum" for criterion in spec.criteria)
    if sequence_sums and metrics["sequence_logratio_abs_mean"] > NEAR_CLAMP * spec.clamp:
        found.append(
            "the sum of D over a sequence (its length T times KL) is "
            f"{metrics['sequence_logratio_abs_mean']:.1f} nats on average, near {spec.clamp:g}, where it is cut off "
            "(Spec.clamp): products of the ratios of such sequences carry no information; use token ratios or "
            "geometric means"
        )
    return found

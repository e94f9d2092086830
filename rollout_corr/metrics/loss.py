"""Statistics and metrics of a policy loss: their names, their order and, in one table, what each is."""

from __future__ import annotations

import math

from rollout_corr.metrics.metric import Metric, ratio_of, std_of
from rollout_corr.spec.loss import KL, Objective, SquaredLogRatio

TRAINED = "tokens that train"
OF_SCOPE = {"kept": TRAINED, "all": "valid tokens, finite"}


# What is known of whole sequences, whichever ranks hold their tokens; the first sums.
OF_SEQUENCES = ("loss_valid_tokens", "loss_valid_sequences", "loss_tokens", "loss_sequences")


def sum_names(objective: Objective) -> tuple[str, ...]:
    """Sums: counts, the surrogate, what it clipped, its ratio; then the terms beside it."""
    names = [*OF_SEQUENCES, "loss_tokens_nonfinite"]
    names += ["loss_policy", "clip_low", "clip_high", "clip_dual", "ppo_d", "ppo_ratio", "ppo_ratio2", "ppo_k3"]
    if objective.kl is not None:
        names += ["ref_kl"]
    if objective.regulariser is not None:
        names += ["log_ratio2"]
    return tuple(names)


def max_names() -> tuple[str, ...]:
    """Maxima; minima travel as maxima of the negated value."""
    return "max_ppo_log_ratio", "-min_ppo_log_ratio"


def table(objective: Objective) -> list[Metric]:
    """The metrics of a policy loss, in the order in which they are reported."""
    n = "loss_tokens"

    def count(key: str, formula: str, unit: str, healthy: str) -> Metric:
        return Metric(key, formula, unit, "-", healthy, lambda v: v[key])

    def mean(key: str, formula: str, unit: str, healthy: str, name: str) -> Metric:
        return Metric(key, formula, unit, TRAINED, healthy, lambda v: ratio_of(v[name], v[n]))

    def extremum(key: str, name: str, sign: float) -> Metric:
        words = f"{key.rpartition('_')[2]} of the surrogate's ratio"
        return Metric(key, words, "ratio", TRAINED, "-", lambda v: math.exp(sign * v[name]) if v[n] else 0.0)

    rows = [
        count("loss_tokens", "tokens that train, without the non-finite ones", "tokens", "-"),
        count("loss_sequences", "sequences that hold one", "sequences", "-"),
        count("loss_tokens_nonfinite", "valid tokens with NaN or infinity in what the loss needs", "tokens", "0"),
        mean("loss_policy", "mean of the surrogate times the weight", "loss", "-", "loss_policy"),
        mean("clip_fraction_low", "tokens clipped from below", "fraction", "< 0.1", "clip_low"),
        mean("clip_fraction_high", "tokens clipped from above", "fraction", "< 0.1", "clip_high"),
        mean("clip_fraction_dual", "tokens cut by dual, delta or DPPO's upper", "fraction", "near 0", "clip_dual"),
        Metric(
            "ppo_kl",
            "mean base - new_logp, each saturated at +-1024",
            "nats",
            TRAINED,
            "near 0",
            lambda v: ratio_of(0.0 - v["ppo_d"], v[n]),
        ),
        mean("ppo_kl_k3", "mean r - 1 - log r of the surrogate's ratio", "nats", "< 0.01", "ppo_k3"),
        Metric(
            "ppo_ratio_mean",
            "mean of the surrogate's ratio r",
            "ratio",
            TRAINED,
            "near 1",
            lambda v: ratio_of(v["ppo_ratio"] + v[n], v[n]),
        ),
        Metric(
            "ppo_ratio_std",
            "population standard deviation of r",
            "ratio",
            TRAINED,
            "< 0.2",
            lambda v: std_of(v["ppo_ratio"], v["ppo_ratio2"], v[n]),
        ),
        extremum("ppo_ratio_min", "-min_ppo_log_ratio", -1.0),
        extremum("ppo_ratio_max", "max_ppo_log_ratio", 1.0),
    ]
    if objective.kl is not None:
        formula = f"mean {objective.kl.kind} of new_logp - ref_logp, without coefficient and weight"
        rows.append(_beside("ref_kl", formula, "nats", "-", objective.kl, "ref_kl"))
    if objective.regulariser is not None:
        formula = "mean squared log-ratio, without its coefficient"
        rows.append(_beside("log_ratio_squared", formula, "nats^2", "near 0", objective.regulariser, "log_ratio2"))
    return rows


def _beside(key: str, formula: str, unit: str, healthy: str, term: KL | SquaredLogRatio, name: str) -> Metric:
    if term.scope == "kept":
        return Metric(key, formula, unit, TRAINED, healthy, lambda v: ratio_of(v[name], v["loss_tokens"]))
    return Metric(
        key,
        formula,
        unit,
        OF_SCOPE["all"],
        healthy,
        lambda v: ratio_of(v[name], v["loss_valid_tokens"] - v["loss_tokens_nonfinite"]),
    )

"""The statistics and metrics of a policy loss, a row each. Values of the sums: `statistics` in definition/loss.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..specs.caches import cached
from ..specs.terms import KL, Objective, SquaredLogRatio
from .formulas import mean, mean_around, plain, std
from .rows import EACH, Metric, Over, Readers

# Sums of whole sequences, which the first rank of `Ranks.sequence` alone may add. They stand first.
OF_SEQUENCES = ("loss_valid_tokens", "loss_valid_sequences", "loss_tokens", "loss_sequences")
SUMS = (
    *OF_SEQUENCES, "loss_tokens_nonfinite", "loss_policy", "clip_low", "clip_high", "clip_dual", "ppo_d", "ppo_ratio",
    "ppo_ratio2", "ppo_k3",
)  # fmt: skip
MAXIMA = ("max_ppo_log_ratio", "-min_ppo_log_ratio")


def sum_names(objective: Objective) -> tuple[str, ...]:
    """The sums in order: counts, the surrogate, its additional terms, then what the surrogate found in the batch."""
    terms = {"ref_kl": objective.kl, "log_ratio2": objective.regularizer}
    return (*SUMS, *(name for name, term in terms.items() if term is not None), *objective.surrogate.traits.sums)


def max_names() -> tuple[str, ...]:
    """The maxima in order. Minima travel as maxima of the negated value."""
    return MAXIMA


def with_kl_of(statistics: Tensor, penalty: Tensor, objective: Objective) -> Tensor:
    """Put the KL's sum, the only one of use in `penalty`, among the sums of a loss without KL."""
    place = sum_names(objective).index("ref_kl")
    return torch.cat((statistics[:place], penalty[place : place + 1], statistics[place:]))


TRAINED = Over("trained tokens", "loss_tokens")
VALID = Over("valid tokens, finite", "loss_valid_tokens")

# fmt: off
ALWAYS = [
    Metric("tokens_trained", "trained tokens, without the non-finite ones", "tokens", EACH, "-",
           plain("loss_tokens")),
    Metric("sequences_trained", "sequences with a token that trains", "sequences", EACH, "-", plain("loss_sequences")),
    Metric("tokens_loss_nonfinite", "valid tokens with NaN or infinity in what the loss needs", "tokens", EACH, "0",
           plain("loss_tokens_nonfinite")),
    Metric("surrogate_loss_mean", "mean of the surrogate times the weight, by token whatever `Loss.mean` is", "loss",
           TRAINED, "-", mean("loss_policy")),
    Metric("clip_low_fraction", "tokens clipped from below", "fraction", TRAINED, "< 0.1", mean("clip_low")),
    Metric("clip_high_fraction", "tokens clipped from above", "fraction", TRAINED, "< 0.1", mean("clip_high")),
    Metric("clip_dual_fraction", "tokens cut by dual, delta or DPPO's upper", "fraction", TRAINED, "near 0",
           mean("clip_dual")),
    Metric("kl_old_new_k1", "mean old - new_logp, each saturated at +-1024: estimates KL(old || new)", "nats", TRAINED,
           "near 0",
           "(0.0 - 'ppo_d') / n"),
    Metric("kl_old_new_k3", "mean r - 1 - log r of the surrogate's ratio: estimates KL(old || new)", "nats", TRAINED,
           "< 0.01", mean("ppo_k3")),
    Metric("surrogate_ratio_mean", "mean of the surrogate's ratio r", "ratio", TRAINED, "near 1",
           mean_around(1.0, "ppo_ratio")),
    Metric("surrogate_ratio_std", "population standard deviation of r", "ratio", TRAINED, "< 0.2", std("ppo_ratio")),
    Metric("surrogate_ratio_min", "min of the surrogate's ratio", "ratio", TRAINED, "-",
           "exp(-'-min_ppo_log_ratio')"),
    Metric("surrogate_ratio_max", "max of the surrogate's ratio", "ratio", TRAINED, "-",
           "exp('max_ppo_log_ratio')"),
]

# Of what a surrogate finds in the whole batch, by the sum that has to be there.
OF_BATCH = {
    "cov_eligible": Metric("cov_eligible_fraction", "tokens that ClipCov draws from", "fraction", TRAINED, "-",
                           mean("cov_eligible")),
    "cov_chosen": Metric("cov_chosen_fraction", "tokens that ClipCov or KLCov chose", "fraction", TRAINED, "the share",
                         mean("cov_chosen")),
    "cov_of_chosen": Metric("cov_chosen_mean", "mean covariance of the tokens chosen", "nats",
                            Over("tokens chosen", "cov_chosen"), "-", mean("cov_of_chosen")),
    "group_contrast": Metric("sequence_group_contrast_fraction",
                             "sequences whose group has some with A > 0 and others", "fraction",
                             Over("sequences with a token that trains", "loss_sequences"), "-", mean("group_contrast")),
}
# fmt: on


# What docs/dashboard.md tells to look at, behind the ten of a correction; the KL to a reference follows.
DASHBOARD = ("surrogate_loss_mean", "kl_old_new_k3", "clip_low_fraction", "clip_high_fraction", "tokens_loss_nonfinite")


def kl_key(term: KL) -> str:
    """The key of a KL term, such as "kl_new_ref_k3": what it estimates, and how, if new sampled the tokens."""
    return f"kl_{'ref_new' if term.swapped else 'new_ref'}_{term.kind}"


def metrics_of(objective: Objective) -> list[Metric]:
    """The rows of a policy loss's metrics, in the order in which they are reported."""
    rows = list(ALWAYS)
    if objective.kl is not None:
        k = "ref_logp - new_logp" if objective.kl.swapped else "new_logp - ref_logp"
        formula = f"mean {objective.kl.kind} of {k} within the KL's clamps and bound, without coefficient and weight"
        rows.append(_term(kl_key(objective.kl), formula, "nats", "-", objective.kl, "ref_kl"))
    if objective.regularizer is not None:
        formula = "mean (new_logp - old)^2, without its coefficient"
        rows.append(
            _term("logratio_new_old_squared_mean", formula, "nats^2", "near 0", objective.regularizer, "log_ratio2")
        )
    rows += [OF_BATCH[name] for name in objective.surrogate.traits.sums if name in OF_BATCH]
    return rows


@cached(maxsize=256)
def readers_of(objective: Objective) -> Readers:
    """Sort the metrics of a loss by how they are read, once for all calls."""
    return Readers.of(metrics_of(objective))


@cached(maxsize=256)
def dashboard_of(objective: Objective) -> Readers:
    """The metrics of a loss that a dashboard shows."""
    keys = DASHBOARD if objective.kl is None else (*DASHBOARD, kl_key(objective.kl))
    rows = {row.key: row for row in metrics_of(objective)}
    return Readers.of(rows[key] for key in keys)


def _term(key: str, formula: str, unit: str, healthy: str, term: KL | SquaredLogRatio, name: str) -> Metric:
    """An additional term of the loss, over the tokens of its scope."""
    if term.scope == "kept":
        return Metric(key, formula, unit, TRAINED, healthy, mean(name))
    return Metric(key, formula, unit, VALID, healthy, f"'{name}' / (n - 'loss_tokens_nonfinite')")

"""Rows, columns and phrases that the terminal and the pages share."""

from __future__ import annotations

import math

from rollout_corr.diagnose.doctor.cause import counted
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.what_if import Outcome, Setting

ABOUT_D = "D is the log-ratio train_logp - rollout_logp of a token."
HEALTHY = "no known sign of a bug, and the policies agree"

# Metrics of the first table.
KEYS = (
    *("tokens", "sequences", "tokens_nonfinite", "d_mean", "d_abs_mean", "abs_logp_p50", "abs_logp_p99"),
    *("abs_logp_p99.9", "d_abs_max", "kl_k1", "kl_k3", "ratio_mean", "chi2_token", "sum_d_abs_mean"),
    *("train_ppl", "rollout_ppl", "prob_abs_diff_mean", "prob_correlation"),
)
# Metrics of each level of weights.
LEVEL_KEYS = ("weight_raw_mean", "weight_raw_max", "weight_raw_ess", "weight_ess", "weight_above_fraction")
AXES = {
    "position": "position in the sequence",
    "probability": "rollout probability",
    "length": "sequence length (|mean D| of a sequence)",
    "turn": "turn",
    "versions": "weight version",
    "steps": "step",
}
OUTCOME_HEADS = ("setting", "tokens kept", "sequences kept", "mean weight", "ESS", "bias", "variance", "T x KL")
PARETO = "Pareto-optimal (no other setting has lower bias and lower variance)"


def level_key(level: str, key: str) -> str:
    """Return the name of a metric of a level's own units: tokens, or sequences."""
    return f"{level}/{key}" if level == "token" else f"{level}/sequence_{key}"


def number(value: float) -> str:
    """Format a number for a page."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1000 else f"{value:.4g}"


def outcome_cells(setting: Setting, outcome: Outcome) -> list[str]:
    """Return a row of the table of settings."""
    values = (outcome.weight_mean, outcome.ess, outcome.bias, outcome.variance)
    kept = (f"{100 * outcome.tokens_kept:.3g} %", f"{100 * outcome.sequences_kept:.3g} %")
    shown = (f"{value:.3g}" if math.isfinite(value) else "-" for value in values)
    return [setting.name, *kept, *shown, "!" if outcome.note else ""]


def fields_of(dump: Dump) -> str:
    """List the fields that were read, with their roles where the names differ."""
    return ", ".join(role if role == name else f"{role} = {name}" for role, name in dump.fields.items())


def problems_title(dump: Dump) -> str:
    """Say how many problems there were."""
    return f"{counted(dump.problems.count, 'problem')} while reading; everything else was read"

"""The tables of tests/frameworks/coverage.md: `PYTHONPATH=tests python -m builders.coverage_page` writes them.

What verl, xtuner and SkyRL list of their corrections was taken from their own configuration, code and documentation at
the commits that the page names; `make test-peers` compares the lists with checkouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import rollout_corr as rc

PAGE = Path(__file__).resolve().parents[1] / "frameworks" / "coverage.md"
BEGIN, END = (
    "<!-- {}: made by `python -m builders.coverage_page`; a test compares them -->",
    "<!-- end of what is made -->",
)
TOKENS = torch.zeros(2, 3), torch.zeros(2, 3)


class Framework(NamedTuple):
    """The options and metrics that a framework lists for its correction.

    Attributes:
        name: Its name, which its reader and its metrics have too.
        options: The fields of its configuration of the correction.
        settings: Configurations that use all of them, each value that is a word too.
        metrics: The keys of its metrics, without their prefix.
        prefix: What stands before them here.
        answers: Keys of metrics, and fields, that have another row here.
    """

    name: str
    options: tuple[str, ...]
    settings: tuple[Mapping[str, Any], ...]
    metrics: tuple[str, ...]
    prefix: str
    answers: Mapping[str, str]


def words(text: str) -> tuple[str, ...]:
    """Split at blanks."""
    return tuple(text.split())


RS = words(
    "token_k1 token_k2 token_k3 seq_sum_k1 seq_sum_k2 seq_sum_k3 seq_mean_k1 seq_mean_k2 seq_mean_k3 seq_max_k2 "
    "seq_max_k3"
)
QUANTILES = words("rollout_is_p25 rollout_is_p50 rollout_is_p75 rollout_is_p95 rollout_is_p99")
QUANTILE = (
    '`weight_before_bounds_p25` or `sequence_weight_before_bounds_p25` and the like, with `detail="full"`; verl has '
    "them no more"
)
VERL = Framework(
    "verl",
    words(
        "rollout_is rollout_is_threshold rollout_is_batch_normalize rollout_rs rollout_rs_threshold bypass_mode "
        "loss_type"
    ),
    (
        {"rollout_is": "token"},
        {"rollout_is": "sequence", "rollout_is_threshold": 5.0},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
        {"rollout_is": "token", "rollout_is_batch_normalize": True},
        *({"rollout_rs": one, "rollout_rs_threshold": "0.5_2.0" if one.endswith("k1") else 0.01} for one in RS),
        {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "0.5_2.0,2.5"},
    ),
    words(
        "rollout_is_mean rollout_is_std rollout_is_min rollout_is_max rollout_is_eff_sample_size "
        "rollout_is_ratio_fraction_high rollout_is_ratio_fraction_low rollout_is_seq_mean rollout_is_seq_std "
        "rollout_is_seq_min rollout_is_seq_max rollout_is_seq_max_deviation rollout_is_seq_fraction_high "
        "rollout_is_seq_fraction_low rollout_rs_masked_fraction rollout_rs_seq_masked_fraction training_ppl "
        "rollout_ppl ppl_ratio training_log_ppl rollout_log_ppl log_ppl_diff log_ppl_abs_diff log_ppl_diff_max "
        "log_ppl_diff_min kl k3_kl chi2_token chi2_seq"
    )
    + QUANTILES,
    "rollout_corr/",
    {
        "bypass_mode": '`rc.recipe("verl", ...)`: the loss takes `rollout_logp` and no `old_logp`',
        "loss_type": '`rc.recipe("verl", ...)`: `PPO` of new/rollout, or `Reinforce`',
        **dict.fromkeys(QUANTILES, QUANTILE),
    },
)  # fmt: skip
BOUNDS = {"rollout_is_threshold": (2.0, 0.5)}
XTUNER = Framework(
    "xtuner",
    words("rollout_is_level rollout_is_mode rollout_is_threshold rollout_is_mask_threshold rollout_is_veto_threshold"),
    (
        {"rollout_is_level": "token", **BOUNDS},
        {"rollout_is_level": "sequence", **BOUNDS},
        {"rollout_is_level": "geometric", **BOUNDS},
        {"rollout_is_mode": "mask", **BOUNDS},
        {"rollout_is_mode": "both", "rollout_is_mask_threshold": (5.0, 0.2), **BOUNDS},
        {"rollout_is_veto_threshold": (100.0, 0.01), **BOUNDS},
    ),
    words(
        "valid rollout_is_veto_fraction rollout_is_catastrophic_token_fraction rollout_is_max rollout_is_min "
        "rollout_is_mean rollout_is_std rollout_is_ratio_fraction_high rollout_is_ratio_fraction_low "
        "rollout_is_eff_sample_size rollout_is_seq_mean rollout_is_seq_std rollout_is_seq_max rollout_is_seq_min "
        "rollout_is_seq_max_deviation rollout_is_seq_fraction_high rollout_is_seq_fraction_low "
        "rollout_is_masked_fraction rollout_is_seq_masked_fraction mismatch_training_ppl mismatch_training_log_ppl "
        "mismatch_kl mismatch_k3_kl mismatch_rollout_ppl mismatch_rollout_log_ppl mismatch_log_ppl_diff "
        "mismatch_log_ppl_abs_diff mismatch_log_ppl_diff_max mismatch_log_ppl_diff_min mismatch_ppl_ratio "
        "mismatch_logprob_abs_diff"
    ),
    "mismatch/",
    {},
)
DIFFERENCES = "rollout_train_logprobs_abs_diff_"
SKYRL = Framework(
    "skyrl",
    words(
        "tis_ratio_type token_tis_ratio_clip_high sequence_tis_ratio_clip_high sequence_mask_metric geo_mask_high "
        "geo_mask_low product_mask_high product_mask_low outlier_token_is_threshold_low "
        "outlier_token_is_threshold_high token_mask_is_threshold_low token_mask_is_threshold_high"
    ),
    (
        {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0},
        {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 5.0},
        {"sequence_mask_metric": "geometric", "geo_mask_low": 0.99, "geo_mask_high": 1.01},
        {"sequence_mask_metric": "product", "product_mask_low": 0.5, "product_mask_high": 2.0},
        {"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100.0},
        {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0},
    ),
    words(
        "tis_token_clip_high_ratio tis_seq_clip_high_ratio outlier_seq_masked_ratio outlier_seq_over_high_ratio "
        "outlier_seq_under_low_ratio token_mask_ratio geo_sequence_mask_masked_ratio geo_sequence_mask_over_high_ratio "
        "geo_sequence_mask_under_low_ratio product_sequence_mask_masked_ratio product_sequence_mask_over_high_ratio "
        "product_sequence_mask_under_low_ratio is_ratio_mean is_ratio_std is_ratio_max is_ratio_min"
    )
    + tuple(DIFFERENCES + end for end in ("mean", "std", "max", "min")),
    "",
    {
        f"{DIFFERENCES}mean": "`logratio_abs_mean`",
        f"{DIFFERENCES}std": "compute sqrt(2 `kl_rollout_train_k2` - `logratio_abs_mean`^2)",
        f"{DIFFERENCES}max": "`logratio_abs_max`",
        f"{DIFFERENCES}min": "none: see `tokens_differing_fraction`",
    },
)
FRAMEWORKS = VERL, XTUNER, SKYRL


def emitted(framework: Framework) -> set[str]:
    """The keys that `metrics` returns under all the settings, without the prefix."""
    found: set[str] = set()
    every = {key: value for settings in framework.settings for key, value in settings.items()}
    for settings in (*framework.settings, every):
        spec = rc.spec(framework.name, settings)
        spec = replace(spec, report=("native", framework.name))
        found |= {key.removeprefix(framework.prefix) for key in rc.correct(*TOKENS, spec=spec).metrics(framework.name)}
    return found


def part(framework: Framework) -> str:
    """The tables of a framework's options and metrics."""
    lines = [BEGIN.format(framework.name), "", "| option | here |", "|---|---|"]
    for settings in framework.settings:
        said = ", ".join(f"`{key}: {value}`" for key, value in settings.items())
        lines.append(f"| {said} | `{replace(rc.spec(framework.name, settings), report=('native',))!r}` |")
    lines += [f"| `{key}` | {framework.answers[key]} |" for key in framework.options if key in framework.answers]
    names = ", ".join(f"`{key}`" for key in framework.metrics if key not in framework.answers)
    prefix = f", behind `{framework.prefix}`" if framework.prefix else ""
    lines += ["", f'Metrics with the same key in `metrics("{framework.name}")`{prefix}: {names}.', ""]
    others: dict[str, list[str]] = {}
    for key in framework.metrics:
        if key in framework.answers:
            others.setdefault(framework.answers[key], []).append(f"`{key}`")
    if others:
        lines += ["| other metrics | here |", "|---|---|"]
        lines += [*(f"| {', '.join(keys)} | {answer} |" for answer, keys in others.items()), ""]
    return "\n".join([*lines, END])


def main() -> None:
    """Write the tables in place of those of the page."""
    text = PAGE.read_text(encoding="utf-8")
    for framework in FRAMEWORKS:
        before, begin, rest = text.partition(BEGIN.format(framework.name))
        assert begin, f"{PAGE}: no place for the tables of {framework.name}"
        text = before + part(framework) + rest.partition(END)[2]
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""docs/coverage.md: what verl, xtuner and SkyRL say of their corrections, and its row here.

`PYTHONPATH=tests python -m builders.coverage_page > docs/coverage.md`. What they list was taken from their own
configuration, code and documentation at the commits named; `make test-peers` compares the lists with checkouts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import rollout_corr as rc
from rollout_corr.frameworks.shared import lookup

TOKENS = torch.zeros(2, 3), torch.zeros(2, 3)


class Framework(NamedTuple):
    """The options and metrics that a framework lists for its correction.

    Attributes:
        name: Its name, which is that of its reader and of its metrics.
        at: The commit.
        options: The fields of its configuration of the correction.
        settings: Configurations that use all of them, each value that is a word too.
        metrics: The keys of its metrics, without their prefix.
        prefix: What stands before them here.
        answers: Keys of metrics, and fields, that have another row here.
    """

    name: str
    at: str
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
    "verl 1dda039 (docs/algo/rollout_corr.md, verl/trainer/config/algorithm.py)",
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
    "xtuner b934f46 (xtuner/v1/rl/rollout_is.py)",
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
    "SkyRL a956457 (docs/content/docs/algorithms/off_policy_correction.mdx, OffPolicyCorrectionConfig)",
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

SYSTEMS = {
    "verl": (
        ("three policies, PPO with a correction (`decoupled_*`)", "`verl.decoupled_*`: Spec and recipe of each"),
        ("two policies, PPO-clip (`bypass_ppo_clip*`)", "`verl.bypass_ppo_clip*`"),
        ("two policies, REINFORCE (`bypass_pg_*`)", "`verl.bypass_pg_*`"),
        ("metrics alone (`disabled`)", "`verl.disabled`, or any Spec with `apply=False`"),
        ("weights of tokens with rejection of tokens, or either alone", "any `Weight` with any `Criterion`s"),
        ("the trainer's call, the loss in bypass mode, both as functions", "[drop-ins](dropins_in_depth.md)"),
        (
            "the engine has to return log-probs (`calculate_log_probs`)",
            "`rollout-corr check` names a `false`, or none (before 0.9.0: off)",
        ),
    ),
    "xtuner": (
        ("levels token, sequence, geometric; modes truncate, mask, both", "`rc.spec(\"xtuner\", ...)`, all nine"),
        ("the veto, and its levels of xtuner#2023", "criteria that drop the sequence"),
        ("packed sequences by `num_tokens`", "`cu_seqlens`, without the padding between"),
        ("merging over packs (`merge_rollout_is_metrics`)", "`Statistics` merge by + and max"),
        ("staleness of its replay buffer", "`xtuner.staleness`"),
    ),
    "skyrl": (
        ("TIS, sequence masks, outlier mask, token mask, in this order", "`skyrl.*`; `sums_over=\"kept\"`"),
        ("all of its recommendations at once", "`skyrl.tldr`"),
        ("correction of every `policy_loss_type`", "recipes `skyrl.*`, each with any correction"),
        ("log-prob differences of a mini-batch", "the metrics of `rc.correct` on the log-probs of the mini-batch"),
        ("router replay (R3)", "`rc.route_agreement` tells whether it works; the replay is the engine's"),
    ),
}  # fmt: skip

CLAIMS = (
    ("verl", "weights of tokens and products of sequences lie within exp(+-20)", "`Spec.clamp`; tests/definition"),
    ("verl", "weights and rejection are independent: either works alone, and neither changes the other",
     '`rejected="mask"`; conformance of 20 presets'),
    ("verl", "normalization by the batch comes after truncation", '`normalize="batch"`; conformance'),
    ("verl", "IcePop changes weights and not the mask", '`outside="zero"`; conformance'),
    ("verl", "a mean weight beyond 0.5 to 2, an ESS below 0.3, a spread above 1, a KL above 0.1, chi2 above 1 is "
     "unhealthy", "`out.warnings()`; tighter and measured limits: [metrics.md](metrics.md#what-warnings-reports)"),
    ("verl", "sequence weights are unbiased and vary most, token weights are biased and vary less",
     "[estimators.md](estimators.md), measured"),
    ("verl", "three policies make training independent of the batch size",
     "[estimators.md](estimators.md#what-depends-on-the-batch-size)"),
    ("verl", "two policies save a forward pass", "true of any trainer that leaves `old_logp` out; not measured here"),
    ("verl", "1 to 3 % of a step, 1 % of the model's memory", "seconds and MiB of a call, no share of a step: "
     "[benchmarks.md](benchmarks.md)"),
    ("verl", "a sequence counts in `rollout_rs_seq_masked_fraction` if any token is rejected",
     "[which fraction counts what](metrics.md#native-metrics)"),
    ("xtuner", "the computation saves memory", "peak memory of a call: [benchmarks.md](benchmarks.md)"),
    ("xtuner", "a token far outside vetoes its sequence", '`Criterion("ratio", drop="sequence")`; conformance'),
    ("SkyRL", "a geometric mask evaluates better than TIS in its run", "no GPU run here; the bias and the variance of "
     "both: [estimators.md](estimators.md)"),
    ("SkyRL", "both bounds of the token mask have to be set", "read so, and `rollout-corr check` names one alone"),
    ("SkyRL", "masks apply in the order outlier, token, sequence", '`sums_over="kept"`; conformance of 31 rows'),
)  # fmt: skip

# Options of other frameworks that are no Spec.
ELSEWHERE = (
    ("verl#6800", "`rollout_rs: binary_kl` (KPop)", "read: `Criterion(\"binary_kl_symmetric\", eps=1e-6)`"),
    ("verl#7196", "`debug_rollout_actor_probs`", "read without effect; a drop-in has its metrics"),
    ("prime-rl#3555", "the ratio is 1 where the trainer's own version sampled the token",
     "`rollout_logp=torch.where(fresh, new_logp.detach(), rollout_logp)`"),
    ("SkyRL", "`loss_reduction: prompt_mean`", "refused by the reader: `Mean(\"sum\")` and "
     "`Batch(scale=1 / (prompts * tokens of the prompt))`"),
    ("SkyRL#1896", "REPO-R", "advantages are the caller's"),
    ("AReaL", "`mask_stale_rollout_tokens`: masks stale tokens of sequences that end fresh, and leaves all others",
     "`mask & ~(stale & fresh.any(1, keepdim=True))`; `Criterion(\"age\")` drops stale tokens of every sequence"),
    ("miles#1344", "`off_policy_is_function`", "`rc.CISPO` with `rollout_logp` alone"),
    ("miles", "a gate of the policy gradient, sigmoid(A * -logp / eta)", "`Batch(scale=gate)`, without its gradient"),
    ("miles", "replay of the engine's kept sets", "`rc.KeptMass` where the mass of the set is known"),
    ("slime#2305", "batches refilled after rejection", "`keep` says what went; sampling again is the trainer's"),
)  # fmt: skip

HEAD = """\
# Coverage

You use verl, xtuner or SkyRL, and want to know whether this package has every option and metric of their corrections.
It has, except where a row says "none". [conformance.md](conformance.md) shows where the numbers agree,
[presets.md](presets.md#where-the-numbers-differ-from-the-frameworks) where they differ.
"""

FOOT = """
`PYTHONPATH=tests python -m builders.coverage_page > docs/coverage.md` makes this page from what the readers and
`metrics(...)` return; `make test-peers` compares the lists with checkouts.

**Next:** [integrations.md](integrations.md) to put it into a job, [migrate.md](migrate.md) to read your configuration.
"""


def emitted(framework: Framework) -> set[str]:
    """The keys that `metrics` returns under all the settings, without the prefix."""
    found: set[str] = set()
    every = {key: value for settings in framework.settings for key, value in settings.items()}
    for settings in (*framework.settings, every):
        spec = rc.spec(framework.name, settings)
        spec = replace(spec, report=("native", framework.name))
        found |= {key.removeprefix(framework.prefix) for key in rc.correct(*TOKENS, spec=spec).metrics(framework.name)}
    return found


def presets_of(framework: Framework) -> list[str]:
    """The names of its presets here."""
    return [name for name in lookup.spec_names() if name.startswith(f"{framework.name}.")]


def markdown() -> str:
    """The page."""
    lines = [HEAD]
    for framework in FRAMEWORKS:
        lines += [
            f"## {framework.at.partition(' (')[0]}",
            "",
            f"From {framework.at.partition(' (')[2].rstrip(')')}.",
            "",
        ]
        lines += ["| part | here |", "|---|---|", *(f"| {one} | {here} |" for one, here in SYSTEMS[framework.name])]
        lines += ["", "| option | here |", "|---|---|"]
        for settings in framework.settings:
            said = ", ".join(f"`{key}: {value}`" for key, value in settings.items())
            lines.append(f"| {said} | `{replace(rc.spec(framework.name, settings), report=('native',))!r}` |")
        answers = [(key, framework.answers[key]) for key in framework.options if key in framework.answers]
        lines += [f"| `{key}` | {answer} |" for key, answer in answers]
        same = [key for key in framework.metrics if key not in framework.answers]
        names = ", ".join(f"`{key}`" for key in same)
        prefix = f", behind `{framework.prefix}`" if framework.prefix else ""
        lines += ["", f'Metrics with the same key in `metrics("{framework.name}")`{prefix}: {names}.', ""]
        others: dict[str, list[str]] = {}
        for key in framework.metrics:
            if key in framework.answers:
                others.setdefault(framework.answers[key], []).append(f"`{key}`")
        if others:
            lines += ["| other metrics | here |", "|---|---|"]
            lines += [*(f"| {', '.join(keys)} | {answer} |" for answer, keys in others.items()), ""]
        lines += [f"[Presets](presets.md#{framework.name}): {len(presets_of(framework))}.", ""]
    lines += ["## Claims", "", "What their documentation says of a correction, and where it is checked here.", ""]
    lines += ["| who | claim | here |", "|---|---|---|"]
    lines += [f"| {who} | {claim} | {here} |" for who, claim, here in CLAIMS]
    lines += [
        "",
        "## Options of others",
        "",
        "Options of other frameworks, and of open pull requests, that no preset has.",
        "",
    ]
    lines += ["| where | option | here |", "|---|---|---|"]
    lines += [f"| {where} | {option} | {here} |" for where, option, here in ELSEWHERE]
    return "\n".join(lines) + "\n" + FOOT


if __name__ == "__main__":
    sys.stdout.write(markdown())

"""Drop-in for xtuner: `RolloutImportanceSampling` and the merging of its metrics, on packed sequences.

xtuner pads what it is given packed, at the price of six host syncs a sequence. Here a pack is one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...api.correct import correct
from ...backends.choose import BackendName
from ...definition.offsets import offsets_of
from ...metrics import peers
from ...metrics.statistics import PendingMetrics, Statistics
from ...specs import validate
from ...specs.choices import NONFINITE, Nonfinite
from ...specs.correction import Spec
from ..shared.dropin import DropIn, DumpPath, Installed, Logged, Target, require_tensor
from ..shared.settings import cached_spec, defaults_of, reporting
from . import config
from . import metrics as report

MODULE = "xtuner.v1.rl.rollout_is"
MERGE = ("xtuner", "pooled")
SWITCHES = {"mismatch_over": ("pack", "sequence"), "empty_rows": ("xtuner", "skip"), "nonfinite": NONFINITE}

# The fields of xtuner's configuration, with its defaults.
FIELDS = defaults_of(config.spec)

# Metrics that xtuner takes over a pack as if it were one sequence: the native metric that is taken over sequences.
OF_SEQUENCES = {
    "training_ppl": "sequence_train_ppl_mean",
    "training_log_ppl": "sequence_train_log_ppl_mean",
    "rollout_ppl": "sequence_rollout_ppl_mean",
    "rollout_log_ppl": "sequence_rollout_log_ppl_mean",
    "log_ppl_diff": "sequence_log_ppl_diff_mean",
    "log_ppl_abs_diff": "sequence_log_ppl_diff_abs_mean",
    "log_ppl_diff_max": "sequence_log_ppl_diff_max",
    "log_ppl_diff_min": "sequence_log_ppl_diff_min",
    "ppl_ratio": "sequence_ppl_ratio_mean",
}

ADVICE = ": the source of 2026-08-21 (b934f46), not the older 0.2.0 of the package index"
DROP_IN = DropIn("xtuner", checked=("0.2.0",), switches=SWITCHES, advice=ADVICE)
installed, uninstall = DROP_IN.installed, DROP_IN.uninstall


class Metrics(dict[str, Any]):
    """Metrics of a pack under xtuner's keys, with the statistics that they are computed from."""

    def __init__(self, metrics: Mapping[str, Any], statistics: Statistics, switches: Mapping[str, Any]) -> None:
        super().__init__(metrics)
        self.statistics, self.switches = statistics, dict(switches)


@DROP_IN.documents
def install(
    *,
    spec: Spec | None = None,
    mismatch_over: str = "pack",
    empty_rows: str = "xtuner",
    nonfinite: str = "reject",
    merge: str = "xtuner",
    metrics: Logged = "dashboard",
    backend: BackendName = "auto",
    warnings: bool = True,
    dump: DumpPath = None,
    every: int = 100,
) -> Installed:
    """Replace xtuner's functions, in this process and wherever they have been imported by name.

    Args:
        spec: A correction that replaces the settings of `rollout_is`, which must be present. Its metrics are also
            logged, under "rollout_corr/".
        mismatch_over: Compute perplexities and their differences over each "pack" as if it were one sequence, as
            xtuner does, or over each "sequence".
        empty_rows: "xtuner" counts sequences of padding in extrema and shares of sequences, as xtuner does; "skip"
            leaves them out.
        nonfinite: A token whose log-ratio is NaN or infinite: "reject" its sequence, "neutral" reads the ratio as 1,
            "propagate" lets it become NaN.
        merge: "xtuner" averages the packs' averages; "pooled" gives the numbers of all packs' tokens and sequences
            together. Two collectives either way, whatever the number of metrics.
    """
    validate.one_of("merge", merge, MERGE)
    merging = merge_rollout_is_metrics if merge == "xtuner" else pool_rollout_is_metrics
    targets = (*TARGETS, Target(MODULE, "merge_rollout_is_metrics", merging))
    switches = {"mismatch_over": mismatch_over, "empty_rows": empty_rows, "nonfinite": nonfinite}
    return DROP_IN.install(targets, dump, every, warnings, spec=spec, metrics=metrics, backend=backend, **switches)


# --- xtuner's functions ---


def compute_rollout_importance_weights_and_metrics(
    self: Any,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    num_tokens: Tensor | Sequence[int],
    response_mask: Tensor,
    advantages: Tensor | None = None,
    **switches: Any,
) -> tuple[Tensor | None, Tensor, dict[str, Any], dict[str, Any]]:
    """Return weights, mask and both groups of metrics: the method of `RolloutImportanceSampling`, which stays as it is.

    Log-probs and mask are [1, S], packed; `num_tokens` has the tokens of each sequence. `advantages`, [1, S] or [B],
    are for `rollout_is_veto_negative_adv_only` (xtuner#2023).

    Returns:
        Weights [1, S], or None without `rollout_is_threshold`; the mask in float32 with 0 where rejected, or the very
        mask given without threshold; metrics of the mismatch; metrics of the weights.
    """
    DROP_IN.name_unknown(self, (*FIELDS, *SWITCHES, "backend"))
    own: Spec | None = switches.get("spec")
    if own is None:
        settings = {name: getattr(self, name, default) for name, default in FIELDS.items()}
        spec, reported = _specs(settings, switches.get("nonfinite", "reject"))
    else:
        spec = reported = reporting(own, "xtuner")
        DROP_IN.say_spec(own)
    require_tensor("rollout_log_prob", rollout_log_prob, "set return_logprob=True in the SampleParams of the rollout")
    if old_log_prob.dim() != 2 or old_log_prob.shape[0] != 1:
        raise ValueError(f"old_log_prob: expected shape [1, S], packed, got {[*old_log_prob.shape]}")
    offsets = _offsets(num_tokens, old_log_prob.shape[1])
    of: dict[str, Any] = {"cu_seqlens": offsets, "advantages": advantages, "backend": switches.get("backend", "auto")}
    run = partial(correct, old_log_prob, rollout_log_prob, mask=response_mask, **of)
    out = run(spec=spec)
    statistics = out.statistics if spec == reported else run(spec=reported).statistics
    pending = statistics.metrics_async()
    mismatch, importance = _split(_metrics(pending, reported, switches))
    DROP_IN.seen(pending, old_log_prob, rollout_log_prob, response_mask, offsets)
    weights, kept = out.weights, response_mask
    if weights is None:
        importance = {}
        if own is not None:
            kept = out.mask.to(torch.promote_types(response_mask.dtype, torch.float32))
    else:
        dtype = torch.promote_types(old_log_prob.dtype, rollout_log_prob.dtype)
        if spec.weight is not None and spec.weight.kind == "geometric" and not response_mask.is_floating_point():
            # There the mean is a quotient by a count, which is no longer of a half precision.
            dtype = torch.promote_types(dtype, torch.float32)
        weights = weights.to(torch.promote_types(dtype, response_mask.dtype))
        kept = out.mask.to(torch.promote_types(response_mask.dtype, torch.float32))
    return weights, kept, Metrics(mismatch, statistics, switches), Metrics(importance, statistics, switches)


def merge_rollout_is_metrics(
    rollout_is_metrics: Sequence[Mapping[str, float]], device: torch.device | str = "cuda", **switches: Any
) -> dict[str, float]:
    """Average metrics over the packs of all ranks, by two collectives on `device` instead of one per metric.

    It is the largest of what has "max" in its name, the smallest of what has "min", and the mean of the rest, over
    packs with a valid token; all 0 if no rank has one. Every rank's packs have the same keys.
    """
    keys = [key for key in rollout_is_metrics[0] if key != "mismatch/valid"]
    if not keys:
        return {}
    valid = [metrics for metrics in rollout_is_metrics if metrics.get("mismatch/valid", True)]
    extrema = {key: -1.0 if "max" not in key else 1.0 for key in keys if "max" in key or "min" in key}
    averaged = [key for key in keys if key not in extrema]
    sums = torch.tensor([float(len(valid)), *(sum(float(m[key]) for m in valid) for key in averaged)], device="cpu")
    most = [max((sign * m[key] for m in valid), default=-torch.inf) for key, sign in extrema.items()]
    largest = torch.tensor(most, device="cpu")
    total, *means = _reduced(sums, "SUM", device)
    if not total:
        return dict.fromkeys(keys, 0.0)
    found = dict(zip(averaged, (value / total for value in means), strict=True))
    found |= {key: sign * x for (key, sign), x in zip(extrema.items(), _reduced(largest, "MAX", device), strict=True)}
    return {key: found[key] for key in keys}


def pool_rollout_is_metrics(
    rollout_is_metrics: Sequence[Mapping[str, float]], device: torch.device | str = "cuda", **switches: Any
) -> dict[str, float]:
    """Compute metrics of all ranks' tokens and sequences together, from the statistics in the packs' metrics."""
    keys = [key for key in rollout_is_metrics[0] if key != "mismatch/valid"]
    if not keys:
        return {}
    packs = [metrics for metrics in rollout_is_metrics if isinstance(metrics, Metrics)]
    if len(packs) < len(rollout_is_metrics):
        raise TypeError("rollout_is_metrics: expected what the replaced method returned, got plain dicts among them")
    merged = Statistics.sum(pack.statistics for pack in packs).to(device).all_reduce()
    found = _metrics(merged.metrics_async(), merged.spec or Spec(), packs[0].switches)
    if not found["mismatch/valid"]:
        return dict.fromkeys(keys, 0.0)
    return {key: found[key] for key in keys}


# `also`: the parameters before xtuner#2023.
TARGETS = (
    Target(
        MODULE,
        "RolloutImportanceSampling.compute_rollout_importance_weights_and_metrics",
        compute_rollout_importance_weights_and_metrics,
        also=5,
    ),
)


# --- how they are computed ---


def _specs(settings: dict[str, Any], nonfinite: str) -> tuple[Spec, Spec]:
    """Return the Spec that is run, and the Spec whose metrics are reported.

    They differ in one case. In mode "mask" the weight has no bounds, but xtuner's spreads, effective sample size and
    fractions still use `rollout_is_threshold`: they are the metrics of mode "both".
    """
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    level, mode, threshold, mask_threshold, veto, *_ = settings.values()
    spec = reported = _spec_of(nonfinite, *settings.values())
    if mode == "mask" and mask_threshold not in (None, threshold):
        reported = _spec_of(nonfinite, *(settings | {"rollout_is_mode": "both"}).values())
    if threshold is None:
        DROP_IN.say(False, "metrics only: rollout_is_threshold is None, which switches the mask and the veto off too")
    else:
        with_veto = "" if veto is None else f", veto {veto!r}"
        DROP_IN.say(True, f"rollout_is_level {level!r}, rollout_is_mode {mode!r}, threshold {threshold!r}{with_veto}")
    return spec, reported


@cached_spec
def _spec_of(nonfinite: Nonfinite, *settings: Any) -> Spec:
    return replace(config.spec(*settings), nonfinite=nonfinite)


def _offsets(num_tokens: Tensor | Sequence[int], tokens: int) -> Tensor:
    """[B + 1] offsets; on the device of `num_tokens`, and not read there."""
    if isinstance(num_tokens, Tensor) and num_tokens.device.type != "cpu":
        return torch.nn.functional.pad(num_tokens.reshape(-1).cumsum(0), (1, 0))
    lengths = torch.as_tensor(num_tokens, dtype=torch.int64, device="cpu").reshape(-1)
    offsets = offsets_of(lengths, tokens, "num_tokens")
    if (total := int(offsets[-1])) != tokens:
        raise ValueError(f"num_tokens: expected {tokens} tokens in total (of old_log_prob), got {total}")
    return offsets


def _metrics(pending: PendingMetrics, spec: Spec, switches: Mapping[str, Any]) -> dict[str, Any]:
    values = pending.values()
    if switches.get("empty_rows") == "skip":
        values["xtuner/rows"] = values["sequences_measured"]
    found: dict[str, Any] = peers.read(report.formulas(spec), values)
    if switches.get("spec") is not None:
        found = pending.result(switches.get("metrics", "dashboard"), prefix="rollout_corr/") | found
    if switches.get("mismatch_over") == "sequence":
        native = pending.result()
        found |= {f"{report.PREFIX}mismatch_{key}": native[name] for key, name in OF_SEQUENCES.items()}
    return found | {report.PREFIX + "valid": bool(values["tokens"])}


def _split(found: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split metrics into those of the mismatch and of the weights; both say whether a token was valid."""
    start = report.PREFIX + "rollout_is"
    valid = {report.PREFIX + "valid": found[report.PREFIX + "valid"]}
    mismatch = {key: value for key, value in found.items() if not key.startswith(start)}
    return valid | mismatch, valid | {key: value for key, value in found.items() if key.startswith(start)}


def _reduced(x: Tensor, how: str, device: torch.device | str) -> list[float]:
    """Reduce a vector over all ranks, to the host; no collective for an empty one."""
    import torch.distributed as dist

    if not x.numel():
        return []
    x = x.to(device)
    dist.all_reduce(x, op=getattr(dist.ReduceOp, how))
    return x.tolist()

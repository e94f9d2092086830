"""Drop-in for SkyRL: `compute_off_policy_correction` and `apply_off_policy_correction`, which its policy losses call.

SkyRL's losses come to a worker as pickles in which these functions are named, so a worker that has run `install()`
before uses ours: docs/integrations.md has the hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...api.correct import correct
from ...backends.choose import BackendName
from ...metrics import peers
from ...metrics.statistics import PendingMetrics
from ...specs.choices import NONFINITE, Nonfinite
from ...specs.correction import Spec
from ..shared.dropin import DropIn, DumpPath, Installed, Logged, Target, require_tensor
from ..shared.settings import cached_spec, defaults_of, reporting, setting_of
from . import config
from . import metrics as report

MODULE = "skyrl.backends.skyrl_train.utils.off_policy_correction_utils"

# The fields of SkyRL's configuration, with its defaults.
FIELDS = defaults_of(config.spec)

HOW = "set generator.sampling_params.logprobs=0"
NOT_COVERED = {"the policy losses clip_cov, kl_cov, cross_entropy and importance_sampling, which do not correct": None}

DROP_IN = DropIn(
    "skyrl",
    checked=("0.3.0",),
    switches={"padding": ("skyrl", "skip"), "nonfinite": NONFINITE},
    not_covered=NOT_COVERED,
)
installed, uninstall = DROP_IN.installed, DROP_IN.uninstall


@DROP_IN.documents
def install(
    *,
    spec: Spec | None = None,
    padding: str = "skyrl",
    nonfinite: str = "reject",
    metrics: Logged = "dashboard",
    backend: BackendName = "auto",
    warnings: bool = True,
    dump: DumpPath = None,
    every: int = 100,
) -> Installed:
    """Replace SkyRL's functions, in this process and wherever they have been imported by name.

    Args:
        spec: A correction of its own, in place of `off_policy_correction`. Its metrics are logged too, under
            "rollout_corr/".
        padding: "skyrl" counts masked slots in the spread and the minimum of the ratio, and rows without a token in
            shares of sequences, as SkyRL does; "skip" leaves them out.
        nonfinite: A token whose log-ratio is NaN or infinite: "reject" its sequence, "neutral" reads the ratio as 1,
            "propagate" lets it become NaN.
    """
    switches = {"padding": padding, "nonfinite": nonfinite}
    return DROP_IN.install(TARGETS, dump, every, warnings, spec=spec, metrics=metrics, backend=backend, **switches)


# --- SkyRL's functions ---


def compute_off_policy_correction(
    old_log_probs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, off_policy_correction: Any, **switches: Any
) -> tuple[Tensor | None, dict[str, float], Tensor]:
    """Weights, metrics and mask of a micro-batch, [B, T], by SkyRL's configuration, which is read and never changed.

    Returns:
        Weights of the dtype of old_log_probs, without a gradient: [B, T] at the level token, [B, 1] at the level
        sequence, or None; metrics as floats; the mask with 0 where rejected: in float32 where SkyRL would
        multiply it by a mask of its own, else in its own dtype.
    """
    require_tensor("rollout_logprobs", rollout_logprobs, HOW)
    own: Spec | None = switches.get("spec")
    if own is None:
        DROP_IN.name_unknown(off_policy_correction, FIELDS)
        values = tuple(setting_of(off_policy_correction, name, default) for name, default in FIELDS.items())
        spec = _spec_of(switches.get("nonfinite", "reject"), *values)
        _say(spec, values)
    else:
        spec = reporting(own, "skyrl")
        DROP_IN.say_spec(own)
    if spec.weight is None and not spec.criteria and own is None:
        return None, {}, loss_mask
    backend = switches.get("backend", "auto")
    out = correct(old_log_probs, rollout_logprobs, mask=loss_mask, spec=spec, backend=backend)
    pending = out.statistics.metrics_async()
    metrics = _metrics(pending, spec, switches)
    DROP_IN.seen(pending, old_log_probs, rollout_logprobs, loss_mask)
    weights = out.weights
    if weights is not None:
        if own is None and spec.weight is not None and spec.weight.is_product:
            # One value a row: the weight of its valid tokens, or 1 for a row without one, and at most the cap.
            largest = weights.amax(dim=-1, keepdim=True)
            weights = torch.where(largest == 0.0, min(1.0, spec.weight.high or 1.0), largest)
        weights = weights.to(old_log_probs.dtype)
    mask = out.mask.to(torch.promote_types(loss_mask.dtype, torch.float32)) if spec.criteria else out.mask
    if own is not None:
        metrics = pending.result(switches.get("metrics", "dashboard"), prefix="rollout_corr/") | metrics
    return weights, metrics, mask


def apply_off_policy_correction(
    loss: Tensor,
    old_log_probs: Tensor,
    rollout_logprobs: Tensor | None,
    loss_mask: Tensor,
    off_policy_correction: Any,
    **switches: Any,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The loss of each token times its weight, the mask and the metrics; all as they are without `rollout_logprobs`."""
    if rollout_logprobs is None:
        DROP_IN.say_skipped(f"the batch has no rollout_logprobs: {HOW}")
        return loss, loss_mask, {}
    weights, metrics, mask = compute_off_policy_correction(
        old_log_probs, rollout_logprobs, loss_mask, off_policy_correction, **switches
    )
    return loss if weights is None else loss * weights, mask, metrics


TARGETS = (
    Target(MODULE, "compute_off_policy_correction", compute_off_policy_correction),
    Target(MODULE, "apply_off_policy_correction", apply_off_policy_correction),
)


# --- how they are computed ---


@cached_spec
def _spec_of(nonfinite: Nonfinite, *values: Any) -> Spec:
    return replace(config.spec(*values), nonfinite=nonfinite)


def _metrics(pending: PendingMetrics, spec: Spec, switches: Mapping[str, Any]) -> dict[str, float]:
    values = pending.values()
    if switches.get("padding") == "skip":
        values["skyrl/rows"], values["skyrl/slots"] = values["sequences_measured"], values["tokens_measured"]
    return peers.read(report.formulas(spec), values)


def _say(spec: Spec, values: tuple[Any, ...]) -> None:
    given = {name: value for name, value in zip(FIELDS, values, strict=True) if value != FIELDS[name]}
    if spec.acts:
        DROP_IN.say(True, ", ".join(f"{name}={value!r}" for name, value in given.items()))
        return
    half = [name for name in given if name.startswith("token_mask_is_threshold")]
    why = f"{half[0]} works only together with the other bound" if half else "off_policy_correction switches nothing on"
    DROP_IN.say(False, why)

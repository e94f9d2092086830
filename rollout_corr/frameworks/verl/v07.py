"""Drop-in for the functions of verl 0.6.1 and 0.7.0: `rollout_rs` by level with a lower bound, and the veto.

`rollout_corr.frameworks.verl.install(compat="0.7")` installs these functions in any verl. A configuration
of 0.9 has no field for the lower bound and for the veto; add them to the block as new keys:

    +algorithm.rollout_correction.rollout_token_veto_threshold=1e-4

Weights and masks come from `correct`. The metrics of 0.7.0 are of the weights before truncation, which
`correct` does not keep: they are computed from the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_corr.frameworks.shared.settings import cached_spec, defaults_of
from rollout_corr.frameworks.verl import metrics as report
from rollout_corr.frameworks.verl import options
from rollout_corr.frameworks.verl import presets as presets
from rollout_corr.frameworks.verl.measures import of_weights
from rollout_corr.frameworks.verl.shared import DROP_IN, add_to_batch, corrected, proto, rows_of, same_shape
from rollout_corr.specs import validate
from rollout_corr.specs.choices import Nonfinite
from rollout_corr.specs.correction import Criterion, Spec

LEVELS = options.OLD_RS_LEVELS
SAFETY_BOUND = options.TOKEN_CLAMP


class Settings(NamedTuple):
    """Settings of 0.7, checked, with defaults filled in."""

    level: str | None
    upper: float
    normalize: bool
    rs_level: str | None
    rs_lower: float
    rs_upper: float
    veto: float | None


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | None = 2.0,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | None = 2.0,
    rollout_rs_threshold_lower: float | None = None,
    rollout_token_veto_threshold: float | None = None,
    rollout_is_batch_normalize: bool = False,
    **switches: str,
) -> tuple[Any, Tensor, dict[str, float]]:
    """Return weights, mask and metrics of a batch as verl 0.7.0 does.

    Args:
        old_log_prob: [B, T] floating.
        rollout_log_prob: [B, T].
        response_mask: [B, T], non-zero is valid.
        rollout_is: None, "token" or "sequence" (the product).
        rollout_is_threshold: Upper bound of the weight. With None there are no weights.
        rollout_rs: None, "token", "sequence" (the product) or "geometric".
        rollout_rs_threshold: Upper bound of the ratio that is kept.
        rollout_rs_threshold_lower: Lower bound, by default 1/upper.
        rollout_token_veto_threshold: A token whose ratio is below it rejects its row.
        rollout_is_batch_normalize: Divide the weights by their mean.
        **switches: Those of `install`.

    Returns:
        A DataProto that holds "rollout_is_weights", or None; the mask, in float32 where something can be rejected;
        metrics as floats, by the keys of 0.7.0.
    """
    same_shape(old_log_prob, rollout_log_prob, response_mask)
    settings = _settings(
        rollout_is,
        rollout_is_threshold,
        rollout_is_batch_normalize,
        rollout_rs,
        rollout_rs_threshold,
        rollout_rs_threshold_lower,
        rollout_token_veto_threshold,
    )
    spec = _spec_of(settings, switches.get("nonfinite", "reject"))
    if spec.weight is None and not spec.criteria:
        DROP_IN.say(False, "metrics only: neither rollout_is, rollout_rs nor rollout_token_veto_threshold is set")
    else:
        DROP_IN.say(True, f"as in 0.7: rollout_is {rollout_is!r}, rollout_rs {rollout_rs!r}, veto {settings.veto!r}")
    weights, mask, metrics, out = corrected(old_log_prob, rollout_log_prob, response_mask, spec, switches)
    DROP_IN.dumps.seen(*rows_of(old_log_prob, rollout_log_prob, response_mask))
    if spec.criteria:
        mask = mask.to(torch.promote_types(mask.dtype, torch.float32))
    named = {key.removeprefix(report.PREFIX): value for key, value in metrics.items()}
    kept = {key: value for key, value in named.items() if not key.startswith(("rollout_is_", "rollout_rs_"))}
    if settings.normalize and settings.level is not None:
        kept["rollout_is_batch_norm_factor"] = named["rollout_is_batch_norm_factor"]
    values = out.statistics.metrics_async().values()
    d = old_log_prob.double() - rollout_log_prob.double()
    kept |= _measured(d, response_mask, settings, values)
    return proto(weights), mask, {report.PREFIX + key: value for key, value in kept.items()}


def as_in_09(
    old_log_prob: Any,
    rollout_log_prob: Any,
    response_mask: Any,
    rollout_is: Any = None,
    rollout_is_threshold: Any = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: Any = None,
    rollout_rs_threshold: Any = None,
) -> None:
    """Parameters of the function above in verl 0.9, which it replaces there too."""


# A configuration that lacks a setting is read as this.
DEFAULTS = defaults_of(compute_rollout_correction_and_rejection_mask) | {"rollout_rs_threshold": None}


def compute_rollout_correction_and_add_to_batch(
    batch: Any, rollout_corr_config: Mapping[str, Any], **switches: str
) -> tuple[Any, dict[str, float]]:
    """Correct a DataProto by a configuration of 0.7; it is read, never changed."""
    correct = compute_rollout_correction_and_rejection_mask
    return add_to_batch(correct, batch, rollout_corr_config, DEFAULTS, switches)


def _settings(
    level: str | None, threshold: Any, normalize: bool, rs_level: str | None, rs_upper: Any, rs_lower: Any, veto: Any
) -> Settings:
    if level is not None and threshold is not None:
        validate.one_of("rollout_is", level, options.LEVELS)
        threshold = options.number("rollout_is_threshold", threshold)
    else:
        level, threshold = None, 1.0
    lower, upper = 1.0, 1.0
    if rs_level is not None:
        validate.one_of("rollout_rs", rs_level, LEVELS)
        if rs_upper is None:
            raise ValueError("rollout_rs_threshold: expected a threshold for rollout_rs, got None")
        upper = options.number("rollout_rs_threshold", rs_upper)
        lower = 1.0 / upper if rs_lower is None else validate.not_negative("rollout_rs_threshold_lower", rs_lower)
    if veto is not None:
        veto = options.number("rollout_token_veto_threshold", veto)
    return Settings(level, threshold, bool(normalize), rs_level, lower, upper, veto)


@cached_spec
def _spec_of(settings: Settings, nonfinite: Nonfinite) -> Spec:
    weight = None
    if settings.level is not None:
        weight = options.weight(settings.level, settings.upper, settings.normalize)
    criteria: list[Criterion] = []
    if settings.rs_level is not None:
        option = LEVELS[settings.rs_level]
        criteria.append(options.ratio_criterion(option, settings.rs_lower, settings.rs_upper))
    if settings.veto is not None:
        criteria.append(options.veto(settings.veto))
    return Spec(weight=weight, criteria=tuple(criteria), nonfinite=nonfinite, report=presets.REPORT)


def _measured(d: Tensor, mask: Tensor, settings: Settings, values: Mapping[str, float]) -> dict[str, float]:
    """Compute the metrics of weights, of rejecting ratios and of the veto; all 0 without a valid token."""
    d = torch.where((mask != 0) & d.isfinite(), d, 0.0)
    rows, some = values["verl/rows"], values["tokens"]
    found = {"rollout_is_veto_fraction": 0.0, "rollout_is_catastrophic_token_fraction": 0.0}
    if settings.veto is not None and some:
        found["rollout_is_veto_fraction"] = values["veto/sequences"] / rows
        catastrophic = (mask != 0) & (d.exp() < settings.veto)
        found["rollout_is_catastrophic_token_fraction"] = float(catastrophic.sum()) / some
    if settings.level is not None:
        upper = settings.upper
        found |= _of_ratio("rollout_is", d, mask, settings.level, 1.0 / upper, upper, some)
    if settings.rs_level is not None:
        label, lower, upper = LEVELS[settings.rs_level], settings.rs_lower, settings.rs_upper
        found |= _of_ratio("rollout_rs", d, mask, settings.rs_level, lower, upper, some)
        # The ratio of a row without a token is 1, and it is tested like any other.
        empty = (rows - values["sequences"]) * (settings.rs_level != "token" and not lower <= 1.0 <= upper)
        found["rollout_rs_masked_fraction"] = values[f"{label}/tokens"] / some if some else 0.0
        found["rollout_rs_seq_masked_fraction"] = (values[f"{label}/sequences"] + empty) / rows if some else 0.0
    return found


def _of_ratio(
    prefix: str, d: Tensor, mask: Tensor, level: str, lower: float, upper: float, some: float
) -> dict[str, float]:
    logs = None
    if level != "token":
        logs = d.sum(dim=-1, keepdim=True)
        if level == "geometric":
            logs = logs / (mask != 0).sum(dim=-1, keepdim=True).clamp(min=1)
    ratio = (d if logs is None else logs).clamp(-SAFETY_BOUND, SAFETY_BOUND).exp().expand_as(d)
    if not some:
        nothing = of_weights(prefix, ratio, ratio, logs, torch.ones_like(mask), (lower, lower, upper))
        return dict.fromkeys(nothing, 0.0)
    return of_weights(prefix, ratio, ratio, logs, mask, (lower, lower, upper))

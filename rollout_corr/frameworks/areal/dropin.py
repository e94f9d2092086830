"""Drop-in for AReaL: `apply_rejection_sampling` of its decoupled loss, padded or packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api.correct import Correction, correct
from ...backends.choose import BackendName
from ...specs.choices import Reduce
from ...specs.correction import Criterion, Spec, Weight
from ..shared.dropin import DropIn, DumpPath, Installed, Target
from ..shared.settings import cached_spec
from . import config as areal_config

MODULE = "areal.utils.functional.functional"

# The fields of AReaL's RejectionSamplingConfig.
FIELDS = ("level", "action", "metric", "agg", "upper", "lower")

DROP_IN = DropIn("areal", checked=("1.0.4", "2.0.0"))
installed, uninstall = DROP_IN.installed, DROP_IN.uninstall


@DROP_IN.documents
def install(
    *,
    spec: Spec | None = None,
    backend: BackendName = "auto",
    warnings: bool = True,
    dump: DumpPath = None,
    every: int = 100,
) -> Installed:
    """Replace AReaL's function, in this process and wherever it has been imported by name.

    Args:
        spec: A correction of its own, in place of `rejection_sampling`, which has to be there. AReaL logs its weights
            and what it rejects; its other metrics have no way into AReaL's log.
    """
    return DROP_IN.install(TARGETS, dump, every, warnings, spec=spec, backend=backend)


def apply_rejection_sampling(
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor | None,
    config: Any,
    **switches: Any,
) -> Any:
    """Reject or truncate by a ratio or by a divergence; AReaL's RejectionSamplingConfig is read, never changed.

    Tensors are [B, T], or [N] packed with offsets `cu_seqlens` [S + 1], which the level token does not need.

    Returns:
        AReaL's RejectionSamplingResult: the mask in its own dtype, float32 weights that are 0 where the mask is, and
        the fraction of the valid tokens that was rejected or truncated.
    """
    from areal.utils.functional.functional import RejectionSamplingResult

    own: Spec | None = switches.get("spec")
    level, action = config.level, config.action
    if cu_seqlens is None and proximal_logprobs.dim() == 1:
        if level == "sequence" or own is not None:
            what = "at the level sequence" if own is None else "for a Spec"
            raise ValueError(f"cu_seqlens: expected the offsets of packed sequences {what}, got None")
        cu_seqlens = torch.tensor([0, proximal_logprobs.shape[0]], device="cpu")
    if own is None:
        DROP_IN.name_unknown(config, FIELDS)
        spec = _spec_of(level, action, config.metric, config.agg, config.upper, config.lower)
        DROP_IN.say(True, f"{config.metric} at the level {level}, {action}, bounds [{config.lower}, {config.upper}]")
    else:
        spec = own
        DROP_IN.say_spec(own)
    tensors, backend = (proximal_logprobs, old_logprobs), switches.get("backend", "auto")
    out = correct(*tensors, mask=loss_mask, cu_seqlens=cu_seqlens, spec=spec, backend=backend)
    pending = out.statistics.metrics_async()
    values = pending.values()
    DROP_IN.seen(pending, *tensors, loss_mask, cu_seqlens)
    tokens = max(values["tokens"], 1.0)
    if action == "mask" or own is not None:
        return RejectionSamplingResult(
            loss_mask=out.mask,
            behave_imp_weight=(out.mask != 0).to(torch.float32) if out.weights is None else out.weights,
            filtered_fraction=(values["tokens"] - values["tokens_kept"]) / tokens,
        )
    weights = _clamped(out, cu_seqlens, level, config.lower, config.upper)
    return RejectionSamplingResult(
        loss_mask=loss_mask,
        behave_imp_weight=weights,
        filtered_fraction=float((weights != out.weights).sum()) / tokens,
    )


TARGETS = (Target(MODULE, "apply_rejection_sampling", apply_rejection_sampling),)


def _clamped(
    out: Correction[Tensor, Tensor], cu_seqlens: Tensor | None, level: str, lower: float | None, upper: float | None
) -> Tensor:
    """The weights within the bounds: all of them, or those of the sequences that failed."""
    weights = out.weights
    clamped = torch.where(weights != 0, weights.clamp(0.0 if lower is None else lower, upper), 0.0)
    if level == "token":
        return clamped
    failed = ~out.keep
    if cu_seqlens is None:
        return torch.where(failed[:, None], clamped, weights)
    # By a search, which stays within the sequences whatever unread offsets hold; outside of them all weights are 0.
    ends = cu_seqlens[1:].to(failed.device, torch.int64)
    owner = torch.searchsorted(ends, torch.arange(weights.numel(), device=failed.device), right=True)
    return torch.where(torch.cat([failed, failed.new_zeros(1)])[owner], clamped, weights)


@cached_spec
def _spec_of(level: str, action: str, metric: str, agg: Reduce, upper: float, lower: float | None) -> Spec:
    if action != "clamp":
        return areal_config.spec(level, action, metric, agg, upper, lower)
    areal_config.check(level, action, metric, agg)
    # Truncation leaves every token in; its weight is clamped afterwards, so that the clamped ones can be counted.
    if level == "token":
        return Spec(weight=Weight.token(), nonfinite="neutral")
    criterion = Criterion("ratio", over="sequence", reduce=agg, lower=lower, upper=upper)
    return Spec(weight=Weight.geometric(), criteria=(criterion,), nonfinite="neutral")

"""Parts of the drop-ins for both generations of verl: the call of `correct`, verl's dtypes and containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rollout_corr.api.correct import Correction, correct
from rollout_corr.backends.given import Batch, Ranks
from rollout_corr.frameworks.shared import given
from rollout_corr.frameworks.shared.dropin import DropIn
from rollout_corr.frameworks.verl import metrics as report
from rollout_corr.frameworks.verl import options
from rollout_corr.specs.choices import NONFINITE
from rollout_corr.specs.correction import Spec

DROP_IN = DropIn(
    "verl",
    checked=("0.7.0", "0.9.0", "0.9.1"),
    switches={
        "k1_bounds": options.K1_BOUNDS,
        "empty_rows": ("verl", "skip"),
        "empty_batch": ("zeros", "raise"),
        "nonfinite": NONFINITE,
    },
    not_covered={
        "the policy losses (install(losses=True))": "verl.trainer.ppo.core_algos",
        "the policy losses geo_mean, clip_cov and kl_cov": None,
        "the samples that the replay buffer of verl.trainer.ppo.v1 leaves out as stale": None,
    },
    advice=", for the functions of 0.6.1 and 0.7.0 call install(compat='0.7')",
)


HOW = "set actor_rollout_ref.rollout.calculate_log_probs=True, so that the engine returns its log-probs"


def same_shape(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> None:
    """Raise ValueError if shapes differ, TypeError if there are none, with verl's names of the arguments."""
    given.tensor("rollout_log_prob", rollout_log_prob, HOW)
    for name, x in (("rollout_log_prob", rollout_log_prob), ("response_mask", response_mask)):
        if x.shape != old_log_prob.shape:
            raise ValueError(f"{name}: expected shape {[*old_log_prob.shape]} (of old_log_prob), got {[*x.shape]}")


def rows_of(*tensors: Tensor) -> list[Tensor]:
    """Return tensors as [B, T]."""
    return [x if x.dim() == 2 else x.reshape(-1, x.shape[-1]) for x in tensors]


def corrected(
    old: Tensor, rollout: Tensor, mask: Tensor, spec: Spec, switches: Mapping[str, str]
) -> tuple[Tensor | None, Tensor, dict[str, float], Correction]:
    """Return weights, mask, metrics and the Correction.

    Tensors of other shapes than [B, T] are read as rows of their last dimension, over which verl sums.
    """
    rows = rows_of(old, rollout, mask)
    group = world() if spec.weight is not None and spec.weight.normalize is not None else None
    out = correct(rows[0], rows[1], Batch(mask=rows[2], ranks=Ranks(batch=group)), spec=spec)
    metrics = _metrics(out, switches)
    if group is not None:
        factor = report.PREFIX + "rollout_is_batch_norm_factor"
        metrics[factor] = out.statistics.all_reduce(group).metrics("verl")[factor]
    weights = out.weights
    if weights is not None:
        dtype = torch.promote_types(torch.promote_types(old.dtype, rollout.dtype), mask.dtype)
        weights = weights.to(dtype).reshape(old.shape)
    return weights, mask if out.mask is rows[2] else out.mask.reshape(mask.shape), metrics, out


def _metrics(out: Correction, switches: Mapping[str, str]) -> dict[str, float]:
    """Compute verl's metrics from one copy to the host; the switches that depend on values apply afterwards."""
    values = out.statistics.metrics_async().values()
    if not values["tokens"] and switches.get("empty_batch") == "raise":
        raise ValueError("response_mask must contain at least one valid token (1).")
    if switches.get("empty_rows") == "skip":
        values["verl/rows"] = values["sequences_measured"]
    return report.metrics(values, out.statistics.spec or Spec())


def world() -> Any:
    """Return the default process group, over which verl takes the mean of the weights, or None."""
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def without_prefix(metrics: Mapping[str, float], start: str) -> dict[str, float]:
    """Return the metrics whose names begin with `start`, without verl's prefix."""
    names = {key.removeprefix(report.PREFIX): value for key, value in metrics.items()}
    return {name: value for name, value in names.items() if name.startswith(start)}


def add_to_batch(
    correct: Callable[..., tuple[Any, Tensor, dict[str, float]]],
    batch: Any,
    config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    switches: Mapping[str, str],
) -> tuple[Any, dict[str, float]]:
    """Correct a DataProto: its "response_mask" is replaced, "rollout_is_weights" added where there are weights.

    Args:
        correct: Takes the batch's log-probs and mask, the settings and the switches.
        batch: A DataProto with "old_log_probs", "rollout_log_probs" and "response_mask".
        config: Anything with `.get`; it is read, never changed.
        defaults: The settings by name, with the values for those that the configuration lacks.
        switches: Those of `install`.

    Returns:
        The batch, and the metrics.
    """
    if "rollout_log_probs" not in batch.batch.keys():  # noqa: SIM118  # a TensorDict has no `in` of its own
        raise KeyError(f"rollout_log_probs: expected among {sorted(batch.batch.keys())}; {HOW}")
    weights, mask, metrics = correct(
        old_log_prob=batch.batch["old_log_probs"],
        rollout_log_prob=batch.batch["rollout_log_probs"],
        response_mask=batch.batch["response_mask"],
        **{name: config.get(name, default) for name, default in defaults.items()},
        **switches,
    )
    batch.batch["response_mask"] = mask
    return batch if weights is None else batch.union(weights), metrics


def proto(weights: Tensor | None) -> Any:
    """Return a DataProto that holds the weights, or None."""
    if weights is None:
        return None
    from verl.protocol import DataProto

    return DataProto.from_dict(tensors={"rollout_is_weights": weights})

"""verl's door to a file that `rollout_corr.eject` writes: `compute_rollout_correction_and_rejection_mask`."""

from __future__ import annotations

from ..shared.doors import Door, Within, function_for
from .config import write
from .dropin import DEFAULTS

PUBLIC = '''def compute_rollout_correction_and_rejection_mask(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: Optional[str] = None,
    rollout_is_threshold: Optional[str | float] = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: Optional[str] = None,
    rollout_rs_threshold: Optional[str | float] = None,{backend}
) -> tuple[Optional[DataProto], torch.Tensor, dict[str, float]]:
    """Compute importance weights, the mask after rejection, and metrics, for the settings in ``SETTINGS`` alone.

    Args:
        old_log_prob: Log probabilities under the training policy, shape (batch_size, seq_length).
        rollout_log_prob: Log probabilities under the rollout policy, same shape.
        response_mask: 1 at valid tokens, same shape.
        rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold:
            The settings of ``algorithm.rollout_correction``; a ValueError if this file was written for others.

    Returns:
        A DataProto with "rollout_is_weights" (None without weights), the modified response mask, and metrics
        prefixed with "rollout_corr/", read from the device in one copy.
    """
    if isinstance(rollout_rs_threshold, (int, float)):
        rollout_rs_threshold = str(float(rollout_rs_threshold))
    asked = {{
        "rollout_is": rollout_is,
        "rollout_is_threshold": rollout_is_threshold,
        "rollout_is_batch_normalize": rollout_is_batch_normalize,
        "rollout_rs": rollout_rs,
        "rollout_rs_threshold": rollout_rs_threshold,
    }}
    # A threshold says nothing where its option is off.
    asked = {{name: value for name, value in asked.items() if name in SETTINGS}}
    if asked != SETTINGS:
        raise ValueError(f"rollout_correction: this file was written for {{SETTINGS}}, got {{asked}}")
    for name, x in (("rollout_log_prob", rollout_log_prob), ("response_mask", response_mask)):
        if x.shape != old_log_prob.shape:
            raise ValueError(f"{{name}}: expected shape {{list(old_log_prob.shape)}}, got {{list(x.shape)}}")
{check}    train, rollout = old_log_prob.detach(), rollout_log_prob.detach()
    weights, mask, numbers = {call}
    metrics = {metrics}
{proto}'''


def settings_of(config: dict[str, object]) -> dict[str, object]:
    """The settings that decide what is computed, of those that verl's function takes."""
    asked = {name: config.get(name, default) for name, default in DEFAULTS.items()}
    if asked["rollout_is"] is None:
        del asked["rollout_is_threshold"], asked["rollout_is_batch_normalize"]
    if asked["rollout_rs"] is None:
        del asked["rollout_rs_threshold"]
    return asked


def public(within: Within) -> str:
    """Write verl's function."""
    if within.spec.weight is not None and within.spec.weight.normalize is not None:
        raise ValueError("spec: expected no normalize: verl takes the mean of the weights over all ranks")
    give, proto = "", "None"
    if within.spec.returns_weights:
        give = "    weights = weights.to(torch.promote_types(old_log_prob.dtype, rollout_log_prob.dtype))\n"
        proto = 'DataProto.from_dict(tensors={"rollout_is_weights": weights})'
    proto = f"{give}    return {proto}, mask, metrics"
    return function_for(settings_of(write(within.spec)), PUBLIC, within, "response_mask", proto=proto)


DOOR = Door(
    layout="padded",
    names={"train_logp": "old_log_prob", "rollout_logp": "rollout_log_prob", "mask": "response_mask"},
    metrics="verl",
    imports=("from typing import Optional", "", "import torch", "", "from verl.protocol import DataProto"),
    public=public,
    function="compute_rollout_correction_and_rejection_mask",
    tried="""proto, mask, metrics = compute_rollout_correction_and_rejection_mask(**batch, **SETTINGS)
return None if proto is None else proto.batch["rollout_is_weights"], mask, None, metrics""",
    width=120,
    gives=("weights", "mask"),
)

"""SkyRL's door to a file that `rollout_corr.eject` writes: `compute_off_policy_correction`."""

from __future__ import annotations

from ..shared.doors import Door, Within, function_for
from ..shared.settings import defaults_of
from .config import spec as spec_of
from .config import write

PUBLIC = '''def compute_off_policy_correction(
    old_log_probs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    off_policy_correction: Any,{backend}
) -> Tuple[Optional[torch.Tensor], dict, torch.Tensor]:
    """Compute the TIS ratio, metrics and the loss mask, for the settings in ``SETTINGS`` alone.

    Args:
        old_log_probs: Log probabilities from the old policy (before update), shape (batch_size, seq_length).
        rollout_logprobs: Log probabilities from the rollout policy, same shape.
        loss_mask: Mask indicating valid tokens, same shape.
        off_policy_correction: Off-policy correction config; a ValueError if this file was written for another.

    Returns:
        The ratio to multiply the loss with ({shape}), metrics, read from the device in one copy, and the
        loss mask after rejection.
    """
    asked = {{name: getattr(off_policy_correction, name, None) for name in SETTINGS}}
    if asked != SETTINGS:
        raise ValueError(f"off_policy_correction: this file was written for {{SETTINGS}}, got {{asked}}")
    for name, x in (("rollout_logprobs", rollout_logprobs), ("loss_mask", loss_mask)):
        if x.shape != old_log_probs.shape:
            raise ValueError(f"{{name}}: expected shape {{list(old_log_probs.shape)}}, got {{list(x.shape)}}")
{check}    train, rollout = old_log_probs.detach(), rollout_logprobs.detach()
    weights, mask, numbers = {call}
{after}    return {weights}, {metrics}, mask'''

# Which switch turns a setting on: what is off says nothing.
SWITCHED = {
    "token_tis_ratio_clip_high": ("tis_ratio_type", "token"),
    "sequence_tis_ratio_clip_high": ("tis_ratio_type", "sequence"),
    "geo_mask_high": ("sequence_mask_metric", "geometric"),
    "geo_mask_low": ("sequence_mask_metric", "geometric"),
    "product_mask_high": ("sequence_mask_metric", "product"),
    "product_mask_low": ("sequence_mask_metric", "product"),
}


def settings_of(config: dict[str, object]) -> dict[str, object]:
    """The settings that decide what is computed."""
    full = defaults_of(spec_of) | config
    return {
        name: value for name, value in full.items()
        if name not in SWITCHED or full[SWITCHED[name][0]] == SWITCHED[name][1]
    }  # fmt: skip


def public(within: Within) -> str:
    """Write SkyRL's function."""
    spec = within.spec
    weights, shape, after = "None", "None", ""
    if spec.weight is not None:
        weights, shape = "weights.to(old_log_probs.dtype)", "one value a token"
        if spec.weight.is_product:
            shape = "one value a sequence"
            after = (
                "    # One value a sequence; where nothing counts the ratio is 1, and the cap may lie below.\n"
                "    weights = torch.nn.functional.pad(weights, (0, 1)).amax(dim=-1, keepdim=True)\n"
                f"    weights = torch.where(weights == 0.0, {min(1.0, spec.weight.high or 1.0)!r}, weights)\n"
            )
    if spec.criteria:
        after += "    mask = mask.to(torch.promote_types(loss_mask.dtype, torch.float32))\n"
    parts = {"weights": weights, "shape": shape, "after": after}
    return function_for(settings_of(write(spec)), PUBLIC, within, "loss_mask", **parts)


DOOR = Door(
    layout="padded",
    names={"train_logp": "old_log_probs", "rollout_logp": "rollout_logprobs", "mask": "loss_mask"},
    metrics="skyrl",
    imports=("from typing import Any, Optional, Tuple", "", "import torch"),
    public=public,
    function="compute_off_policy_correction",
    tried="""config = type("Config", (), SETTINGS)
weights, metrics, mask = compute_off_policy_correction(**batch, off_policy_correction=config)
if SETTINGS["tis_ratio_type"] == "sequence":
    weights = torch.where(mask != 0, weights, 0.0)
return weights, mask.to(batch["loss_mask"].dtype), None, metrics""",
    width=120,
    gives=("weights", "mask"),
)

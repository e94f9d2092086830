"""TRL's door to a file that `rollout_corr.eject` writes: the ratio that GRPOTrainer multiplies its loss by."""

from __future__ import annotations

from ..shared.doors import Door, Within, function_for
from .config import write
from .dropin import _bounded_one

PUBLIC = '''def vllm_importance_sampling_ratio(
    old_per_token_logps: torch.Tensor,
    sampling_per_token_logps: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    clip_max: float | None,
    clip_min: float | None,{backend}
) -> torch.Tensor:
    """The importance sampling ratio of GRPOTrainer, for the settings in `SETTINGS` alone.

    Args:
        old_per_token_logps (`torch.Tensor` of shape `(B, T)`): Log probabilities by the training model.
        sampling_per_token_logps (`torch.Tensor` of shape `(B, T)`): Log probabilities by vLLM; where one is NaN or
            infinite, the ratio of its token is 1.
        mask (`torch.Tensor` of shape `(B, T)`): 1 at tokens of the completion that the model wrote.
        mode, clip_max, clip_min: The trainer's `vllm_importance_sampling_mode`, `..._clip_max` and `..._clip_min`; a
            `ValueError` if this file was written for others.

    Returns:
        `torch.Tensor` of shape `{shape}`, of the dtype that the log probabilities promote to.
    """
    asked = {{"mode": mode, "clip_max": clip_max, "clip_min": clip_min}}
    if asked != SETTINGS:
        raise ValueError(f"vllm_importance_sampling: this file was written for {{SETTINGS}}, got {{asked}}")
    for name, x in (("sampling_per_token_logps", sampling_per_token_logps), ("mask", mask)):
        if x.shape != old_per_token_logps.shape:
            raise ValueError(f"{{name}}: expected shape {{list(old_per_token_logps.shape)}}, got {{list(x.shape)}}")
{check}    train, rollout = old_per_token_logps.detach(), sampling_per_token_logps.detach()
    ratio = {call}
    valid = mask != 0
{rows}    # Behind the mask stands what the bounds make of a ratio of 1.
    ratio = torch.where(valid, ratio, {masked})
    return ratio.to(torch.promote_types(old_per_token_logps.dtype, sampling_per_token_logps.dtype))'''

ROWS = """    # One value a sequence, the same at all of its tokens; rows without columns have one, too.
    ratio = torch.nn.functional.pad(ratio, (0, 1)).amax(dim=-1, keepdim=True)
    valid = valid.any(dim=-1, keepdim=True)
"""


def public(within: Within) -> str:
    """Write the function."""
    if within.spec.weight is None:
        raise ValueError("spec: expected a weight: TRL has a function for the ratio alone, got none")
    written = write(within.spec)
    settings = {name: written[f"vllm_importance_sampling_{name}"] for name in ("mode", "clip_max", "clip_min")}
    sequences = settings["mode"].startswith("sequence")
    parts = {"shape": "(B, 1)" if sequences else "(B, T)", "rows": ROWS if sequences else ""}
    return function_for(settings, PUBLIC, within, "mask", masked=repr(_bounded_one(**settings)), **parts)


DOOR = Door(
    layout="padded",
    names={"train_logp": "old_per_token_logps", "rollout_logp": "sampling_per_token_logps", "mask": "mask"},
    metrics=None,
    imports=("import torch", ""),  # TRL's formatter leaves two lines
    public=public,
    function="vllm_importance_sampling_ratio",
    tried="""ratio = vllm_importance_sampling_ratio(**batch, **SETTINGS)
return torch.where(batch["mask"] != 0, ratio, 0.0), batch["mask"], None, {}""",
    width=119,
    gives=("weights",),
)

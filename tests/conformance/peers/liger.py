"""Liger Kernel: its GRPO loss in torch, next to the recipes of TRL, whose loss it is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

from torch import Tensor

import rollout_corr as rc
from conformance.batches import PADDED, Batch
from conformance.declared import BF16, CLAMP, PROPAGATES, Declared
from conformance.peers import trl
from conformance.rows import Row, recipe
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT, UNDER = "liger-kernel", "liger_kernel", "liger-kernel", "src"

LOSS = "liger_kernel/chunked_loss/grpo_loss.py"
FUNCTION = "LigerFusedLinearGRPOFunction.ppo_loss_fn"
# Settings that it has under TRL's names.
TAKEN = (
    *("delta", "importance_sampling_level", "max_completion_length", "sapo_temperature_pos", "sapo_temperature_neg"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)

KL_RATIO = Declared("the KL's ratio", "weighted by the ratio of the sequence", trl.weighed_kl)
PADDED_LUSPO = Declared("luspo over padding", "Liger Kernel's luspo | averages over padding", trl.tokenwise)


def rows(source: Source) -> Iterator[Row]:
    """Compare the loss types, with the weights that TRL hands over."""
    function = source.cut(LOSS, FUNCTION)
    for loss_type in trl.LOSSES:
        yield recipe(
            f"trl.{loss_type}",
            f"{LOSS}: {FUNCTION}, {loss_type}",
            partial(loss, function, loss_type),
            partial(settings, loss_type),
            declared=(PROPAGATES, BF16, CLAMP, KL_RATIO, *([PADDED_LUSPO] if loss_type == "luspo" else [])),
            kinds=PADDED,
        )


def settings(loss_type: str, rng: Random) -> dict[str, Any]:
    """Draw settings of TRL's recipe, but for the off-policy mask, which Liger lacks."""
    drawn = trl.settings_of(loss_type, ("token", "sequence"))(rng)
    del drawn["off_policy_mask_threshold"]
    return drawn


def loss(function: Any, loss_type: str, given: Batch, **config: Any) -> Tensor:
    """Return Liger's loss of a batch, of the ratios that TRL's presets make."""
    epsilon, high, beta = config.get("epsilon", 0.2), config["epsilon_high"], config["beta"]
    ratio = None
    if config["vllm_importance_sampling_correction"]:
        spec = rc.spec(
            f"trl.{config['vllm_importance_sampling_mode']}", clip_max=config["clip_max"], clip_min=config["clip_min"]
        )
        ratio = rc.correct(given.old, given.rollout, mask=given.mask, spec=spec).weights.to(given.old.dtype)
        if config["vllm_importance_sampling_mode"].startswith("sequence"):
            ratio = ratio.amax(1, keepdim=True)
        elif loss_type == "vespo":
            # It adds up the logarithms of all, as TRL's are 1 behind the mask.
            ratio = ratio.where(given.mask, 1.0)
    mask = given.mask.to(given.new.dtype)
    value, _ = function(
        given.new,
        mask,
        given.advantages.to(given.new.dtype),
        mask,
        ref_per_token_logps=given.ref,
        old_per_token_logps=given.old,
        epsilon_low=epsilon,
        epsilon_high=epsilon if high is None else high,
        beta=beta,
        loss_type=loss_type,
        vllm_is_ratio=ratio,
        use_bias_correction_kl=config["use_bias_correction_kl"],
        num_items_in_batch=given.mask.sum(),
        **{"max_completion_length": 256} | {name: config[name] for name in TAKEN if name in config},
    )
    return value

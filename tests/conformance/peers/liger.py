"""Liger Kernel: its two GRPO losses, in torch and in Triton, next to the recipes of TRL, whose loss they are.

The Triton kernels take logits. They run in Triton's interpreter, in float32, on logits whose log-softmax is the batch.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from conformance.batches import Batch
from conformance.peers import trl
from conformance.rows import BF16, CLAMP, PROPAGATES, Declared, Row, recipe
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT, UNDER = "liger-kernel", "liger_kernel", "liger-kernel", "src"

LOSS = "liger_kernel/chunked_loss/grpo_loss.py"
FUNCTION = "LigerFusedLinearGRPOFunction.ppo_loss_fn"
LOSSES = trl.LOSSES
# Settings that it has under TRL's names.
TAKEN = (
    *("delta", "importance_sampling_level", "max_completion_length", "sapo_temperature_pos", "sapo_temperature_neg"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)

KL_RATIO = Declared("the KL's ratio", "differences.md", "weighted by the ratio of the sequence", trl.weighed_kl)
PADDED_LUSPO = Declared(
    "luspo over padding", "differences.md", "Liger Kernel's luspo | averages over padding", trl.tokenwise
)

# The kernels have a loss for each token at the level of sequences too.
PADDED_KERNEL = replace(PADDED_LUSPO, when=lambda given, settings: True)

# The kernels, what calls them, and the kinds of batches that they are run on: a launch of "long" takes seconds in the
# interpreter, and the policy of "ties" is sure of tokens, so that the other logit is -infinity.
OPERATOR, WRAPPER, CALLED = (
    "liger_kernel/ops/grpo_loss.py",
    "liger_kernel/transformers/grpo_loss.py",
    "triton_grpo_loss",
)
FUSED = tuple(kind for kind in trl.PADDED if kind not in ("long", "ties", "bf16"))


def rows(source: Source) -> Iterator[Row]:
    """Compare the loss types, with the weights that TRL hands over."""
    function = source.cut(LOSS, FUNCTION)
    # They are loaded when they are run: a recording has none.
    kernels = cache(partial(operator, source))
    for loss_type in LOSSES:
        declared = (PROPAGATES, BF16, CLAMP, KL_RATIO, *([PADDED_LUSPO] if loss_type == "luspo" else []))
        yield recipe(
            f"trl.{loss_type}",
            f"{LOSS}: {FUNCTION}, {loss_type}",
            partial(loss, function, loss_type),
            partial(settings, loss_type),
            declared=declared,
            kinds=trl.PADDED,
        )
        if source.has(OPERATOR):
            yield recipe(
                f"trl.{loss_type}",
                f"{OPERATOR}: GrpoLossFunction, {loss_type}",
                partial(loss, partial(of_logits, kernels), loss_type),
                partial(settings, loss_type),
                declared=(*declared, *([PADDED_KERNEL] if loss_type == "luspo" else [])),
                kinds=FUSED,
                within=(2e-5, 2e-5),
            )


def of_logits(
    kernels: Callable[[], Any], new: Tensor, mask: Tensor, advantages: Tensor, _: Tensor, **config: Any
) -> Any:
    """Run the kernels on logits of two tokens; the first one is the batch's."""
    at = mask.bool()
    logp = new.where(at, -1.0).float()
    logits = torch.stack((logp, (-logp.exp()).log1p()), -1)
    # The last row of logits predicts what comes after the answer.
    logits = torch.cat((logits, torch.zeros_like(logits[:, :1])), 1).contiguous()
    config |= {name: config.pop(f"epsilon_{side}") for name, side in (("eps_low", "low"), ("eps_high", "high"))}
    names = {"old_per_token_logps": "old_logp", "ref_per_token_logps": "ref_logp"}
    policies = {name: config.pop(given).float().contiguous() for given, name in names.items()}
    if config["vllm_is_ratio"] is not None:
        config["vllm_is_ratio"] = config["vllm_is_ratio"].float()
    ids = torch.zeros(new.shape, dtype=torch.long)
    return kernels()(
        logits,
        completion_ids=ids,
        advantages=advantages.float(),
        completion_mask=at.long(),
        temperature=1.0,
        inplace=False,
        reduce=True,
        **policies,
        **config,
    )


def operator(source: Source) -> Any:
    """Load the file of kernels, which Triton interprets by the variable that `__main__` sets; cut what calls them."""
    spec = importlib.util.spec_from_file_location("liger_grpo_loss", source.root / OPERATOR)
    assert spec is not None and spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    # A kernel looks for its globals in its module.
    sys.modules[spec.name] = kernels
    spec.loader.exec_module(kernels)
    names = "GrpoLossFunction", "fused_selective_log_softmax"
    return source.cut(WRAPPER, CALLED, **{name: getattr(kernels, name) for name in names})


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

"""Drop-in for OpenRLHF: its policy loss.

OpenRLHF corrects in the middle of `PolicyLoss.forward`. That method still runs, without a gradient, for its other
return values; the loss and its gradient are ours, by the module's own settings or by any Spec.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...api.policy_loss import policy_loss
from ...backends.choose import BackendName
from ...backends.given import Batch
from ...specs.correction import Spec
from ...specs.loss import Loss
from ..shared.dropin import DropIn, DumpPath, Installed, Target
from ..shared.recipe import SEQUENCES, TOKENS
from ..shared.settings import Given, cached_spec
from . import config
from .config import clipped, gspo

MODULE = "openrlhf.models.loss"

DROP_IN = DropIn(
    "openrlhf",
    checked=("0.11.2",),
    not_covered={"the KL in the loss (algo.kl.use_loss) and the entropy bonus": None},
    brings=("advantages", "log-probs of the policy being trained"),
)
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
    """Replace OpenRLHF's policy loss, in this process; call it in every Ray worker that trains.

    Args:
        spec: A correction of its own, in place of `is_correction_*`. No denominator changes by what it rejects. What
            OpenRLHF logs as `vllm_kl` and `is_filter_ratio` is of it; its other metrics have no way into that log.
    """
    return DROP_IN.install(TARGETS, dump, every, warnings, spec=spec, backend=backend)


def replaced(
    original: Callable[..., Any], spec: Spec | None = None, backend: BackendName = "auto"
) -> Callable[..., Any]:
    """Make the replacement of `PolicyLoss.forward`."""

    def forward(
        self: Any,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> Any:
        with torch.no_grad():
            _, *metrics = original(
                self,
                log_probs,
                old_log_probs,
                advantages,
                action_mask,
                rollout_log_probs,
                dp_size,
                batch_num_tokens,
                global_batch_size,
            )
        found = _correction(self) if spec is None else spec
        if found is spec:
            DROP_IN.say_spec(spec)
        else:
            DROP_IN.say(found.acts, f"{found!r}" if found.acts else "is_correction_level is off")
        clip = self.clip_eps_low, (self.clip_eps_low, self.clip_eps_high), self.dual_clip
        sequences = self.policy_loss_type == "gspo"
        # Its GSPO takes the ratio to the engine in place of a weight.
        in_the_ratio = sequences and spec is None and found.acts
        count = batch_num_tokens if self.token_level_loss else global_batch_size
        surrogate = gspo(*clip, "new/rollout" if in_the_ratio else None) if sequences else clipped(*clip)
        out = policy_loss(
            log_probs,
            advantages,
            # What OpenRLHF multiplies by the ranks is divided by fewer, so that backward has nothing to multiply.
            Batch(mask=action_mask, total=None if count is None else count / dp_size),
            Loss(surrogate, TOKENS if self.token_level_loss else SEQUENCES),
            old_logp=old_log_probs,
            rollout_logp=rollout_log_probs if found.acts or found is spec else None,
            spec=spec if in_the_ratio or not found.acts else found,
            backend=backend,
        )
        if rollout_log_probs is not None:
            DROP_IN.seen(out.metrics_async(), old_log_probs, rollout_log_probs, action_mask)
        if spec is not None:
            # Tensors, as OpenRLHF's own are: nothing waits for them.
            logged = out.statistics.on_device("kl_rollout_train_k1"), out.statistics.on_device("tokens_kept_fraction")
            metrics[2:] = [logged[0].float(), 1.0 - logged[1].float()][: len(metrics[2:])]
        return (out.value, *metrics)

    return forward


TARGETS = (Target(MODULE, "PolicyLoss.forward", replaced, takes_original=True),)


def _correction(loss: Any) -> Spec:
    """Read the correction of a PolicyLoss, of 0.11.2 or of the versions before."""
    if hasattr(loss, "is_correction_level"):
        names = loss.is_correction_level, loss.is_correction_mode, loss.is_correction_gating
        return _spec_of(*names, *loss.is_correction_threshold)
    if not loss.enable_vllm_is_correction:
        return _spec_of("off", "mask", "ratio")
    level, mode = config.OLD_TYPES[loss.vllm_is_correction_type]
    return _spec_of(level, mode, "ratio", *loss.vllm_is_truncated_threshold)


@cached_spec
def _spec_of(level: str, mode: str, gating: str, *threshold: float) -> Spec:
    values = level, mode, gating, threshold or (0.5, 5.0)
    return config.spec(*Given(config.IS, dict(zip(config.IS, values, strict=True))).values())

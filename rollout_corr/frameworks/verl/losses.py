"""verl's policy losses by `rc.policy_loss`: value, gradient and metrics in one forward, one copy to the host.

`rollout_corr.frameworks.verl.install(losses=True)` installs them, in verl's registry too. `bypass_mode` stays verl's
own function: it corrects and then calls two of these. `clip_cov` draws tokens by `torch.randperm`, which `ClipCov` does
not repeat, `kl_cov` goes with it, `geo_mean` averages over all rows whatever it is told, and all three stay verl's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api.policy_loss import PolicyLoss, policy_loss
from ...backends.given import Batch, Factors
from ...specs.loss import Loss
from ...specs.surrogate import Surrogate
from ...specs.surrogates import GPG, SAPO
from ...specs.terms import Mean
from ..shared.dropin import Target
from ..shared.imports import origin_of
from .config import SURROGATES

MODULE = "verl.trainer.ppo.core_algos"

# loss_agg_mode: the mean, and which of `global_batch_info` counts for it.
MEANS: dict[str, tuple[Mean, str | None]] = {
    "token-mean": (Mean("token"), "batch_num_tokens"),
    "token-sum": (Mean("sum"), None),
    "seq-mean-token-sum": (Mean("sequence_sum"), "global_batch_size"),
    "seq-mean-token-sum-norm": (Mean("sequence_sum"), "global_batch_size"),
    "seq-mean-token-mean": (Mean("sequence"), "global_batch_size"),
}

ValueAndMetrics = tuple[Tensor, dict[str, float]]


def _actor(config: Any, dual: float) -> dict[str, Any]:
    """The settings of a surrogate, from verl's ActorConfig; `dual` is `clip_ratio_c` where it has none."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return {
        "clip_ratio_low": config.clip_ratio if low is None else low,
        "clip_ratio_high": config.clip_ratio if high is None else high,
        "clip_ratio_c": config.get("clip_ratio_c", dual),
    }


def _vanilla(config: Any) -> Surrogate:
    given = _actor(config, 3.0)
    if not given["clip_ratio_c"] > 1.0:
        raise ValueError(f"clip_ratio_c: expected a number > 1, got {given['clip_ratio_c']!r}")
    return SURROGATES["vanilla"].of(given)


def _clipped(mode: str) -> Callable[[Any], Surrogate]:
    return lambda config: SURROGATES[mode].of(_actor(config, 20.0))


class Kind(NamedTuple):
    """A row of the table of verl's losses."""

    surrogate: Callable[[Any], Surrogate]
    # Our metrics whose sum is its `pg_clipfrac`; None: it reports none of clipping.
    clipped: tuple[str, ...] | None = None
    dual: str | None = None  # our metric that is its `pg_clipfrac_lower`; None: 0
    mode: str = "token-mean"  # `loss_agg_mode` where none is given
    forced: bool = False  # whether that mode is taken whatever is given
    reports_kl: bool = True  # whether it reports `kl_old_new_k1`


CLIPPED, DUAL, OF_ROWS = ("clip_low_fraction", "clip_high_fraction"), "clip_dual_fraction", "seq-mean-token-mean"
KINDS = {
    "vanilla": Kind(_vanilla, CLIPPED, DUAL),
    "dppo_tv": Kind(_clipped("dppo_tv"), CLIPPED, DUAL),
    "dppo_kl": Kind(_clipped("dppo_kl"), CLIPPED, DUAL),
    "gspo": Kind(_clipped("gspo"), CLIPPED, mode=OF_ROWS),
    "sapo": Kind(lambda config: SAPO(config.tau_pos, config.tau_neg), (), mode=OF_ROWS, forced=True),
    "gpg": Kind(lambda config: GPG(), reports_kl=False),
    "dro": Kind(lambda config: SURROGATES["dro"].of({"dro_beta": config.policy_loss.dro_beta})),
    "cispo": Kind(_clipped("cispo"), CLIPPED),
}


def _function(name: str, kind: Kind) -> Callable[..., ValueAndMetrics]:
    """Make verl's function of a kind, with verl's name and arguments."""

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = kind.mode,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
        **switches: Any,
    ) -> ValueAndMetrics:
        """The loss of a micro-batch, and verl's metrics as floats.

        All tensors are [B, T]; the gradient goes to `log_prob`. SAPO takes the mean over sequences whatever
        `loss_agg_mode` says, as in verl; of GSPO see `gspo`. verl's ActorConfig is read, never changed.
        """
        mode = kind.mode if kind.forced else loss_agg_mode
        given = (old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
        value, ours = _loss(kind.surrogate(_needed(config)), mode, config, switches, *given)
        found = {"actor/ppo_kl": ours["kl_old_new_k1"]} if kind.reports_kl else {}
        if kind.clipped is not None:
            found["actor/pg_clipfrac"] = sum(ours[key] for key in kind.clipped)
            found["actor/pg_clipfrac_lower"] = ours[kind.dual] if kind.dual else 0.0
        return value, found

    loss.__name__ = loss.__qualname__ = f"compute_policy_loss_{name}"
    return loss


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **switches: Any,
) -> ValueAndMetrics:
    """Compute the loss -w A log pi, which `bypass_mode` calls; arguments as above, with the engine's log-probs."""
    given = (rollout_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    value, ours = _loss(GPG(), loss_agg_mode, config, switches, *given)
    return value, {"actor/ppo_kl": ours["kl_old_new_k1"]}


FUNCTIONS = {name: _function(name, kind) for name, kind in KINDS.items()} | {"reinforce": compute_policy_loss_reinforce}


# Versions whose GSPO averages by `loss_agg_mode`. Up to 0.9.0, and again on the main branch, it takes the mean over
# sequences whatever that says.
AVERAGING = ("0.9.1",)


def gspo(averages: bool) -> Callable[..., ValueAndMetrics]:
    """Make GSPO, which averages by `loss_agg_mode` or takes the mean over sequences whatever that says."""
    return _function("gspo", KINDS["gspo"]._replace(forced=not averages))


def _gspo_there(theirs: Callable[..., Any], **switches: Any) -> Callable[..., ValueAndMetrics]:
    """Make GSPO as the installed verl has it; no switch of `install` applies here."""
    return gspo(origin_of("verl").version in AVERAGING)


TARGETS = tuple(
    Target(MODULE, function.__name__, _gspo_there, takes_original=True)
    if name == "gspo"
    else Target(MODULE, function.__name__, function)
    for name, function in FUNCTIONS.items()
)


def _needed(config: Any) -> Any:
    if config is None:
        raise ValueError("config: expected verl's ActorConfig, got None")
    return config


def _loss(
    surrogate: Surrogate,
    loss_agg_mode: str,
    config: Any,
    switches: Mapping[str, Any],
    old: Tensor,
    new: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss as verl scales it, and our metrics of it."""
    if loss_agg_mode not in MEANS:
        raise ValueError(f"loss_agg_mode: expected one of {list(MEANS)}, got {loss_agg_mode!r}")
    mean, counted = MEANS[loss_agg_mode]
    info: Mapping[str, Any] = _needed(config).global_batch_info
    ranks = info.get("dp_size", 1)
    count = None if counted is None else info.get(counted)
    if counted is not None and count is None and ranks > 1:
        raise ValueError(
            f"{counted}: expected the count of all ranks in global_batch_info with dp_size={ranks}, got None"
        )
    if loss_agg_mode == "seq-mean-token-sum-norm":
        mean = replace(mean, length=float(info.get("loss_scale_factor") or mask.shape[-1]))
    # What verl multiplies by the ranks is divided by fewer, so that backward has nothing to multiply.
    total = count if count is None else count / ranks
    batch, wanted = Batch(mask=mask, total=total), Loss(surrogate, mean)
    backend, factors = switches.get("backend", "auto"), Factors(weights)
    found: PolicyLoss = policy_loss(new, advantages, batch, wanted, old_logp=old, correction=factors, backend=backend)
    value = found.value * ranks if count is None and ranks > 1 else found.value
    return value.to(torch.promote_types(new.dtype, advantages.dtype)), found.metrics()

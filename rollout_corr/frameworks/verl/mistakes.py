"""verl's settings that make the log-probs of the engine, and what goes wrong with them."""

from __future__ import annotations

from collections.abc import Callable

from ..shared.checking import Checks, Rule, Run, roles, without
from .config import CAPS, CORRECTION, FLAT, PLACE

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
BLOCK = f"{PLACE}."
LOSS_MODE = f"{ACTOR}policy_loss.loss_mode"


# Where 0.6.0 had them.
MOVED = {f"algorithm.{key}": f"{BLOCK}{key}" for key in ("rollout_is", "rollout_is_threshold")}


def _bypasses(run: Run) -> bool:
    return run.is_(f"{BLOCK}bypass_mode", True)


def _misplaced(key: str) -> Callable[[Run], bool]:
    """Tell whether a setting of today stands where the one of 0.6.0 stood."""

    def wrong(run: Run) -> bool:
        of_old = isinstance(run.get("algorithm.rollout_is"), bool) or any(run.find(f"algorithm.{key}") for key in FLAT)
        return run.has(key) and not of_old

    return wrong


CHECKS = Checks(
    keys=(
        *(BLOCK + key for key in CORRECTION),
        *(ACTOR + key for key in CAPS),
        *(f"algorithm.{key}" for key in FLAT),
        LOSS_MODE,
    ),
    older=tuple(MOVED),
    alike=("loss_mode", "use_policy_gradient", "loss_type"),
    closed=(PLACE,),
    launchers=r"\bverl\.(trainer|experimental)\.",
    logprobs_on_since="0.9.0",
    uses_logprobs=lambda run: run.corrects or _bypasses(run),
    roles=roles(
        ROLLOUT,
        "temperature top_p top_k",
        logprobs=f"{ROLLOUT}calculate_log_probs",
        mode=f"{ROLLOUT}logprobs_mode",
        length="data.max_response_length",
    ),
    bounds={"weight": (f"{BLOCK}rollout_is_threshold",), "criteria": (f"{BLOCK}rollout_rs_threshold",)},
    rules=(
        *(Rule(key, _misplaced(key), "nothing reads it in this place", f"write {new}") for key, new in MOVED.items()),
        *without(
            f"{BLOCK}rollout_is",
            f"{BLOCK}rollout_is_threshold",
            f"{BLOCK}rollout_is_batch_normalize",
            usual=True,
        ),
        *without(f"{BLOCK}rollout_rs", f"{BLOCK}rollout_rs_threshold"),
        Rule(
            f"{BLOCK}rollout_is",
            lambda run: (
                _bypasses(run)
                and run.on(f"{BLOCK}rollout_is")
                and run.off(f"{BLOCK}rollout_rs")
                and run.is_(f"{BLOCK}loss_type", "ppo_clip", default="ppo_clip")
            ),
            "{value} is only measured in bypass mode with loss_type ppo_clip, whose clipped ratio is the correction",
            "write loss_type=reinforce, or rollout_is=null",
        ),
        Rule(
            f"{BLOCK}loss_type",
            lambda run: run.is_(f"{BLOCK}loss_type", "reinforce") and run.off(f"{BLOCK}bypass_mode", False),
            "{value} does nothing without bypass mode",
            "write bypass_mode=true",
        ),
        Rule(
            LOSS_MODE,
            lambda run: _bypasses(run) and run.has(LOSS_MODE) and not run.is_(LOSS_MODE, "vanilla", "bypass_mode"),
            "bypass mode puts its own loss in place of {value}",
            "write bypass_mode=false, or loss_mode=vanilla",
        ),
        Rule(
            LOSS_MODE,
            lambda run: run.is_(LOSS_MODE, "bypass_mode") and run.off(f"{BLOCK}bypass_mode", False),
            "bypass_mode finds no rollout_correction: only bypass mode copies it there",
            "write algorithm.rollout_correction.bypass_mode=true",
        ),
    ),
)

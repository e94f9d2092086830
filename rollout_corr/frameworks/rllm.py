"""rLLM's `rollout_correction`, and the losses of its own since PR #741 (2026-07).

Its backends are verl and Fireworks, which have a loss each by `loss_fn`: a configuration says the correction alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..specs.correction import Spec, Weight
from ..specs.surrogates import DPPO, GPG, Score
from ..specs.validate import positive
from .shared.checking import Checks, without
from .shared.preset import HIGH, LEVELS
from .shared.recipe import (
    BYPASS,
    DECOUPLED,
    GSPO_TOKEN,
    NO_LOWER_CLAMP,
    SEQUENCES,
    Named,
    Recipe,
    around_one,
    as_wide,
    clip,
    named_recipe,
)
from .shared.settings import Given, NoEquivalent, Setting, given_in, refused, word

# --- losses ---

RLLM = {"eps_clip": 0.2, "eps_clip_high": None}
named_recipe("rllm.ppo_clip", Named(clip, **RLLM), DECOUPLED)
named_recipe("rllm.cispo", Named(as_wide(around_one), **RLLM), DECOUPLED)
named_recipe("rllm.gspo", Named(GSPO_TOKEN, **RLLM), DECOUPLED, NO_LOWER_CLAMP, mean=SEQUENCES)
named_recipe(
    "rllm.dppo_tv", Named(lambda low, high: DPPO("tv", low, high, None), delta_low=0.2, delta_high=0.2), DECOUPLED
)
named_recipe(
    "rllm.dppo_kl",
    Named(lambda delta: DPPO("kl", delta, delta, None, eps=1e-6), delta=0.2),
    DECOUPLED,
    "it floors p and q too, this package 1 - p and 1 - q",
)
named_recipe(
    "rllm.icepop", Named(partial(Score, outside="zero", of="new/rollout"), icepop_alpha=0.5, icepop_beta=5.0), BYPASS
)
named_recipe("rllm.reinforce", GPG(), ())
named_recipe(
    "rllm.reinforce_kl",
    Named(partial(Score, of="new/rollout"), ratio_clamp_min=None, ratio_clamp_max=None),
    BYPASS,
    "its KLs to the sampler are off by default",
)

# --- the configuration ---

MODES = ("token", "sequence")
# The default of its reader; the class RolloutCorrectionConfig has 5.0.
TABLE: dict[str, Any] = {
    "tis_mode": word(None, MODES),
    "bypass_mode": False,
    "tis_cap": Setting(2.0, positive),
}
# Where what is written stands in a configuration.
PLACE = "rllm.algorithm.rollout_correction"
BLOCKS = [("rollout_correction",), ("algorithm", "rollout_correction"), ("rllm", "algorithm", "rollout_correction")]
settings = partial(
    given_in, rows=TABLE, blocks=BLOCKS, whole=("rllm", "algorithm", "adv_estimator", "loss_fn", "estimator")
)


def read(given: Given) -> Spec:
    """Read the block `rollout_correction`, the block `algorithm` around it, or a whole configuration."""
    mode, bypass, cap = given.values()
    if mode is None:
        return Spec()
    if bypass:
        raise refused("tis_mode", f"expected null with bypass_mode, where both policies are one, got {mode!r}")
    return Spec(weight=Weight(*LEVELS[mode], upper=cap))


def recipe(given: Given) -> Recipe:
    """Refuse it: the loss is the backend's."""
    raise refused(
        "loss_fn",
        "its backend has the loss: rc.recipe('verl', ...) reads verl's from the same configuration; by name there is "
        "rc.recipe('rllm.ppo_clip') and its kin",
        NoEquivalent,
    )


WRITTEN = (({"tis_mode": None}, {"bypass_mode": False, "tis_mode": MODES, "tis_cap": HIGH}),)

# --- mistakes ---

CHECKS = Checks(
    keys=tuple(f"{PLACE}.{name}" for name in TABLE),
    closed=(PLACE,),
    bounds={"weight": (f"{PLACE}.tis_cap",)},
    rules=without(f"{PLACE}.tis_mode", f"{PLACE}.tis_cap", usual=True),
)

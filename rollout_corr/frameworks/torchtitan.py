"""torchtitan's RL experiment: GRPOLoss and DAPOLoss, over flat packed tokens.

The ratio is new/rollout, its log clamped to +-10. A token whose `generator_logprobs` is not finite is neither trained
nor counted. `bit_wise/ratio_tokens_different/mean` is `tokens_differing_fraction`, of differences above 1e-6.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..specs.correction import Criterion, Spec
from ..specs.surrogates import PPO
from .shared.preset import RECIPES, presets
from .shared.recipe import BYPASS, Named, Recipe, named_recipe
from .shared.settings import Given, given_in, unchecked

# No log-ratio of finite float32 log-probs is near it.
FINITE = 1e30


def _finite() -> Spec:
    finite = Criterion("k1", lower=-FINITE, upper=FINITE, of="new/rollout", label="nonfinite")
    return Spec(criteria=(finite,), nonfinite="propagate")


presets("torchtitan", "torchtitan b5bcd76 (2026-08-21)")(
    finite=(
        "No weight; a token whose rollout log-prob is not finite is dropped, and not counted by the mean.",
        _finite,
        {},
    )
)
CLIP = partial(PPO, clamp=10.0)
TOTAL = "total: response tokens of all ranks whose generator_logprobs are finite"
GRPO, DAPO = {"clip_eps": 0.2}, {"ratio_clip_low": 0.2, "ratio_clip_high": 0.2}
PARTS: dict[str, Any] = {"spec": "torchtitan.finite", "over": "kept"}
named_recipe("torchtitan.grpo", Named(lambda eps: CLIP(eps, eps), **GRPO), BYPASS, TOTAL, **PARTS)
named_recipe("torchtitan.dapo", Named(CLIP, **DAPO), BYPASS, TOTAL, **PARTS)

# --- the configuration ---

TABLE: dict[str, Any] = {**dict.fromkeys((*GRPO, *DAPO)), **dict.fromkeys(("num_chunks", "loss_fn"), unchecked(None))}
BLOCKS = [("loss",), ("loss_fn",), ("loss", "loss_fn"), ("trainer", "loss"), ("trainer", "loss", "loss_fn")]
settings = partial(given_in, rows=TABLE, blocks=BLOCKS)


def recipe(given: Given) -> Recipe:
    """Read the Config of a loss, of the ChunkedLossWrapper or the trainer around it, or of the controller."""
    given = given.without_null()
    found = RECIPES["torchtitan.dapo" if given.given.keys() & DAPO.keys() else "torchtitan.grpo"]
    return found.make(Given(found.table, {name: given[name] for name in given.given if name in GRPO | DAPO}))

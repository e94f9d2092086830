"""miles's flags, which are slime's, except for CISPO."""

from __future__ import annotations

from .shared.recipe import Recipe
from .shared.settings import Given
from .slime import config as slime
from .slime.mistakes import CHECKS as CHECKS

settings, read = slime.settings, slime.read
WRITTEN = slime.written(
    icepop="miles.backends.training_utils.loss_hub.corrections.icepop_function",
    mis="examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
)


def recipe(given: Given) -> Recipe:
    """Read the whole loss but its entropy bonus.

    With `use_rollout_logprobs` pass `rollout_logp` alone; with `skip_actor_forward_only`, `new_logp.detach()` as
    `old_logp`.
    """
    return slime.loss_of(given, (*slime.CLIPPED, "gspo"))

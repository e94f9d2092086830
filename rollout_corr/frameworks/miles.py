"""miles's flags, which are slime's, except for CISPO."""

from __future__ import annotations

from typing import Any

from ..specs.correction import Spec
from .shared.recipe import Recipe
from .shared.settings import Given
from .slime import config as slime
from .slime.mistakes import CHECKS as CHECKS

PATHS = {
    "icepop_function": "miles.backends.training_utils.loss_hub.corrections.icepop_function",
    "compute_mis_weights_with_cp": "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
}


settings, read = slime.settings, slime.read


def write(spec: Spec) -> dict[str, Any]:
    """Write the flags, which are slime's, with the places of miles's functions."""
    made = slime.write(spec)
    path = made.get("custom_tis_function_path")
    return made if path is None else made | {"custom_tis_function_path": PATHS[path.rpartition(".")[2]]}


def recipe(given: Given) -> Recipe:
    """Read the whole loss but its entropy bonus.

    With `use_rollout_logprobs` pass `rollout_logp` alone; with `skip_actor_forward_only`, `new_logp.detach()` as
    `old_logp`.
    """
    return slime.loss_of(given, (*slime.CLIPPED, "gspo"))

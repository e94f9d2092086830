"""miles's flags, which are slime's but for CISPO."""

from __future__ import annotations

from typing import Any

from rollout_corr.frameworks.slime import config as slime
from rollout_corr.specs.correction import Spec


def read(config: object) -> Spec:
    """Read the flags: `args`, a mapping of some of them, or the content of mis.yaml."""
    return slime.read(config)


def recipe(config: object) -> dict[str, Any]:
    """Read the whole loss but its entropy bonus.

    With `use_rollout_logprobs` pass `rollout_logp` alone; with `skip_actor_forward_only`, `new_logp.detach()` as
    `old_logp`.
    """
    return slime.loss_of(config, (*slime.CLIPPED, "gspo"))

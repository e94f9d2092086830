"""xtuner's configuration as a subclass, for use without `install()`. Importing this module imports xtuner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from xtuner.v1.rl.rollout_is import RolloutImportanceSampling as Theirs

from . import dropin


class RolloutImportanceSampling(Theirs):  # type: ignore[misc]  # xtuner is not installed where types are checked
    """xtuner's RolloutImportanceSampling, computed by rollout-corr; the fields of xtuner#2023, and of `install`."""

    rollout_is_veto_level: str = "max"
    rollout_is_veto_negative_adv_only: bool = False
    mismatch_over: str = "pack"
    empty_rows: str = "xtuner"
    nonfinite: str = "reject"
    backend: str = "auto"

    def compute_rollout_importance_weights_and_metrics(
        self,
        old_log_prob: Tensor,
        rollout_log_prob: Tensor,
        num_tokens: Tensor | Sequence[int],
        response_mask: Tensor,
        advantages: Tensor | None = None,
    ) -> Any:
        """Return weights, mask and both groups of metrics of a pack; see `dropin`."""
        switches = {name: getattr(self, name) for name in (*dropin.SWITCHES, "backend")}
        dropin.DROP_IN.check(switches)
        given = (old_log_prob, rollout_log_prob, num_tokens, response_mask, advantages)
        return dropin.compute_rollout_importance_weights_and_metrics(self, *given, **switches)

"""The one installation of this package in TRL."""

from __future__ import annotations

from rollout_corr.frameworks.shared.dropin import DropIn

ASYNC_MODULE = "trl.experimental.async_grpo.async_grpo_trainer"

DROP_IN = DropIn(
    "trl",
    checked=("1.16.0",),
    not_covered={"AsyncGRPOTrainer, which this TRL does not have": ASYNC_MODULE},
)

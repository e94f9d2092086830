"""xtuner's RolloutImportanceSampling in a Python file, and what goes wrong with it."""

from __future__ import annotations

from ..shared.checking import Checks, without
from .config import OF_SPEC

THRESHOLD, MASK, VETO = (f"rollout_is_{name}threshold" for name in ("", "mask_", "veto_"))

CHECKS = Checks(
    keys=tuple(OF_SPEC),
    closed=("",),
    roots=("RolloutImportanceSampling.", "GRPOLossConfig.rollout_is."),
    bounds={"weight": (THRESHOLD,), "mask": (MASK, THRESHOLD), "veto": (VETO,)},
    rules=without(THRESHOLD, MASK, VETO, "rollout_is_mode", usual=True),
)

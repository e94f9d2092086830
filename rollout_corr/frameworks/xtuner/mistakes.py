"""xtuner's RolloutImportanceSampling in a Python file, and what goes wrong with it."""

from __future__ import annotations

from ..shared.checking import Checks, without
from ..shared.settings import defaults_of
from .config import spec

THRESHOLD, MASK, VETO = (f"rollout_is_{name}threshold" for name in ("", "mask_", "veto_"))

CHECKS = Checks(
    keys=tuple(defaults_of(spec)),
    closed=("",),
    roots=("RolloutImportanceSampling.", "GRPOLossConfig.rollout_is."),
    bounds={"weight": (THRESHOLD,), "mask": (MASK, THRESHOLD), "veto": (VETO,)},
    rules=without(THRESHOLD, MASK, VETO, "rollout_is_mode", usual={"rollout_is_mode": "truncate"}),
)

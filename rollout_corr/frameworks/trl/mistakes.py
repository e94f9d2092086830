"""TRL's settings that make the log-probs of the engine, and what goes wrong with them."""

from __future__ import annotations

from ..shared.checking import Checks, Rule, roles, without
from .config import CLIP_MAX, CLIP_MIN, CORRECTION, MODE, NAME, TABLE

CHECKS = Checks(
    keys=tuple(key for key in TABLE if key.startswith(NAME) or key in ("use_vllm", "off_policy_mask_threshold")),
    launchers=r"\btrl\s+(grpo|rloo)\b",
    roots=("GRPOConfig.", "RLOOConfig.", "AsyncGRPOConfig."),
    roles=roles("", "temperature top_p top_k min_p repetition_penalty", length="max_completion_length"),
    bounds={"weight": (CLIP_MAX, CLIP_MIN), "criteria": (CLIP_MAX, CLIP_MIN)},
    rules=(
        *without(CORRECTION, MODE, CLIP_MAX, CLIP_MIN, default=True, usual=True),
        *without("use_vllm", MODE, CLIP_MAX, CLIP_MIN, default=False, usual=True),
        Rule(
            CORRECTION,
            lambda run: run.is_(CORRECTION, True) and run.is_("use_vllm", False),
            "does nothing without vLLM, whose log-probs it compares",
            "write use_vllm=True",
        ),
    ),
)

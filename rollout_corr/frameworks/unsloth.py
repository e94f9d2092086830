"""unsloth-zoo: TRL's modes, losses and GRPOConfig, with a geometric level, another `beta`, and 0.28 for dapo.

A NaN is ratio 1 ("neutral"), as since 2026.10.9.
"""

from __future__ import annotations

from .shared.preset import LEVELS, presets
from .shared.recipe import WITH_REFERENCE
from .trl.config import KNOWN, Trainer, modes

presets("unsloth", "unsloth-zoo 2026.10.9")(**modes(LEVELS, "unsloth-zoo"))
UNSLOTH = Trainer(
    "unsloth",
    tuple(LEVELS),
    KNOWN | {"beta": 0.001, "loss_type": "bnpo"},
    named={"vllm_importance_sampling_correction": False},
    dapo_high=0.28,
    kl_clamp=10.0,
)
UNSLOTH.register(WITH_REFERENCE)
read, recipe, write = UNSLOTH.read, UNSLOTH.recipe, UNSLOTH.write

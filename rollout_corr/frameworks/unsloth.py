"""unsloth-zoo: TRL's modes, losses and GRPOConfig, with a geometric level, another `beta`, and 0.28 for dapo.

A NaN is ratio 1 ("neutral"), as since 2026.10.9.
"""

from __future__ import annotations

from .shared.preset import LEVELS, presets
from .shared.recipe import WITH_REFERENCE
from .shared.settings import maybe, word
from .trl.config import CORRECTION, MEANS, TABLE, Trainer, modes

presets("unsloth", "unsloth-zoo 2026.10.9")(**modes(LEVELS, "unsloth-zoo"))
UNSLOTH = Trainer(
    "unsloth",
    TABLE | {"beta": maybe(0.001), "loss_type": word("bnpo", MEANS)},
    levels=tuple(LEVELS),
    named={CORRECTION: False},
    dapo_high=0.28,
    kl_clamp=10.0,
)
UNSLOTH.register(WITH_REFERENCE)
settings, read, recipe, WRITTEN = UNSLOTH.settings, UNSLOTH.read, UNSLOTH.recipe, UNSLOTH.written

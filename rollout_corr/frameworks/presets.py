"""Recipes of the frameworks, as Specs: `presets.verl.decoupled_token_is(threshold=2.0)`, or by name with `preset`.

One module a framework; a recipe's docstring says its formula, docs/presets.md shows the Spec that each makes.
"""

from rollout_corr.frameworks import dppo as dppo
from rollout_corr.frameworks import flash_rl as flash_rl
from rollout_corr.frameworks import glm as glm
from rollout_corr.frameworks import kimi as kimi
from rollout_corr.frameworks import megatron as megatron
from rollout_corr.frameworks import minirl as minirl
from rollout_corr.frameworks import molt as molt
from rollout_corr.frameworks import nemo as nemo
from rollout_corr.frameworks import open_instruct as open_instruct
from rollout_corr.frameworks import openrlhf as openrlhf
from rollout_corr.frameworks import prime_rl as prime_rl
from rollout_corr.frameworks import rlinf as rlinf
from rollout_corr.frameworks import roll as roll
from rollout_corr.frameworks import swift as swift
from rollout_corr.frameworks import tunix as tunix
from rollout_corr.frameworks import unsloth as unsloth
from rollout_corr.frameworks.areal import presets as areal
from rollout_corr.frameworks.registry import names as names
from rollout_corr.frameworks.registry import preset as preset
from rollout_corr.frameworks.skyrl import presets as skyrl
from rollout_corr.frameworks.slime import presets as slime
from rollout_corr.frameworks.trl import presets as trl
from rollout_corr.frameworks.verl import presets as verl
from rollout_corr.frameworks.xtuner import presets as xtuner

__all__ = [
    "areal", "dppo", "flash_rl", "glm", "kimi", "megatron", "minirl", "molt", "names", "nemo", "open_instruct",
    "openrlhf", "preset", "prime_rl", "rlinf", "roll", "skyrl", "slime", "swift", "trl", "tunix", "unsloth", "verl",
    "xtuner",
]  # fmt: skip

"""Recipes of the frameworks, as Specs: `presets.verl.decoupled_token_is(threshold=2.0)`, or by name with `preset`.

One module a framework; a recipe's docstring says its formula, docs/presets.md shows the Spec that each makes.
"""

from rollout_corr.presets import areal as areal
from rollout_corr.presets import dppo as dppo
from rollout_corr.presets import flash_rl as flash_rl
from rollout_corr.presets import glm as glm
from rollout_corr.presets import kimi as kimi
from rollout_corr.presets import megatron as megatron
from rollout_corr.presets import minirl as minirl
from rollout_corr.presets import molt as molt
from rollout_corr.presets import nemo as nemo
from rollout_corr.presets import open_instruct as open_instruct
from rollout_corr.presets import openrlhf as openrlhf
from rollout_corr.presets import prime_rl as prime_rl
from rollout_corr.presets import rlinf as rlinf
from rollout_corr.presets import roll as roll
from rollout_corr.presets import skyrl as skyrl
from rollout_corr.presets import slime as slime
from rollout_corr.presets import swift as swift
from rollout_corr.presets import trl as trl
from rollout_corr.presets import tunix as tunix
from rollout_corr.presets import unsloth as unsloth
from rollout_corr.presets import verl as verl
from rollout_corr.presets import xtuner as xtuner
from rollout_corr.presets.registry import names as names
from rollout_corr.presets.registry import preset as preset

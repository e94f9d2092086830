"""Presets of the frameworks, as Specs: `presets.verl.decoupled_token_is(threshold=2.0)`, or by name with `preset`.

Each attribute is the module of a framework, imported when it is first used. The docstring of a preset gives its
formula; docs/presets.md shows the Spec that each preset builds.
"""

from typing import TYPE_CHECKING

from rollout_corr.frameworks.shared import lookup as _lookup
from rollout_corr.frameworks.shared.lookup import names as names
from rollout_corr.frameworks.shared.lookup import preset as preset

if TYPE_CHECKING:  # for editors and type checkers; at run time a framework is found by its folder
    from rollout_corr.frameworks import ctpo as ctpo
    from rollout_corr.frameworks import dppo as dppo
    from rollout_corr.frameworks import flash_rl as flash_rl
    from rollout_corr.frameworks import glm as glm
    from rollout_corr.frameworks import kimi as kimi
    from rollout_corr.frameworks import megatron as megatron
    from rollout_corr.frameworks import minirl as minirl
    from rollout_corr.frameworks import rlinf as rlinf
    from rollout_corr.frameworks import tunix as tunix
    from rollout_corr.frameworks.areal import presets as areal
    from rollout_corr.frameworks.molt import presets as molt
    from rollout_corr.frameworks.nemo import presets as nemo
    from rollout_corr.frameworks.open_instruct import presets as open_instruct
    from rollout_corr.frameworks.openrlhf import presets as openrlhf
    from rollout_corr.frameworks.prime_rl import presets as prime_rl
    from rollout_corr.frameworks.roll import presets as roll
    from rollout_corr.frameworks.skyrl import presets as skyrl
    from rollout_corr.frameworks.slime import presets as slime
    from rollout_corr.frameworks.swift import presets as swift
    from rollout_corr.frameworks.trl import presets as trl
    from rollout_corr.frameworks.unsloth import presets as unsloth
    from rollout_corr.frameworks.verl import presets as verl
    from rollout_corr.frameworks.xtuner import presets as xtuner

    __all__ = [
        "areal",
        "molt",
        "names",
        "nemo",
        "open_instruct",
        "openrlhf",
        "preset",
        "prime_rl",
        "roll",
        "skyrl",
        "slime",
        "swift",
        "trl",
        "unsloth",
        "verl",
        "xtuner",
    ]
else:

    def __getattr__(name):
        if name not in _lookup.frameworks() or not _lookup.presets_of(name):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = _lookup.part(name, "presets")
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({"names", "preset", *(name.partition(".")[0] for name in names())})

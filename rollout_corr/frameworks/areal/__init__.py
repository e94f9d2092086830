"""AReaL: presets and drop-in."""

from rollout_corr.frameworks.areal.dropin import install as install
from rollout_corr.frameworks.areal.dropin import installed as installed
from rollout_corr.frameworks.areal.dropin import uninstall as uninstall

"""TRL: presets and drop-in."""

from rollout_corr.frameworks.trl.dropin import install as install
from rollout_corr.frameworks.trl.dropin import installed as installed
from rollout_corr.frameworks.trl.dropin import uninstall as uninstall

"""SkyRL: presets, configuration, metrics, losses and drop-in."""

from rollout_corr.frameworks.skyrl.dropin import install as install
from rollout_corr.frameworks.skyrl.dropin import installed as installed
from rollout_corr.frameworks.skyrl.dropin import uninstall as uninstall

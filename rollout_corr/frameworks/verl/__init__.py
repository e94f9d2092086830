"""verl: presets, configuration, metrics, losses and drop-in."""

from rollout_corr.frameworks.verl.dropin import install as install
from rollout_corr.frameworks.verl.dropin import installed as installed
from rollout_corr.frameworks.verl.dropin import uninstall as uninstall

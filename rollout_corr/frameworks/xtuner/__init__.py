"""xtuner: presets, configuration, metrics and drop-in."""

from rollout_corr.frameworks.xtuner.dropin import install as install
from rollout_corr.frameworks.xtuner.dropin import installed as installed
from rollout_corr.frameworks.xtuner.dropin import uninstall as uninstall

"""verl: presets, configuration, metrics, losses and drop-in."""

from typing import TYPE_CHECKING

from rollout_corr.frameworks import lazily

if TYPE_CHECKING:
    from rollout_corr.frameworks.verl.dropin import install as install
    from rollout_corr.frameworks.verl.dropin import installed as installed
    from rollout_corr.frameworks.verl.dropin import uninstall as uninstall

__getattr__ = lazily(__name__, dropin=("install", "installed", "uninstall"))

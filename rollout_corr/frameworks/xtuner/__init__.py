"""xtuner: presets, configuration, metrics and drop-in."""

from typing import TYPE_CHECKING

from rollout_corr.frameworks import lazily

if TYPE_CHECKING:
    from rollout_corr.frameworks.xtuner.dropin import install as install
    from rollout_corr.frameworks.xtuner.dropin import installed as installed
    from rollout_corr.frameworks.xtuner.dropin import uninstall as uninstall
    from rollout_corr.frameworks.xtuner.subclass import RolloutImportanceSampling as RolloutImportanceSampling

__getattr__ = lazily(__name__, dropin=("install", "installed", "uninstall"), subclass=("RolloutImportanceSampling",))

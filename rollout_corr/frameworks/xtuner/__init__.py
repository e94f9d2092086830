"""xtuner: presets, configuration, metrics and drop-in."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_corr.frameworks.xtuner.dropin import install as install
    from rollout_corr.frameworks.xtuner.dropin import installed as installed
    from rollout_corr.frameworks.xtuner.dropin import uninstall as uninstall

PUBLIC = ("install", "installed", "uninstall")


def __getattr__(name: str) -> Any:
    # Loaded when asked for: a preset needs neither torch nor the drop-in.
    if name in PUBLIC:
        return getattr(import_module(f"{__name__}.dropin"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

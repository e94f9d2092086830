"""slime and miles: presets, and functions for their configuration to name."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_corr.frameworks.slime.functions import icepop as icepop
    from rollout_corr.frameworks.slime.functions import mis as mis
    from rollout_corr.frameworks.slime.functions import tis as tis

PUBLIC = ("icepop", "mis", "tis")


def __getattr__(name: str) -> Any:
    # Loaded when asked for: a preset needs neither torch nor the functions.
    if name in PUBLIC:
        return getattr(import_module(f"{__name__}.functions"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

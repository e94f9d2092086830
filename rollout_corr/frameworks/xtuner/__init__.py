"""xtuner: presets, configuration, metrics and drop-in."""

from typing import TYPE_CHECKING

from .. import lazily

if TYPE_CHECKING:
    from .dropin import install as install
    from .dropin import installed as installed
    from .dropin import uninstall as uninstall

__getattr__ = lazily(__name__, dropin=("install", "installed", "uninstall"))

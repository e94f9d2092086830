"""slime and miles: presets, and functions for their configuration to name."""

from typing import TYPE_CHECKING

from .. import lazily

if TYPE_CHECKING:
    from .functions import icepop as icepop
    from .functions import mis as mis
    from .functions import tis as tis

__getattr__ = lazily(__name__, functions=("icepop", "mis", "tis"))

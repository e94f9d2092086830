"""slime and miles: presets, and functions for their configuration to name."""

from typing import TYPE_CHECKING

from rollout_corr.frameworks import lazily

if TYPE_CHECKING:
    from rollout_corr.frameworks.slime.functions import icepop as icepop
    from rollout_corr.frameworks.slime.functions import mis as mis
    from rollout_corr.frameworks.slime.functions import tis as tis

__getattr__ = lazily(__name__, functions=("icepop", "mis", "tis"))

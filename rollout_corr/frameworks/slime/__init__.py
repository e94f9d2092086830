"""slime and miles: presets, and functions for their configuration to name."""

from rollout_corr.frameworks.slime.functions import icepop as icepop
from rollout_corr.frameworks.slime.functions import mis as mis
from rollout_corr.frameworks.slime.functions import tis as tis

"""Everything after the log-probs in LLM reinforcement learning: weights, rejection, statistics.

Importing needs torch alone: no GPU, no Triton, no driver query.
"""

from rollout_corr import presets as presets
from rollout_corr.config import from_config as from_config
from rollout_corr.groups import FilteredGroups as FilteredGroups
from rollout_corr.groups import filter_groups as filter_groups
from rollout_corr.ops import Backend as Backend
from rollout_corr.ops import Correction as Correction
from rollout_corr.ops import backend_for as backend_for
from rollout_corr.ops import correct as correct
from rollout_corr.ops import warmup as warmup
from rollout_corr.presets import preset as preset
from rollout_corr.spec import Criterion as Criterion
from rollout_corr.spec import Spec as Spec
from rollout_corr.spec import Weight as Weight
from rollout_corr.statistics import PendingMetrics as PendingMetrics
from rollout_corr.statistics import Statistics as Statistics

__all__ = [
    "Backend",
    "Correction",
    "Criterion",
    "FilteredGroups",
    "PendingMetrics",
    "Spec",
    "Statistics",
    "Weight",
    "backend_for",
    "correct",
    "filter_groups",
    "from_config",
    "preset",
    "presets",
    "warmup",
]

__version__ = "0.1.0"

"""Everything after the log-probs in LLM reinforcement learning: weights, rejection, statistics.

Importing needs torch alone: no GPU, no Triton, no driver query.
"""

from rollout_corr import presets as presets
from rollout_corr.config import from_config as from_config
from rollout_corr.dumping import dump as dump
from rollout_corr.groups import FilteredGroups as FilteredGroups
from rollout_corr.groups import filter_groups as filter_groups
from rollout_corr.loss import PolicyLoss as PolicyLoss
from rollout_corr.loss import policy_loss as policy_loss
from rollout_corr.ops import Backend as Backend
from rollout_corr.ops import Correction as Correction
from rollout_corr.ops import PendingCorrection as PendingCorrection
from rollout_corr.ops import backend_for as backend_for
from rollout_corr.ops import correct as correct
from rollout_corr.ops import correct_async as correct_async
from rollout_corr.presets import preset as preset
from rollout_corr.recipes import recipe as recipe
from rollout_corr.recipes import recipe_names as recipe_names
from rollout_corr.spec import Criterion as Criterion
from rollout_corr.spec import Spec as Spec
from rollout_corr.spec import Weight as Weight
from rollout_corr.statistics import PendingMetrics as PendingMetrics
from rollout_corr.statistics import Statistics as Statistics
from rollout_corr.surrogates import DPPO as DPPO
from rollout_corr.surrogates import DRO as DRO
from rollout_corr.surrogates import GMPO as GMPO
from rollout_corr.surrogates import GPG as GPG
from rollout_corr.surrogates import GSPO as GSPO
from rollout_corr.surrogates import KL as KL
from rollout_corr.surrogates import PPO as PPO
from rollout_corr.surrogates import SAPO as SAPO
from rollout_corr.surrogates import Reinforce as Reinforce
from rollout_corr.surrogates import Score as Score
from rollout_corr.surrogates import SquaredLogRatio as SquaredLogRatio
from rollout_corr.warm import warmup as warmup

__all__ = [
    "DPPO",
    "DRO",
    "GMPO",
    "GPG",
    "GSPO",
    "KL",
    "PPO",
    "SAPO",
    "Backend",
    "Correction",
    "Criterion",
    "FilteredGroups",
    "PendingCorrection",
    "PendingMetrics",
    "PolicyLoss",
    "Reinforce",
    "Score",
    "Spec",
    "SquaredLogRatio",
    "Statistics",
    "Weight",
    "backend_for",
    "correct",
    "correct_async",
    "dump",
    "filter_groups",
    "from_config",
    "policy_loss",
    "preset",
    "presets",
    "recipe",
    "recipe_names",
    "warmup",
]

__version__ = "0.1.0"

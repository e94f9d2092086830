"""Rollout correction for LLM reinforcement learning: from two log-probs of each token to weights, metrics and the loss.

Importing needs torch alone: no GPU, no Triton, no driver query. What a correction or a loss does not need is imported
when it is first used: `policy_loss`, its surrogates, specs and recipes by name, `dump`, `doctor`, `suggest`, `warmup`.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

with warnings.catch_warnings():
    # Where NumPy is not installed, torch says so at its import, and nothing here needs it.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    import torch as _torch  # noqa: F401

from ._version import __version__ as __version__
from .api.correct import Correction as Correction
from .api.correct import PendingCorrection as PendingCorrection
from .api.correct import correct as correct
from .api.correct import correct_async as correct_async
from .api.outputs import Outputs as Outputs
from .backends.choose import Backend as Backend
from .backends.choose import backend_for as backend_for
from .backends.given import Batch as Batch
from .backends.given import Factors as Factors
from .backends.given import Groups as Groups
from .backends.given import KeptMass as KeptMass
from .backends.given import Labels as Labels
from .backends.given import Ranks as Ranks
from .backends.given import TurnIds as TurnIds
from .backends.given import Versions as Versions
from .metrics.statistics import Statistics as Statistics
from .specs.caches import clear_caches as clear_caches
from .specs.correction import Criterion as Criterion
from .specs.correction import Spec as Spec
from .specs.correction import Weight as Weight

if TYPE_CHECKING:  # `__getattr__` below imports these when they are first used
    from .api.dump import dump as dump
    from .api.groups import FilteredGroups as FilteredGroups
    from .api.groups import filter_groups as filter_groups
    from .api.per_token import early_token_weights as early_token_weights
    from .api.per_token import future_kl_weights as future_kl_weights
    from .api.per_token import proximal as proximal
    from .api.policy_loss import PolicyLoss as PolicyLoss
    from .api.policy_loss import policy_loss as policy_loss
    from .api.routes import RouteAgreement as RouteAgreement
    from .api.routes import route_agreement as route_agreement
    from .api.selection import Selection as Selection
    from .api.selection import selection as selection
    from .api.suggest import Suggestion as Suggestion
    from .api.suggest import suggest as suggest
    from .api.warmup import warmup as warmup
    from .diagnose.calls import doctor as doctor
    from .diagnose.calls import report as report
    from .diagnose.doctor.cause import Finding as Finding
    from .diagnose.results import Diagnosis as Diagnosis
    from .diagnose.results import Report as Report
    from .frameworks.shared.checking import ConfigProblem as ConfigProblem
    from .frameworks.shared.checking import check_config as check_config
    from .frameworks.shared.lookup import Recipe as Recipe
    from .frameworks.shared.lookup import recipe as recipe
    from .frameworks.shared.lookup import recipe_names as recipe_names
    from .frameworks.shared.lookup import spec as spec
    from .frameworks.shared.lookup import spec_names as spec_names
    from .frameworks.shared.names import FrameworkName as FrameworkName
    from .frameworks.shared.names import RecipeName as RecipeName
    from .frameworks.shared.names import SpecName as SpecName
    from .metrics.statistics import PendingMetrics as PendingMetrics
    from .specs.batch_losses import REAL as REAL
    from .specs.batch_losses import ClipCov as ClipCov
    from .specs.batch_losses import KLCov as KLCov
    from .specs.bounds_of_batch import Bottom as Bottom
    from .specs.bounds_of_batch import KeepESS as KeepESS
    from .specs.bounds_of_batch import MeanBelow as MeanBelow
    from .specs.bounds_of_batch import Quantile as Quantile
    from .specs.bounds_of_batch import TopK as TopK
    from .specs.loss import Loss as Loss
    from .specs.published import CISPO as CISPO
    from .specs.published import M2PO as M2PO
    from .specs.published import MIS as MIS
    from .specs.published import OPSM as OPSM
    from .specs.published import TIS as TIS
    from .specs.published import ClipHigher as ClipHigher
    from .specs.published import GeoRS as GeoRS
    from .specs.published import GSPOToken as GSPOToken
    from .specs.published import IcePop as IcePop
    from .specs.published import KPop as KPop
    from .specs.ratio_losses import GMPO as GMPO
    from .specs.ratio_losses import GSPO as GSPO
    from .specs.ratio_losses import PPO as PPO
    from .specs.ratio_losses import SAPO as SAPO
    from .specs.ratio_losses import AveragePPO as AveragePPO
    from .specs.ratio_losses import Reinforce as Reinforce
    from .specs.score_losses import DPPO as DPPO
    from .specs.score_losses import DRO as DRO
    from .specs.score_losses import GPG as GPG
    from .specs.score_losses import Score as Score
    from .specs.signed_losses import REC as REC
    from .specs.signed_losses import TOPR as TOPR
    from .specs.signed_losses import VESPO as VESPO
    from .specs.terms import KL as KL
    from .specs.terms import EntropyBonus as EntropyBonus
    from .specs.terms import Mean as Mean
    from .specs.terms import SquaredLogRatio as SquaredLogRatio

__all__ = [
    "CISPO", "DPPO", "DRO", "GMPO", "GPG", "GSPO", "KL", "M2PO", "MIS", "OPSM", "PPO", "REAL", "REC", "SAPO",
    "TIS", "TOPR", "VESPO", "AveragePPO", "Backend", "Batch", "Bottom", "ClipCov", "ClipHigher", "ConfigProblem",
    "Correction", "Criterion", "Diagnosis", "EntropyBonus", "Factors", "FilteredGroups", "Finding",
    "FrameworkName", "GSPOToken", "GeoRS", "Groups", "IcePop", "KLCov", "KPop", "KeepESS", "KeptMass", "Labels",
    "Loss", "Mean", "MeanBelow", "Outputs", "PendingCorrection", "PendingMetrics", "PolicyLoss", "Quantile", "Ranks",
    "Recipe", "RecipeName", "Reinforce", "Report", "RouteAgreement", "Score", "Selection", "Spec", "SpecName",
    "SquaredLogRatio", "Statistics", "Suggestion", "TopK", "TurnIds", "Versions",
    "Weight", "backend_for", "check_config", "clear_caches", "correct", "correct_async", "doctor", "dump",
    "early_token_weights", "filter_groups", "future_kl_weights", "policy_loss", "proximal", "recipe", "recipe_names",
    "report", "route_agreement", "selection", "spec", "spec_names", "suggest", "warmup",
]  # fmt: skip

# The names that a module of the package is imported for, when one of them is first used.
_IMPORTED_WHEN_USED = {
    "api.dump": "dump",
    "api.groups": "FilteredGroups filter_groups",
    "api.per_token": "early_token_weights future_kl_weights proximal",
    "api.policy_loss": "PolicyLoss policy_loss",
    "api.routes": "RouteAgreement route_agreement",
    "api.selection": "Selection selection",
    "api.suggest": "Suggestion suggest",
    "api.warmup": "warmup",
    "diagnose.calls": "doctor report",
    "diagnose.doctor.cause": "Finding",
    "diagnose.results": "Diagnosis Report",
    "frameworks.shared.checking": "ConfigProblem check_config",
    "frameworks.shared.lookup": "Recipe recipe recipe_names spec spec_names",
    "frameworks.shared.names": "FrameworkName RecipeName SpecName",
    "metrics.statistics": "PendingMetrics",
    "specs.batch_losses": "ClipCov KLCov REAL",
    "specs.bounds_of_batch": "Bottom KeepESS MeanBelow Quantile TopK",
    "specs.loss": "Loss",
    "specs.published": "CISPO ClipHigher GSPOToken GeoRS IcePop KPop M2PO MIS OPSM TIS",
    "specs.ratio_losses": "AveragePPO GMPO GSPO PPO Reinforce SAPO",
    "specs.score_losses": "DPPO DRO GPG Score",
    "specs.signed_losses": "REC TOPR VESPO",
    "specs.terms": "EntropyBonus KL Mean SquaredLogRatio",
}
_MODULES = {name: module for module, names in _IMPORTED_WHEN_USED.items() for name in names.split()}


# Names of other libraries, and of commits before the release, for a Spec by a framework's name.
_MEANT = {
    **dict.fromkeys(("preset", "get_preset", "from_preset"), "rc.spec(name)"),
    **dict.fromkeys(("presets", "list_presets", "preset_names"), "rc.spec_names(), and rc.spec(name)"),
    **dict.fromkeys(("from_config", "spec_from_config"), "rc.spec(framework, config)"),
    "recipe_from_config": "rc.recipe(framework, config)",
}


if not TYPE_CHECKING:  # a checker shall refuse every other name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            hint = f"; write {_MEANT[name]}" if name in _MEANT else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

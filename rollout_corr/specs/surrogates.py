"""All surrogates: one frozen, hashable, checked class each, which knows its formula and everything else said of it.

To add one, write a class with its `traits` and formulas in ratio_losses.py, score_losses.py or signed_losses.py, list
it here, export it in `rollout_corr/__init__.py`, and give it a branch in kernels/policy_loss/formulas.py and a formula
in tests/oracles/loss.py. One that sees the whole batch first lives in batch_losses.py, and has its formula in
tests/oracles/batch_losses.py. Nothing else names it.

`import rollout_corr` imports only the files of the most used ones, and this list when something asks for all.
"""

from __future__ import annotations

from .batch_losses import REAL as REAL
from .batch_losses import ClipCov as ClipCov
from .batch_losses import KLCov as KLCov
from .ratio_losses import GMPO as GMPO
from .ratio_losses import GSPO as GSPO
from .ratio_losses import PPO as PPO
from .ratio_losses import SAPO as SAPO
from .ratio_losses import AveragePPO as AveragePPO
from .ratio_losses import Reinforce as Reinforce
from .score_losses import DPPO as DPPO
from .score_losses import DRO as DRO
from .score_losses import GPG as GPG
from .score_losses import Score as Score
from .signed_losses import REC as REC
from .signed_losses import TOPR as TOPR
from .signed_losses import VESPO as VESPO
from .surrogate import Surrogate

SURROGATES: tuple[type[Surrogate], ...] = (
    *(PPO, GSPO, AveragePPO, Reinforce, Score, DPPO, SAPO, GMPO, GPG, DRO, TOPR, REC, VESPO),
)
# Those that see the whole batch first; there are kernels for those that choose tokens.
OF_BATCH: tuple[type[Surrogate], ...] = (ClipCov, KLCov, REAL)

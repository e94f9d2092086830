"""Methods that papers publish under a name and that are a single weight, criterion or surrogate here.

Each returns the frozen value itself, whose `repr` is the call of its type. A method that needs several of them, such
as DAPO or Dr. GRPO, is a recipe: `rc.recipe`.
"""

from __future__ import annotations

from typing import Literal, get_args

from .choices import STRETCHES, Of, Stretch
from .criterion import Criterion
from .rules import MeanBelow
from .surrogates import GSPO, PPO, Score
from .validate import choice, not_negative, positive
from .weight import Weight

Over = Literal["token", "turn", "sequence"]
OVER: tuple[Over, ...] = get_args(Over)

# --- weights ---


def TIS(upper: float = 2.0, over: Over = "token") -> Weight:
    """Truncated importance sampling (Yao et al. 2025, Flash-RL): the ratio, or `upper` where it is larger.

    Args:
        upper: The largest weight; 2 in the authors' code.
        over: Each "token" has its ratio, or a "sequence" or "turn" the product of its ratios (Seq-TIS).
    """
    choice("TIS.over", over, OVER)
    return Weight(over, None if over == "token" else "sum", upper=positive("TIS.upper", upper, finite=False))


def MIS(upper: float, over: Over = "sequence") -> Weight:
    """Masked importance sampling (Liu et al. 2025): the ratio, or 0 where it exceeds `upper`.

    Args:
        upper: The largest weight.
        over: A "sequence" or "turn" has the product of its ratios (Seq-MIS), or each "token" its own.
    """
    choice("MIS.over", over, OVER)
    upper = positive("MIS.upper", upper, finite=False)
    return Weight(over, None if over == "token" else "sum", upper=upper, outside="zero")


def IcePop(lower: float | None = 0.5, upper: float | None = 5.0) -> Weight:
    """IcePop (Ring-1T, arXiv 2510.18855): the ratio of a token, or 0 outside the bounds, there alpha and beta.

    Args:
        lower: The smallest ratio that trains, or None.
        upper: The largest ratio that trains, or None.
    """
    return Weight.token(lower=lower, upper=upper, outside="zero")


# --- criteria ---


def GeoRS(lower: float | None, upper: float | None, over: Stretch = "sequence") -> Criterion:
    """Geometric rejection sampling (Geo-RS): keep a sequence whose geometric mean of ratios lies within the bounds.

    Args:
        lower: The smallest mean kept, or None. Bounds lie close to 1; `rc.suggest` finds them for a batch.
        upper: The largest mean kept, or None.
        over: Test each "sequence", or each "turn" by itself.
    """
    choice("GeoRS.over", over, STRETCHES)
    return Criterion("ratio", over=over, reduce="mean", lower=lower, upper=upper)


def OPSM(delta: float, of: Of = "new/rollout") -> Criterion:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): reject what is bad and far from what was sampled.

    A sequence with a negative advantage is rejected where its mean of -D exceeds delta.

    Args:
        delta: The largest mean of -D that is kept, such as 0.1.
        of: The policies that D compares. With "new/rollout" and "new/old" it is for `policy_loss`.
    """
    return Criterion("k1", over="sequence", reduce="mean", upper=delta, when="negative_advantage", of=of, label="opsm")


def KPop(upper: float = 0.1, of: Of = "train/rollout") -> Criterion:
    """KPop (Guo et al. 2026): reject a token whose binary KL exceeds `upper` in either direction.

    Args:
        upper: The largest KL of the two-point distributions (the token, any other token) that is kept.
        of: The policies that are compared. With "new/rollout" and "new/old" it is for `policy_loss`.
    """
    return Criterion("binary_kl_symmetric", upper=upper, of=of, label="kpop")


def M2PO(threshold: float = 0.04) -> Criterion:
    """The mask of M2PO (arXiv 2510.01161): what is kept has a mean of D^2 below a threshold.

    The tokens with the largest D^2 are rejected until the mean of D^2 over the rest is below the threshold.

    Args:
        threshold: The bound of the mean of D^2.
    """
    # k2 is D^2 / 2.
    return Criterion("k2", upper=MeanBelow(positive("M2PO.threshold", threshold) / 2.0), label="m2po")


# --- surrogates ---


def CISPO(low: float | None = None, high: float = 4.0) -> Score:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -sg(clip(r, 1 - low, 1 + high)) A new_logp.

    Args:
        low: How far the ratio may fall below 1; None: as far as it likes, as in the paper, which has no lower bound.
        high: How far the ratio may rise above 1. The default lets it rise to 5.
    """
    lower = None if low is None else max(0.0, 1.0 - not_negative("CISPO.low", low))
    return Score(lower, 1.0 + not_negative("CISPO.high", high))


def ClipHigher(low: float = 0.2, high: float = 0.28) -> PPO:
    """Clip-Higher of DAPO (arXiv 2503.14476): PPO's clip with more room above 1 than below.

    Args:
        low: How far the ratio may fall below 1.
        high: How far the ratio may rise above 1.
    """
    return PPO(low, high)


def GSPOToken(low: float = 3e-4, high: float = 4e-4) -> GSPO:
    """GSPO-token (arXiv 2507.18071): GSPO whose gradient flows through a token's own log-prob only.

    Args:
        low: How far the ratio may fall below 1.
        high: How far the ratio may rise above 1.
    """
    return GSPO(low, high, through="token")

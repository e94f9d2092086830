"""CTPO: PPO's clip on the ratio of each token's prefix, for `policy_loss`; with `la` the band grows as sqrt(t).

CTPO lets a gradient through the ratio of token t alone: it is that of log p_t times the ratio of the prefix, and 0
where the clip holds. So it is a weight and three criteria, which of them by the sign of the advantage.
"""

from __future__ import annotations

import math

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BYPASS, of_presets
from rollout_corr.specs.choices import Growth, WeightReduce, When
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.surrogates import Score

# What CTPO clamps every log-ratio to.
TOKEN_CLAMP = 20.0
MATCHES = "CTPO acc4021 (2026-06), arXiv 2605.07331"


def _clipped(
    weighed: WeightReduce, tested: WeightReduce, bounds: tuple[float, float, float], growth: Growth | None
) -> Spec:
    """Build the Spec; `bounds` are the lower, the upper and that of the dual clip, as ratios."""
    lower, upper, dual = bounds

    def prefix(label: str, lower: float | None, upper: float | None) -> Criterion:
        when: When = "positive_advantage" if label == "clip_high" else "negative_advantage"
        return Criterion(
            "ratio", "prefix", tested, lower, upper, when, "unit", "new/rollout", label, None, TOKEN_CLAMP,
            growth=growth,
        )  # fmt: skip

    criteria = prefix("clip_high", None, upper), prefix("clip_low", lower, None), prefix("clip_dual", None, dual)
    return Spec(Weight("prefix", token_clamp=TOKEN_CLAMP, reduce=weighed), criteria, rejected="zero")


def _around_one(reduce: WeightReduce, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float) -> Spec:
    return _clipped(reduce, reduce, (1.0 - clip_ratio_low, 1.0 + clip_ratio_high, clip_ratio_c), None)


def _growing(reduce: WeightReduce, la_clip_low: float, la_clip_high: float, la_clip_c: float) -> Spec:
    # A mean within b / sqrt(t) is a sum within b sqrt(t).
    return _clipped(reduce, "sum", (math.exp(-la_clip_low), math.exp(la_clip_high), math.exp(la_clip_c)), "sqrt")


@preset_of(MATCHES)
def cumprod(clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0) -> Spec:
    """Weight of a token: the product of the ratios up to it; 0 where PPO's dual clip of that has no gradient."""
    return _around_one("sum", clip_ratio_low, clip_ratio_high, clip_ratio_c)


@preset_of(MATCHES)
def geomean(clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0) -> Spec:
    """Weight of a token: the geometric mean of the ratios up to it; 0 where PPO's dual clip of that has no gradient."""
    return _around_one("mean", clip_ratio_low, clip_ratio_high, clip_ratio_c)


@preset_of(MATCHES)
def cumprod_la(la_clip_low: float = 0.025, la_clip_high: float = 0.05, la_clip_c: float = 0.05) -> Spec:
    """The product, clipped in log space at sqrt(t) times the bounds (clip_ratio_la_power 0.5)."""
    return _growing("sum", la_clip_low, la_clip_high, la_clip_c)


@preset_of(MATCHES)
def geomean_la(la_clip_low: float = 0.025, la_clip_high: float = 0.05, la_clip_c: float = 0.05) -> Spec:
    """The geometric mean, clipped in log space at the bounds over sqrt(t) (clip_ratio_la_power -0.5)."""
    return _growing("mean", la_clip_low, la_clip_high, la_clip_c)


NOTE = "its old_log_prob is rollout_logp; where it clips, its loss has a value and no gradient, here neither"

RECIPES = of_presets("ctpo", Score(), BYPASS, NOTE)

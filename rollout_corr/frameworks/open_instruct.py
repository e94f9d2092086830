"""open-instruct: `use_rho_correction` with its clamp and its mask, which are independent.

The mask is tested on the ratio before the clamp. It has no default bounds (0 is off), so the presets with a
mask take those of its tests. D is clamped to +-10 per token. Rejection zeroes the weight.
"""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BOTH, GLOBAL, Named, clip, of_presets
from rollout_corr.spec.correction import Criterion, Level, Spec, Weight

TOKEN_CLAMP = 10.0


def _spec(level: Level, clamp_upper: float | None, criteria: tuple[Criterion, ...]) -> Spec:
    weight = Weight(level, upper=clamp_upper, token_clamp=TOKEN_CLAMP)
    return Spec(weight=weight, criteria=criteria, rejected="zero" if criteria else "mask")


@preset_of("open-instruct e6c3044 (2026-08-20)")
def default(clamp_upper: float | None = 2.0) -> Spec:
    """w = min(exp(D), clamp_upper)."""
    return _spec("token", clamp_upper, ())


@preset_of("open-instruct e6c3044 (2026-08-20)")
def icepop(mask_lower: float | None = 0.5, mask_upper: float | None = 2.0, clamp_upper: float | None = 2.0) -> Spec:
    """w = min(exp(D), clamp_upper), and 0 for a token outside [mask_lower, mask_upper]."""
    criterion = Criterion("ratio", lower=mask_lower, upper=mask_upper, token_clamp=TOKEN_CLAMP)
    return _spec("token", clamp_upper, (criterion,))


@preset_of("open-instruct e6c3044 (2026-08-20)")
def seq(mask_lower: float | None = 0.5, mask_upper: float | None = 2.0, clamp_upper: float | None = 2.0) -> Spec:
    """w = min(exp(mean D), clamp_upper), and 0 for a sequence whose exp(mean D) is outside the mask bounds."""
    criterion = Criterion(
        "ratio", over="sequence", reduce="mean", lower=mask_lower, upper=mask_upper, token_clamp=TOKEN_CLAMP
    )
    return _spec("geometric", clamp_upper, (criterion,))


@preset_of("open-instruct e6c3044 (2026-08-20)")
def vaco(mask_upper: float | None = 2.0, mask_lower: float | None = None, clamp_upper: float | None = 2.0) -> Spec:
    """w = min(exp(D), clamp_upper), and 0 for outward tokens of a sequence whose mean abs(exp(D) - 1) is outside."""
    criterion = Criterion(
        "ratio_deviation",
        over="sequence",
        reduce="mean",
        lower=mask_lower,
        upper=mask_upper,
        when="outward",
        drop="token",
        token_clamp=TOKEN_CLAMP,
    )
    return _spec("token", clamp_upper, (criterion,))


RECIPES = of_presets("open_instruct", Named(clip, clip_lower=0.2, clip_higher=0.272), BOTH, GLOBAL)

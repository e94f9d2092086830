"""open-instruct: `use_rho_correction` with its clamp and its mask, which are independent.

The mask is tested on the ratio before the clamp. It has no default bounds (0 is off), so the presets with a
mask take those of its tests. D is clamped to +-10 per token. Rejection zeroes the weight.
"""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import (
    BOTH,
    DECOUPLED,
    GLOBAL,
    WITH_REFERENCE,
    Named,
    clip,
    of_presets,
    recipe,
)
from rollout_corr.frameworks.shared.specs import LEVELS
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.surrogate import RatioOf
from rollout_corr.specs.surrogates import Score
from rollout_corr.specs.terms import KL, KLKind
from rollout_corr.specs.validate import number

TOKEN_CLAMP = 10.0


def corrected(
    level: str, clamp_upper: float | None, criteria: tuple[Criterion, ...], clamp_lower: float | None = None
) -> Spec:
    """Return the Spec of a weight of a level, clamped, and of what masks."""
    weight = Weight(*LEVELS[level], lower=clamp_lower, upper=clamp_upper, token_clamp=TOKEN_CLAMP)
    return Spec(weight=weight, criteria=criteria, rejected="zero" if criteria else "mask")


def by_token(lower: float | None, upper: float | None) -> Criterion:
    """Test each ratio."""
    return Criterion("ratio", lower=lower, upper=upper, token_clamp=TOKEN_CLAMP)


def by_sequence(lower: float | None, upper: float | None) -> Criterion:
    """Test the geometric mean of a sequence's ratios."""
    return Criterion("ratio", over="sequence", reduce="mean", lower=lower, upper=upper, token_clamp=TOKEN_CLAMP)


def by_divergence(lower: float | None, upper: float | None) -> Criterion:
    """Test a sequence's mean abs(ratio - 1), and drop its outward tokens."""
    return Criterion(
        "ratio_deviation",
        over="sequence",
        reduce="mean",
        lower=lower,
        upper=upper,
        when="outward",
        drop="token",
        token_clamp=TOKEN_CLAMP,
    )


@preset_of("open-instruct e6c3044 (2026-08-20)")
def default(clamp_upper: float | None = 2.0) -> Spec:
    """w = min(exp(D), clamp_upper)."""
    return corrected("token", clamp_upper, ())


@preset_of("open-instruct e6c3044 (2026-08-20)")
def icepop(mask_lower: float | None = 0.5, mask_upper: float | None = 2.0, clamp_upper: float | None = 2.0) -> Spec:
    """w = min(exp(D), clamp_upper), and 0 for a token outside [mask_lower, mask_upper]."""
    return corrected("token", clamp_upper, (by_token(mask_lower, mask_upper),))


@preset_of("open-instruct e6c3044 (2026-08-20)")
def seq(mask_lower: float | None = 0.5, mask_upper: float | None = 2.0, clamp_upper: float | None = 2.0) -> Spec:
    """w = min(exp(mean D), clamp_upper), and 0 for a sequence whose exp(mean D) is outside the mask bounds."""
    return corrected("geometric", clamp_upper, (by_sequence(mask_lower, mask_upper),))


@preset_of("open-instruct e6c3044 (2026-08-20)")
def vaco(mask_upper: float | None = 2.0, mask_lower: float | None = None, clamp_upper: float | None = 2.0) -> Spec:
    """w = min(exp(D), clamp_upper), and 0 for outward tokens of a sequence whose mean abs(exp(D) - 1) is outside."""
    return corrected("token", clamp_upper, (by_divergence(mask_lower, mask_upper),))


# By kl_estimator: 3 is k1 times the differentiable ratio.
KL_KINDS: tuple[KLKind, ...] = ("k1", "k2", "k3", "k1")


def kl(beta: float, kl_estimator: int) -> KL | None:
    """Return the KL term, which open-instruct clamps where k is +-40."""
    if kl_estimator not in range(len(KL_KINDS)):
        raise ValueError(f"kl_estimator: expected 0, 1, 2 or 3, got {kl_estimator!r}")
    if number("beta", beta) == 0.0:
        return None
    return KL(KL_KINDS[kl_estimator], beta, log_clamp=40.0, weight="ratio" if kl_estimator == 3 else None)


def cispo(clip_higher: float, of: RatioOf | None = None) -> Score:
    """Return the score function weighted by the ratio, at most 1 + clip_higher."""
    return Score(upper=1.0 + number("clip_higher", clip_higher), of=of)


_CLIP, _KL = Named(clip, clip_lower=0.2, clip_higher=0.272), Named(kl, beta=0.0, kl_estimator=2)

RECIPES = of_presets("open_instruct", _CLIP, BOTH, GLOBAL, kl=_KL) | {
    "ppo": recipe(_CLIP, DECOUPLED, f"loss_fn dapo without use_rho_correction; {GLOBAL}", kl=_KL),
    "grpo": recipe(
        _CLIP,
        WITH_REFERENCE,
        f"loss_fn dapo without use_rho_correction, with the KL of GRPOExperimentConfig; {GLOBAL}",
        kl=Named(kl, beta=0.05, kl_estimator=2),
    ),
    "cispo": recipe(Named(cispo, clip_higher=0.272), BOTH, GLOBAL, spec="open_instruct.default", kl=_KL),
}

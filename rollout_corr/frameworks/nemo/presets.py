"""NeMo RL: `truncated_importance_sampling_type` of ClippedPGLossFn, and `grpo.seq_logprob_error_threshold`.

NeMo's weight is 0 at a token with non-finite log-probs, and only there; here its whole sequence is rejected.
"""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import (
    BOTH,
    DECOUPLED,
    GLOBAL,
    SEQUENCES,
    TOKENS,
    WITH_REFERENCE,
    Named,
    around_one,
    clip,
    of_presets,
    recipe,
)
from rollout_corr.frameworks.shared.settings import boolean
from rollout_corr.frameworks.shared.specs import LEVELS, gated
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.surrogate import Surrogate
from rollout_corr.specs.surrogates import GSPO
from rollout_corr.specs.terms import KL, Mean
from rollout_corr.specs.validate import LARGEST_CLAMP, number, one_of

# Without a clamp of its own NeMo's KL has the widest that there is.
WIDEST = LARGEST_CLAMP


@preset_of("NeMo RL 7ea279a (2026-08-22)")
def tis(ratio: float | None = 2.0, ratio_min: float | None = None) -> Spec:
    """w = exp(D) clamped to [ratio_min, ratio]."""
    return Spec(weight=Weight.token(lower=ratio_min, upper=ratio))


@preset_of("NeMo RL 7ea279a (2026-08-22)")
def icepop(ratio_min: float | None = 0.5, ratio: float | None = 5.0) -> Spec:
    """w = exp(D) inside [ratio_min, ratio], else 0."""
    return gated(Criterion("ratio", lower=ratio_min, upper=ratio))


@preset_of("NeMo RL 7ea279a (2026-08-22)")
def seq_mask_tis(ratio_min: float | None = 0.999, ratio: float | None = 1.002) -> Spec:
    """w = exp(D), and 0 for a sequence whose exp(mean D) is outside [ratio_min, ratio]."""
    return geometric_gate(ratio_min, ratio)


def geometric_gate(ratio_min: float | None, ratio: float | None) -> Spec:
    """Weigh tokens by their ratio, and sequences whose geometric mean lies outside by 0."""
    return gated(Criterion("ratio", over="sequence", reduce="mean", lower=ratio_min, upper=ratio))


@preset_of("NeMo RL 7ea279a (2026-08-22)")
def gspo_is(level: str = "sequence") -> Spec:
    """w = exp(sum D), the weight of `sequence_level_importance_ratios`; level "geometric": exp(mean D) (NeMo#2269)."""
    return Spec(weight=Weight(*LEVELS[one_of("level", level, LEVELS)]))


@preset_of("NeMo RL 7ea279a (2026-08-22)")
def mult_err(threshold: float = 2.0) -> Spec:
    """No weight; mask a sequence whose mean exp(abs D) is above threshold."""
    return Spec(criteria=(Criterion("ratio_error", over="sequence", reduce="mean", upper=threshold),), rejected="mask")


def clipped(low: float, high: float, dual: float | None) -> Surrogate:
    """Return PPO's clip."""
    return clip(low, high, dual)


def level_mean(token_level_loss: bool) -> Mean:
    """Return the mean of `token_level_loss`."""
    return TOKENS if boolean("token_level_loss", token_level_loss) else SEQUENCES


def kl(coefficient: float, log_clamp: float | None = 20.0, value_clamp: float | None = 10.0) -> KL | None:
    """Return NeMo's k3: it is multiplied by a 1 that has the gradient of the log-prob, which makes that of k2."""
    if number("reference_policy_kl_penalty", coefficient) == 0.0:
        return None
    return KL("k3", coefficient, "k2", WIDEST if log_clamp is None else log_clamp, value_clamp)


_CLIP = Named(clipped, ratio_clip_min=0.2, ratio_clip_max=0.2, ratio_clip_c=None)
_LEVEL = Named(level_mean, token_level_loss=True)
_KL = Named(kl, reference_policy_kl_penalty=0.0)

RECIPES = of_presets("nemo", _CLIP, BOTH, GLOBAL, mean=_LEVEL, kl=_KL) | {
    "ppo": recipe(_CLIP, DECOUPLED, f"without correction; {GLOBAL}", mean=_LEVEL, kl=_KL),
    "grpo": recipe(
        _CLIP,
        WITH_REFERENCE,
        f"without correction, with the KL of ClippedPGLossConfig; {GLOBAL}",
        mean=_LEVEL,
        kl=Named(kl, reference_policy_kl_penalty=0.01),
    ),
    "cispo": recipe(Named(around_one, ratio_clip_min=0.2, ratio_clip_max=0.2), DECOUPLED, GLOBAL, kl=_KL),
    # NeMo refuses sequence_level_importance_ratios beside token_level_loss.
    "gspo_is": recipe(
        Named(GSPO, ratio_clip_min=0.2, ratio_clip_max=0.2, ratio_clip_c=None),
        BOTH,
        "pass the sequences of all ranks as the total",
        spec="nemo.gspo_is",
        mean=SEQUENCES,
        kl=_KL,
    ),
    "mult_err": recipe(
        _CLIP,
        BOTH,
        "samples are masked before they are counted",
        spec="nemo.mult_err",
        mean=_LEVEL,
        over="kept",
        kl=_KL,
    ),
}

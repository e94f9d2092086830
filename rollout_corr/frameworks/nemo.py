"""NeMo RL: `truncated_importance_sampling_type` of ClippedPGLossFn, and `grpo.seq_logprob_error_threshold`.

NeMo's weight is 0 at a token with non-finite log-probs, and only there; here its whole sequence is rejected.
"""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BOTH, GLOBAL, SEQUENCES, Named, clip, of_presets, recipe
from rollout_corr.frameworks.shared.specs import gated
from rollout_corr.spec.correction import Criterion, Spec, Weight
from rollout_corr.spec.surrogates import GSPO


@preset_of("NeMo RL 7ea279a (2026-08-22)")
def tis(ratio: float | None = 2.0, ratio_min: float | None = None) -> Spec:
    """w = exp(D) clamped to [ratio_min, ratio]."""
    return Spec(weight=Weight("token", lower=ratio_min, upper=ratio))


@preset_of("NeMo RL 7ea279a (2026-08-22)")
def icepop(ratio_min: float | None = 0.5, ratio: float | None = 5.0) -> Spec:
    """w = exp(D) inside [ratio_min, ratio], else 0."""
    return gated(Criterion("ratio", lower=ratio_min, upper=ratio))


@preset_of("NeMo RL 7ea279a (2026-08-22)")
def seq_mask_tis(ratio_min: float | None = 0.999, ratio: float | None = 1.002) -> Spec:
    """w = exp(D), and 0 for a sequence whose exp(mean D) is outside [ratio_min, ratio]."""
    return gated(Criterion("ratio", over="sequence", reduce="mean", lower=ratio_min, upper=ratio))


@preset_of("NeMo RL 7ea279a (2026-08-22)")
def gspo_is() -> Spec:
    """w = exp(sum D), the weight of `sequence_level_importance_ratios`."""
    return Spec(weight=Weight("product"))


@preset_of("NeMo RL 7ea279a (2026-08-22)")
def mult_err(threshold: float = 2.0) -> Spec:
    """No weight; mask a sequence whose mean exp(abs D) is above threshold."""
    return Spec(criteria=(Criterion("ratio_error", over="sequence", reduce="mean", upper=threshold),), rejected="mask")


_CLIP = Named(clip, ratio_clip_min=0.2, ratio_clip_max=0.2, ratio_clip_c=None)

RECIPES = of_presets("nemo", _CLIP, BOTH, GLOBAL) | {
    # NeMo refuses sequence_level_importance_ratios beside token_level_loss.
    "gspo_is": recipe(
        Named(GSPO, ratio_clip_min=0.2, ratio_clip_max=0.2),
        BOTH,
        "pass the sequences of all ranks as the denominator",
        spec="nemo.gspo_is",
        reduction=SEQUENCES,
    ),
    "mult_err": recipe(
        _CLIP, BOTH, "samples are masked before they are counted", spec="nemo.mult_err", denominator="kept"
    ),
}

"""NeMo RL's recipes: `truncated_importance_sampling_type` of ClippedPGLoss, and `grpo.seq_logprob_error_threshold`.

NeMo's weight is 0 at a token with non-finite log-probs, and only there; here its whole sequence is rejected.
"""

from __future__ import annotations

from rollout_corr.frameworks.registry import recipe
from rollout_corr.spec.correction import Criterion, Spec, Weight


def _gated(criterion: Criterion) -> Spec:
    return Spec(weight=Weight("token"), criteria=(criterion,), rejected="zero")


@recipe("NeMo RL 7ea279a (2026-08-22)")
def tis(ratio: float | None = 2.0, ratio_min: float | None = None) -> Spec:
    """w = exp(D) clamped to [ratio_min, ratio]."""
    return Spec(weight=Weight("token", lower=ratio_min, upper=ratio))


@recipe("NeMo RL 7ea279a (2026-08-22)")
def icepop(ratio_min: float | None = 0.5, ratio: float | None = 5.0) -> Spec:
    """w = exp(D) inside [ratio_min, ratio], else 0."""
    return _gated(Criterion("ratio", lower=ratio_min, upper=ratio))


@recipe("NeMo RL 7ea279a (2026-08-22)")
def seq_mask_tis(ratio_min: float | None = 0.999, ratio: float | None = 1.002) -> Spec:
    """w = exp(D), and 0 for a sequence whose exp(mean D) is outside [ratio_min, ratio]."""
    return _gated(Criterion("ratio", over="sequence", reduce="mean", lower=ratio_min, upper=ratio))


@recipe("NeMo RL 7ea279a (2026-08-22)")
def gspo_is() -> Spec:
    """w = exp(sum D), the weight of `sequence_level_importance_ratios`."""
    return Spec(weight=Weight("product"))


@recipe("NeMo RL 7ea279a (2026-08-22)")
def mult_err(threshold: float = 2.0) -> Spec:
    """No weight; mask a sequence whose mean exp(abs D) is above threshold."""
    return Spec(criteria=(Criterion("ratio_error", over="sequence", reduce="mean", upper=threshold),), rejected="mask")

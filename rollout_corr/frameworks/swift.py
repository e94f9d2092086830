"""ms-swift's recipes: `rollout_importance_sampling_mode` with its threshold.

swift's "sequence" is the geometric mean. D is clamped to +-20 per token. swift's weight also multiplies the KL term.
Rejection zeroes the weight.
"""

from __future__ import annotations

from rollout_corr.frameworks.off_policy import off_policy
from rollout_corr.frameworks.registry import recipe
from rollout_corr.spec.correction import Criterion, Reduce, Spec, Unit, Weight

TOKEN_CLAMP = 20.0


def _masked(over: Unit, reduce: Reduce | None, threshold: float) -> Spec:
    criterion = Criterion("ratio", over=over, reduce=reduce, upper=threshold, token_clamp=TOKEN_CLAMP)
    return Spec(weight=Weight("token", token_clamp=TOKEN_CLAMP), criteria=(criterion,), rejected="zero")


@recipe("ms-swift 3602360 (2026-08-22)")
def token_truncate(threshold: float = 2.0) -> Spec:
    """w = min(exp(D), threshold)."""
    return Spec(weight=Weight("token", upper=threshold, token_clamp=TOKEN_CLAMP))


@recipe("ms-swift 3602360 (2026-08-22)")
def token_mask(threshold: float = 2.0) -> Spec:
    """w = exp(D) up to threshold, else 0."""
    return _masked("token", None, threshold)


@recipe("ms-swift 3602360 (2026-08-22)")
def sequence_truncate(threshold: float = 2.0) -> Spec:
    """w = min(exp(mean D), threshold)."""
    return Spec(weight=Weight("geometric", upper=threshold, token_clamp=TOKEN_CLAMP))


@recipe("ms-swift 3602360 (2026-08-22)")
def sequence_mask(threshold: float = 2.0) -> Spec:
    """w = exp(D), and 0 for a sequence whose exp(mean D) is above threshold."""
    return _masked("sequence", "mean", threshold)


@recipe("ms-swift 3602360 (2026-08-22)")
def opsm(delta: float = 0.1, threshold: float = 2.0) -> Spec:
    """token_truncate, and a sequence with A < 0 whose mean(rollout - new) exceeds delta leaves the mask.

    `off_policy_sequence_mask_delta` has no default in ms-swift; 0.1 is Trinity's. For `policy_loss`.
    """
    criterion = off_policy(delta, token_clamp=TOKEN_CLAMP)
    return Spec(weight=Weight("token", upper=threshold, token_clamp=TOKEN_CLAMP), criteria=(criterion,))

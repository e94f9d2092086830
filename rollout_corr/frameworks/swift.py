"""ms-swift: `rollout_importance_sampling_mode` with its threshold.

swift's "sequence" is the geometric mean. D is clamped to +-20 per token. swift's weight also multiplies the KL term.
Rejection zeroes the weight.
"""

from __future__ import annotations

from typing import Any

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BOTH, SEQUENCES, Named, of_presets, penalty
from rollout_corr.frameworks.shared.specs import off_policy
from rollout_corr.spec.correction import Criterion, Reduce, Spec, Unit, Weight
from rollout_corr.spec.surrogates import PPO

TOKEN_CLAMP = 20.0


def _masked(over: Unit, reduce: Reduce | None, threshold: float) -> Spec:
    criterion = Criterion("ratio", over=over, reduce=reduce, upper=threshold, token_clamp=TOKEN_CLAMP)
    return Spec(weight=Weight("token", token_clamp=TOKEN_CLAMP), criteria=(criterion,), rejected="zero")


@preset_of("ms-swift 3602360 (2026-08-22)")
def token_truncate(threshold: float = 2.0) -> Spec:
    """w = min(exp(D), threshold)."""
    return Spec(weight=Weight("token", upper=threshold, token_clamp=TOKEN_CLAMP))


@preset_of("ms-swift 3602360 (2026-08-22)")
def token_mask(threshold: float = 2.0) -> Spec:
    """w = exp(D) up to threshold, else 0."""
    return _masked("token", None, threshold)


@preset_of("ms-swift 3602360 (2026-08-22)")
def sequence_truncate(threshold: float = 2.0) -> Spec:
    """w = min(exp(mean D), threshold)."""
    return Spec(weight=Weight("geometric", upper=threshold, token_clamp=TOKEN_CLAMP))


@preset_of("ms-swift 3602360 (2026-08-22)")
def sequence_mask(threshold: float = 2.0) -> Spec:
    """w = exp(D), and 0 for a sequence whose exp(mean D) is above threshold."""
    return _masked("sequence", "mean", threshold)


@preset_of("ms-swift 3602360 (2026-08-22)")
def opsm(delta: float = 0.1, threshold: float = 2.0) -> Spec:
    """token_truncate, and a sequence with A < 0 whose mean(rollout - new) exceeds delta leaves the mask.

    `off_policy_sequence_mask_delta` has no default in ms-swift; 0.1 is Trinity's. For `policy_loss`.
    """
    criterion = off_policy(delta, token_clamp=TOKEN_CLAMP)
    return Spec(weight=Weight("token", upper=threshold, token_clamp=TOKEN_CLAMP), criteria=(criterion,))


_LOSS: dict[str, Any] = {
    "surrogate": Named(lambda epsilon: PPO(epsilon, epsilon), epsilon=0.2),
    "needs": BOTH,
    "note": "weights multiply the KL term too",
    "reduction": SEQUENCES,
    "denominator": "rows",
    "kl": penalty(weight="weights", beta=0.0),
}

RECIPES = of_presets("swift", **_LOSS)

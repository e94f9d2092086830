"""prime-rl, for `policy_loss`: masks of the ratio of the policy that trains to the one that sampled; no weight.

Its loss is REINFORCE with a differentiable ratio. Rejected tokens are counted by its mean and, by `kl_tau`, anchored;
only its IcePop has no `kl_tau`. On 2026-08-27 (#3418) DPPO, the default until then, was removed, IPO became the
default, and `ipo_threshold` became `eps`.
"""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BYPASS, GLOBAL, Named, anchor, of_presets, recipe
from rollout_corr.specs.correction import Criterion, Spec
from rollout_corr.specs.surrogates import Reinforce
from rollout_corr.specs.validate import positive


def _spec(criterion: Criterion) -> Spec:
    return Spec(criteria=(criterion,), rejected="zero")


@preset_of("prime-rl 559b447 (2026-08-21), gone since #3418")
def dppo(dppo_mask_low: float = 0.2, dppo_mask_high: float = 0.2) -> Spec:
    """0 for a token whose probability has moved with its advantage by more than dppo_mask_high, up, or _low, down."""
    low = positive("dppo_mask_low", dppo_mask_low, finite=False)
    high = positive("dppo_mask_high", dppo_mask_high, finite=False)
    return _spec(Criterion("prob_diff", lower=-low, upper=high, when="outward", of="new/rollout", label="dppo"))


@preset_of("prime-rl #3418 (2026-08-27)")
def ipo(eps: float = 0.1) -> Spec:
    """0 for a token whose probability has moved by more than eps."""
    return _spec(Criterion("tv", upper=eps, of="new/rollout", label="ipo"))


@preset_of("prime-rl #3526 (2026-09)")
def icepop(ratio_low: float = 0.2, ratio_high: float = 5.0) -> Spec:
    """0 for a token whose ratio new/rollout is outside [ratio_low, ratio_high]."""
    return _spec(Criterion("ratio", lower=ratio_low, upper=ratio_high, of="new/rollout", label="icepop"))


@preset_of("prime-rl #3283 (open)")
def kpop(kpop_threshold: float = 0.1) -> Spec:
    """0 for a token whose binary KL between new and rollout exceeds kpop_threshold in either direction (KPop)."""
    criterion = Criterion("binary_kl_symmetric", upper=kpop_threshold, of="new/rollout", label="kpop", eps=1e-6)
    return _spec(criterion)


@preset_of("prime-rl 559b447 (2026-08-21)")
def ref_kl(threshold: float = 0.2) -> Spec:
    """0 for a token whose probability has fallen by more than threshold (its distillation loss)."""
    lower = -positive("threshold", threshold, finite=False)
    return _spec(Criterion("prob_diff", lower=lower, of="new/rollout", label="ref_kl"))


# The factor of the advantages, which leaves the anchor as it is.
_SURROGATE = Named(lambda tau: Reinforce(coef=positive("adv_tau", tau)), adv_tau=1.0)
_NOTE = f"its token weights are scale; {GLOBAL}"

RECIPES = of_presets("prime_rl", _SURROGATE, BYPASS, _NOTE, regularizer=anchor("all", kl_tau=1e-3)) | {
    "icepop": recipe(_SURROGATE, BYPASS, _NOTE, spec="prime_rl.icepop"),
    "ref_kl": recipe(
        Reinforce(),
        BYPASS,
        "the advantages are ref_logp - new_logp, detached",
        spec="prime_rl.ref_kl",
        regularizer=anchor("all", kl_tau=1e-3),
    ),
}

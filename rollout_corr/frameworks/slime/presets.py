"""slime and miles: `--use-tis` with the built-in functions, and its example `train_infer_mismatch_helper` (MIS).

MIS edits the mask and leaves the weights. slime divides a sample's sum by its original tokens, and the sum of the
samples by their number, those without a token too.
"""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BOTH, DECOUPLED, ROWS, Named, clip, of_presets, penalty, recipe
from rollout_corr.frameworks.shared.specs import gated, off_policy
from rollout_corr.specs.correction import Criterion, Spec, Weight


@preset_of("slime 624b824 (2026-08-21)")
def tis(tis_clip: float | None = 2.0, tis_clip_low: float | None = 0.0) -> Spec:
    """w = exp(D) clamped to [tis_clip_low, tis_clip]."""
    return Spec(weight=Weight.token(lower=tis_clip_low, upper=tis_clip))


@preset_of("slime 624b824 (2026-08-21)")
def icepop(tis_clip: float | None = 2.0, tis_clip_low: float | None = 0.0) -> Spec:
    """w = exp(D) inside [tis_clip_low, tis_clip], else 0."""
    return gated(Criterion("ratio", lower=tis_clip_low, upper=tis_clip))


def _veto(threshold: float | None) -> tuple[Criterion, ...]:
    return () if threshold is None else (Criterion("ratio", lower=threshold, drop="sequence", label="veto"),)


@preset_of("slime 624b824 (2026-08-21)")
def mis(
    tis_upper_bound: float = 2.0,
    rs_lower_bound: float = 0.5,
    rs_upper_bound: float = 2.0,
    rs_veto_threshold: float | None = 1e-4,
    tis_batch_normalize: bool = True,
) -> Spec:
    """mis.yaml: token TIS divided by the batch mean; tokens outside the rs bounds masked; a token below 1e-4 vetoes."""
    weight = Weight.token(lower=0.0, upper=tis_upper_bound, normalize="batch" if tis_batch_normalize else None)
    rejection = Criterion("ratio", lower=rs_lower_bound, upper=rs_upper_bound)
    return Spec(weight=weight, criteria=(rejection, *_veto(rs_veto_threshold)), rejected="mask")


@preset_of("slime 624b824 (2026-08-21)")
def mis_geo(
    tis_upper_bound: float = 2.0,
    rs_lower_bound: float = 0.9999,
    rs_upper_bound: float = 1.0001,
    rs_veto_threshold: float | None = 1e-4,
) -> Spec:
    """MIS with rs_level "geometric": token TIS; a sequence whose exp(mean D) is outside the rs bounds masked; veto."""
    weight = Weight.token(lower=0.0, upper=tis_upper_bound)
    rejection = Criterion("ratio", over="sequence", reduce="mean", lower=rs_lower_bound, upper=rs_upper_bound)
    return Spec(weight=weight, criteria=(rejection, *_veto(rs_veto_threshold)), rejected="mask")


@preset_of("slime 624b824 (2026-08-21)")
def opsm(delta: float = 1e-4) -> Spec:
    """0 for the tokens with A < 0 of a sequence whose mean(old - new) exceeds delta (`--use-opsm`).

    For `policy_loss`.
    """
    criterion = off_policy(delta, of="new/old", drop="token", label="opsm")
    return Spec(criteria=(criterion,), rejected="zero")


_CLIP = Named(clip, eps_clip=0.2, eps_clip_high=None, eps_clip_c=None)
RECIPES = of_presets("slime", _CLIP, BOTH, mean=ROWS) | {
    "ppo": recipe(_CLIP, DECOUPLED, "without use_tis", mean=ROWS),
    "grpo": recipe(
        _CLIP,
        DECOUPLED,
        "without use_tis; a kl_loss_coef is that of kl_loss_type low_var_kl",
        kl=penalty(value_clamp=10.0, kl_loss_coef=0.0),
        mean=ROWS,
    ),
}

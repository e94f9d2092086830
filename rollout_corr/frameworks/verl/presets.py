"""verl: the corrections of `RolloutCorrectionConfig`, by the names of its classmethods, and its policy losses.

Every preset edits the mask where it rejects, and asks for verl's own metrics. A preset of bypass mode is given the
current policy, detached, as `train_logp`. In bypass mode PPO does not multiply by the weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from rollout_corr.frameworks.shared import lookup
from rollout_corr.frameworks.shared.preset import preset_of, registered
from rollout_corr.frameworks.shared.recipe import (
    BOTH,
    BYPASS,
    DECOUPLED,
    NO_LOWER_CLAMP,
    ROWS,
    SEQUENCES,
    WITH_REFERENCE,
    Named,
    Recipe,
    RecipeEntry,
    around_one,
    mean,
    penalty,
    recipe,
)
from rollout_corr.frameworks.verl import options
from rollout_corr.frameworks.verl.options import Threshold
from rollout_corr.specs.choices import Scheme
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.loss import Loss
from rollout_corr.specs.score_losses import Divergence
from rollout_corr.specs.surrogate import Surrogate
from rollout_corr.specs.surrogates import DPPO, DRO, GMPO, GPG, GSPO, PPO, SAPO, ClipCov, KLCov, Score
from rollout_corr.specs.terms import KL

REPORT: tuple[Scheme, ...] = ("native", "verl")

Criteria = tuple[Criterion, ...]


def spec(weight: Weight | None = None, criteria: Criteria = ()) -> Spec:
    """Return a Spec that edits the mask and reports verl's metrics."""
    return Spec(weight=weight, criteria=criteria, rejected="mask", report=REPORT)


# --- parts: a preset is a weight, a rejection or both, and has the arguments and the docstrings of its parts ---


def _token(upper: Threshold = 2.0) -> Weight:
    """Token TIS: w = min(exp(D), upper)."""
    return options.weight("token", upper, key="upper")


def _sequence(upper: Threshold = 2.0) -> Weight:
    """Sequence TIS: w = min(exp(sum D), upper)."""
    return options.weight("sequence", upper, key="upper")


def _icepop(upper: float = 5.0, lower: float = 0.5) -> Weight:
    """Token IcePop: w = exp(D) inside [lower, upper], else 0."""
    return options.weight("token", (options.number("lower", lower), options.number("upper", upper)), key="upper")


def _token_is(is_threshold: Threshold = 2.0) -> Weight:
    """Token TIS: w = min(exp(D), is_threshold)."""
    return options.weight("token", is_threshold, key="is_threshold")


def _sequence_is(is_threshold: Threshold = 2.0) -> Weight:
    """Sequence TIS: w = min(exp(sum D), is_threshold)."""
    return options.weight("sequence", is_threshold, key="is_threshold")


def _sum_k1(rs_threshold: Threshold = "0.5_2.0", k1_bounds: str = "verl") -> Criteria:
    """Keep a sequence iff its sum of -D lies within log of the bounds (seq_sum_k1)."""
    return options.criteria("seq_sum_k1", rs_threshold, k1_bounds, key="rs_threshold")


def _mean_k1(rs_threshold: Threshold = "0.999_1.001", k1_bounds: str = "verl") -> Criteria:
    """Keep a sequence iff its mean of -D lies within log of the bounds (seq_mean_k1)."""
    return options.criteria("seq_mean_k1", rs_threshold, k1_bounds, key="rs_threshold")


def _mean_k3(rs_threshold: Threshold = 0.01) -> Criteria:
    """Keep a sequence iff its mean of exp(D) - 1 - D is at most rs_threshold (seq_mean_k3)."""
    return options.criteria("seq_mean_k3", rs_threshold, key="rs_threshold")


BYPASSES = {"bypass_ppo_clip": "Bypass mode with PPO.", "bypass_pg": "Bypass mode with REINFORCE."}


def _preset(
    name: str,
    weight: Callable[..., Weight] | None = None,
    rejection: Callable[..., Criteria] | None = None,
) -> Callable[..., Spec]:
    """Register a preset that has the arguments of its parts."""
    parts = [part for part in (weight, rejection) if part is not None]
    parameters = chain.from_iterable(inspect.signature(part).parameters.values() for part in parts)
    signature = inspect.Signature([*parameters], return_annotation="Spec")

    def build(*args: Any, **kwargs: Any) -> Spec:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()

        def made(part: Callable[..., Any]) -> Any:
            return part(**{name: bound.arguments[name] for name in inspect.signature(part).parameters})

        return spec(None if weight is None else made(weight), () if rejection is None else made(rejection))

    does = [text for start, text in BYPASSES.items() if name.startswith(start)]
    if weight is None:
        does.append("No weight." if rejection else "Metrics only.")
    build.__name__ = build.__qualname__ = name
    build.__doc__ = " ".join([*does, *(part.__doc__ or "" for part in parts)])
    build.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect.signature
    return preset_of("verl 0.9.1")(build)


# --- the presets ---

decoupled_token_is = _preset("decoupled_token_is", _token)
decoupled_seq_is = _preset("decoupled_seq_is", _sequence)
decoupled_token_icepop = _preset("decoupled_token_icepop", _icepop)
decoupled_seq_is_rs = _preset("decoupled_seq_is_rs", _sequence_is, _sum_k1)
decoupled_geo_rs = _preset("decoupled_geo_rs", None, _mean_k1)
decoupled_geo_rs_seq_tis = _preset("decoupled_geo_rs_seq_tis", _sequence_is, _mean_k1)
decoupled_geo_rs_token_tis = _preset("decoupled_geo_rs_token_tis", _token_is, _mean_k1)
decoupled_k3_rs = _preset("decoupled_k3_rs", None, _mean_k3)
decoupled_k3_rs_seq_tis = _preset("decoupled_k3_rs_seq_tis", _sequence_is, _mean_k3)
decoupled_k3_rs_token_tis = _preset("decoupled_k3_rs_token_tis", _token_is, _mean_k3)
bypass_ppo_clip = _preset("bypass_ppo_clip")
bypass_ppo_clip_geo_rs = _preset("bypass_ppo_clip_geo_rs", None, _mean_k1)
bypass_ppo_clip_k3_rs = _preset("bypass_ppo_clip_k3_rs", None, _mean_k3)
bypass_pg_is = _preset("bypass_pg_is", _sequence)
bypass_pg_token_icepop = _preset("bypass_pg_token_icepop", _icepop)
bypass_pg_geo_rs = _preset("bypass_pg_geo_rs", None, _mean_k1)
bypass_pg_geo_rs_seq_tis = _preset("bypass_pg_geo_rs_seq_tis", _sequence_is, _mean_k1)
bypass_pg_geo_rs_token_tis = _preset("bypass_pg_geo_rs_token_tis", _token_is, _mean_k1)
disabled = _preset("disabled")

# --- the losses ---


def _loss(
    preset: str,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    kl_loss_coef: float = 0.0,
    **settings: Any,
) -> Recipe:
    """Return `loss_mode=vanilla`; for bypass with REINFORCE -w A log pi, and without a weight -A log pi."""
    correction = lookup.named(preset, **settings)
    surrogate: Surrogate = PPO(clip_ratio_low, clip_ratio_high, dual=clip_ratio_c)
    if preset.startswith("verl.bypass_pg"):
        surrogate = GPG() if correction.weight is None else Score()
    kl = KL("k3", kl_loss_coef, value_clamp=10.0) if kl_loss_coef else None
    return Recipe(correction, Loss(surrogate, kl=kl))


def _ppo(low: float, high: float, dual: float) -> PPO:
    return PPO(low, high, dual=dual)


def clip_cov(low: float, high: float, share: float, lower: float, upper: float) -> ClipCov:
    """Make verl's clip_cov from its settings."""
    return ClipCov(low, high, share=share, lower=lower, upper=upper)


def _vanilla(preset: str) -> RecipeEntry:
    note = "counts before rejection, as its engines do"
    if preset.startswith("verl.bypass"):
        return RecipeEntry(partial(_loss, preset), BYPASS, note)
    return RecipeEntry(partial(_loss, preset), BOTH, f'{note}; with trainer.use_v1=false after it: Mean(over="kept")')


def _dppo(divergence: Divergence) -> RecipeEntry:
    surrogate = Named(partial(DPPO, divergence), clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)
    return recipe(surrogate, DECOUPLED, "clip_ratio_c is ActorConfig's 3.0; the function's own 20.0 never gets there")


_CLIP = Named(_ppo, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)

RECIPES = {found.name.partition(".")[2]: _vanilla(found.name) for found in registered("verl")} | {
    "ppo": recipe(_CLIP, DECOUPLED, "loss_mode vanilla, without correction"),
    "grpo": recipe(
        _CLIP,
        WITH_REFERENCE,
        "loss_mode vanilla with use_kl_loss, as verl's examples of GRPO have it",
        mean=mean(loss_agg_mode="token-mean"),
        kl=penalty(kl_loss_coef=0.001, value_clamp=10.0),
    ),
    "dppo_tv": _dppo("tv"),
    "dppo_kl": _dppo("kl"),
    "cispo": recipe(Named(around_one, clip_ratio_low=0.2, clip_ratio_high=0.2), DECOUPLED),
    "gspo": recipe(
        Named(partial(GSPO, through="token", clamp=10.0), clip_ratio_low=0.2, clip_ratio_high=0.2),
        DECOUPLED,
        NO_LOWER_CLAMP,
        mean=SEQUENCES,
    ),
    "geo_mean": recipe(
        Named(GMPO, clip_ratio_low=0.2, clip_ratio_high=0.2),
        DECOUPLED,
        mean=ROWS,
    ),
    "sapo": recipe(Named(SAPO, tau_pos=1.0, tau_neg=1.05), DECOUPLED, mean=SEQUENCES),
    "gpg": recipe(GPG(), ()),
    "clip_cov": recipe(
        Named(
            clip_cov,
            clip_ratio_low=0.2,
            clip_ratio_high=0.2,
            clip_cov_ratio=0.0002,
            clip_cov_lb=1.0,
            clip_cov_ub=5.0,
        ),
        DECOUPLED,
        "draws by ClipCov.seed and sequence_ids, verl by torch.randperm; give every step another seed",
    ),
    "kl_cov": recipe(Named(KLCov, kl_cov_ratio=0.0002, ppo_kl_coef=0.1), DECOUPLED),
    "dro": recipe(Named(DRO, dro_beta=0.1), DECOUPLED, "dro_beta has no default in verl"),
}


# Below RECIPES, which has one for each preset above: this one goes with the versions of sequences, and with any loss.
@preset_of("verl 1dda039 (2026-08-22)")
def staleness(max_off_policy_threshold: int = 8) -> Spec:
    """Drop sequences whose prompt was sent max_off_policy_threshold or more steps ago (strategy "drop").

    `Versions.ids` are the steps of the prompts, `Versions.current` is global_steps.
    """
    return Spec(criteria=(Criterion("age", over="sequence", reduce="max", upper=max_off_policy_threshold - 1),))

"""open-instruct: `use_rho_correction` with its clamp and its mask, which are independent, and GRPOExperimentConfig.

The mask is tested on the ratio before the clamp. It has no default bounds (0 is off), so the presets with a
mask take those of its tests. D is clamped to +-10 per token. Rejection zeroes the weight.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from ..specs.correction import Criterion, Spec, Weight
from ..specs.loss import Loss
from ..specs.surrogate import RatioOf, Surrogate
from ..specs.surrogates import PPO, Score
from ..specs.terms import KL, KLKind, KLWeight
from ..specs.validate import not_negative, positive, wrong_value
from .shared.preset import HIGH, LEVELS, LOW, presets
from .shared.recipe import BOTH, DECOUPLED, GLOBAL, WITH_REFERENCE, Named, Recipe, clip, named_recipe, of_presets
from .shared.settings import Given, Setting, given_in, maybe, refused, word

TOKEN_CLAMP = 10.0


def _corrected(
    level: str, clamps: tuple[Any, Any], tests: str | None = None, mask: tuple[Any, Any] = (None, None)
) -> Spec:
    """A weight of a level, clamped, and what masks: a test of the "ratio" or of the "divergence", with its bounds."""
    bounds: dict[str, Any] = {"lower": mask[0], "upper": mask[1], "token_clamp": TOKEN_CLAMP}
    criteria: tuple[Criterion, ...] = ()
    if tests == "ratio":
        criteria = (Criterion("ratio", *LEVELS[level], **bounds),)
    elif tests == "divergence":
        # A sequence's mean abs(ratio - 1), which drops its outward tokens.
        criteria = (Criterion("ratio_deviation", "sequence", "mean", when="outward", drop="token", **bounds),)
    weight = Weight(*LEVELS[level], lower=clamps[0], upper=clamps[1], token_clamp=TOKEN_CLAMP)
    return Spec(weight=weight, criteria=criteria, rejected="zero" if criteria else "mask")


def _masked(level: str, tests: str, lower: float | None, upper: float | None, clamp_upper: float | None) -> Spec:
    return _corrected(level, (None, clamp_upper), tests, (lower, upper))


CLAMP = {"clamp_upper": maybe(2.0)}
BOUNDS = {"mask_lower": maybe(0.5), "mask_upper": maybe(2.0), **CLAMP}
presets("open_instruct", "open-instruct e6c3044 (2026-08-20)")(
    default=("w = min(exp(D), clamp_upper).", lambda upper: _corrected("token", (None, upper)), CLAMP),
    icepop=(
        "w = min(exp(D), clamp_upper), and 0 for a token outside [mask_lower, mask_upper].",
        partial(_masked, "token", "ratio"),
        BOUNDS,
    ),
    seq=(
        "w = min(exp(mean D), clamp_upper), and 0 for a sequence whose exp(mean D) is outside the mask bounds.",
        partial(_masked, "geometric", "ratio"),
        BOUNDS,
    ),
    vaco=(
        "w = min(exp(D), clamp_upper), and 0 for outward tokens of a sequence whose mean abs(exp(D) - 1) is outside.",
        lambda upper, lower, clamp_upper: _masked("token", "divergence", lower, upper, clamp_upper),
        {"mask_upper": maybe(2.0), "mask_lower": None, **CLAMP},
    ),
)

# By kl_estimator: 3 is k1 times the differentiable ratio.
KL_KINDS: tuple[KLKind, ...] = ("k1", "k2", "k3", "k1")


def _estimator(name: str, value: object) -> int:
    for estimator in range(len(KL_KINDS)):
        if value == estimator:
            return estimator
    raise wrong_value(name, "0, 1, 2 or 3", value)


def _kl(beta: float, kl_estimator: int) -> KL | None:
    """The KL term, which open-instruct clamps where k is +-40."""
    weight: KLWeight | None = "ratio" if kl_estimator == 3 else None
    return KL(KL_KINDS[kl_estimator], beta, log_clamp=40.0, weight=weight) if beta else None


def _cispo(clip_higher: float, of: RatioOf | None = None) -> Score:
    """The score function weighted by the ratio, at most 1 + clip_higher."""
    return Score(upper=1.0 + clip_higher, of=of)


CLIP = Named(clip, clip_lower=0.2, clip_higher=0.272)
ESTIMATOR = {"kl_estimator": Setting(2, _estimator)}
NO_KL, ITS_KL = (Named(_kl, beta=beta, **ESTIMATOR) for beta in (0.0, 0.05))
WITHOUT = "loss_fn dapo without use_rho_correction"
WITH_ITS_KL = "with the KL of GRPOExperimentConfig"
CISPO = Named(_cispo, clip_higher=0.272)
of_presets("open_instruct", CLIP, BOTH, GLOBAL, kl=NO_KL)
named_recipe("open_instruct.ppo", CLIP, DECOUPLED, f"{WITHOUT}; {GLOBAL}", kl=NO_KL)
named_recipe("open_instruct.grpo", CLIP, WITH_REFERENCE, f"{WITHOUT}, {WITH_ITS_KL}; {GLOBAL}", kl=ITS_KL)
named_recipe("open_instruct.cispo", CISPO, BOTH, GLOBAL, spec="open_instruct.default", kl=NO_KL)

# --- the configuration ---


def _bound(name: str, value: object) -> float | None:
    """0 is off."""
    return not_negative(name, value) or None


def _denominator(name: str, value: object) -> float | None:
    """The word "token", or a number, which may be text there."""
    if value == "token":
        return None
    return positive(name, float(value) if isinstance(value, str) and value.replace(".", "", 1).isdigit() else value)


TABLE: dict[str, Any] = {
    "use_rho_correction": True,
    "rho_clamp_lower_bound": Setting(0.0, _bound),
    "rho_clamp_upper_bound": Setting(2.0, _bound),
    "rho_mask_lower_bound": Setting(0.0, _bound),
    "rho_mask_upper_bound": Setting(0.0, _bound),
    "rho_mask_sequence_level": False,
    "rho_mask_tv_divergence": False,
    **CLIP.settings,
    **ITS_KL.settings,
    "loss_denominator": Setting("token", _denominator),
    "loss_fn": word("dapo", ("dapo", "cispo")),
    "load_ref_policy": True,
    "use_vllm_logprobs": False,
}
# Of the many other fields, some that show that a whole configuration is given.
WHOLE = ("alpha", "exp_name", "learning_rate", "num_epochs", "num_mini_batches", "per_device_train_batch_size", "seed")
settings = partial(given_in, rows=TABLE, whole=WHOLE)


def read(given: Given) -> Spec:
    """Read GRPOExperimentConfig, or a mapping of its fields."""
    used, *bounds, by_sequence, diverges = (given[name] for name in list(TABLE)[:7])
    if not used:
        return Spec()
    clamps, mask = (bounds[0], bounds[1]), (bounds[2], bounds[3])
    level = "geometric" if by_sequence else "token"
    if mask == (None, None):
        return _corrected(level, clamps)
    return _corrected(level, clamps, "divergence" if diverges else "ratio", mask)


WRITTEN = (
    (
        {"use_rho_correction": False},
        {
            "use_rho_correction": True,
            "rho_clamp_lower_bound": LOW,
            "rho_clamp_upper_bound": HIGH,
            "rho_mask_sequence_level": (False, True),
        },
    ),
    (
        {"rho_mask_lower_bound": 0.0, "rho_mask_upper_bound": 0.0},
        {"rho_mask_lower_bound": LOW, "rho_mask_upper_bound": HIGH, "rho_mask_tv_divergence": (False, True)},
    ),
)


def recipe(given: Given) -> Recipe:
    """Read the whole loss. With `use_vllm_logprobs` the ratio is new/rollout."""
    found, of = read(given), cast("RatioOf | None", None)
    if given["use_vllm_logprobs"]:
        if found.acts:
            raise refused("use_vllm_logprobs", "open-instruct refuses it together with use_rho_correction")
        of = "new/rollout"
    surrogate: Surrogate = PPO(given["clip_lower"], given["clip_higher"], of=of)
    if given["loss_fn"] == "cispo":
        surrogate = _cispo(given["clip_higher"], of)
    total, kl = given["loss_denominator"], ITS_KL.of(given)
    batch = {} if total is None else {"total": total}
    return Recipe(found if found.acts else None, Loss(surrogate, kl=kl if given["load_ref_policy"] else None), batch)

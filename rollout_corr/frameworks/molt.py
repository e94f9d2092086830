"""labs-molt: `--algo.advantage.is_correction_*`, and the flags of its policy loss and KL.

Of the levels token, seq and geo the last two only gate: what survives keeps its token ratio. molt's "seq" is the
product. It reads NaN as D = 0 and clamps D to +-30, per token and again after summing. Rejection zeroes the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..specs.correction import Criterion, Spec, Weight
from ..specs.loss import Loss
from ..specs.surrogate import Surrogate
from ..specs.surrogates import GSPO, PPO, Score
from ..specs.terms import KL
from ..specs.validate import number
from .openrlhf.config import ADVANTAGE, ESTIMATORS
from .shared.preset import HIGH, LEVELS, LOW, presets
from .shared.recipe import BOTH, DECOUPLED, GLOBAL, SAME_AS_PPO, Named, Recipe, as_wide, named_recipe, of_presets
from .shared.settings import Given, Setting, flags_in, maybe, or_null, refused, unchecked, under, word

LIMIT = 30.0
MODES = ("mask", "clip", "trunc")
# The ratio that each level tests.
TESTED = {"token": LEVELS["token"], "seq": LEVELS["sequence"], "geo": LEVELS["geometric"]}


def _made(level: str, low: float | None, high: float | None, mode: str = "mask") -> Spec:
    """The correction of a level and mode: "trunc" has no lower bound."""
    gates = mode == "mask"
    lower, upper = (None, None) if gates else (low if mode == "clip" else None, high)
    criterion = Criterion("ratio", *TESTED[level], lower=low, upper=high, token_clamp=LIMIT) if gates else None
    return Spec(
        weight=Weight.token(lower=lower, upper=upper, token_clamp=LIMIT),
        criteria=() if criterion is None else (criterion,),
        rejected="zero" if gates else "mask",
        clamp=LIMIT,
        nonfinite="neutral",
    )


WIDE = {"low": maybe(0.5), "high": maybe(5.0)}
presets("molt", "labs-molt 2d62608 (2026-08-06)")(
    token=(
        'w = exp(D) inside [low, high], else 0; mode "clip": clamped to [low, high]; "trunc": at most high.',
        partial(_made, "token"),
        {**WIDE, "mode": word("mask", MODES)},
    ),
    seq=("w = exp(D), and 0 for a sequence whose exp(sum D) is outside [low, high].", partial(_made, "seq"), WIDE),
    geo=(
        "w = exp(D), and 0 for a sequence whose exp(mean D) is outside [low, high]; the bounds are its quick start's.",
        partial(_made, "geo"),
        {"low": maybe(0.99), "high": maybe(1.01)},
    ),
)


def _ppo(sides: tuple[float, float], dual: float | None) -> Surrogate:
    return as_wide(partial(PPO, clamp=LIMIT))(*sides, dual)


def _gspo(sides: tuple[float, float]) -> Surrogate:
    return GSPO(*sides, through="token", clamp=LIMIT)


def _cispo(sides: tuple[float, float]) -> Surrogate:
    """The score function: the second number bounds the ratio itself, and is at least 1, as molt demands."""
    high = number("eps_clip_low_high", sides[1])
    if high < 1.0:
        why = f"expected the highest ratio, at least 1, with cispo, got {high!r}"
        raise refused("eps_clip_low_high", why)
    return Score(upper=high, clamp=LIMIT)


SIDES = (0.2, 0.2)
CLIP = Named(_ppo, eps_clip_low_high=SIDES, dual_clip=None)
of_presets("molt", CLIP, BOTH, GLOBAL)
named_recipe("molt.ppo", CLIP, DECOUPLED, GLOBAL)
named_recipe("molt.grpo", CLIP, DECOUPLED, f"{SAME_AS_PPO}; {GLOBAL}")
named_recipe("molt.gspo", Named(_gspo, eps_clip_low_high=SIDES), DECOUPLED, GLOBAL)
# molt refuses its own default of the bounds for CISPO; 1.2 is the example of its help.
CISPO_NOTE = "molt has no default: the ceiling of its help"
named_recipe("molt.cispo", Named(_cispo, eps_clip_low_high=(0.2, 1.2)), DECOUPLED, CISPO_NOTE)

# --- the flags ---


def _pair(name: str, value: object) -> tuple[float, float]:
    if not isinstance(value, Sequence) or len(value) != 2:
        got = list(value) if isinstance(value, tuple) else value
        raise refused(name, f"expected LOW HIGH, got {got!r}")
    return number(name, value[0]), number(name, value[1])


IS: dict[str, Any] = {
    f"{ADVANTAGE}is_correction_level": word("off", ("off", *TESTED)),
    f"{ADVANTAGE}is_correction_mode": word("mask", MODES),
    f"{ADVANTAGE}is_correction_threshold": Setting((0.5, 5.0), _pair),
}
TABLE: dict[str, Any] = {
    **IS,
    "actor.eps_clip_low_high": Setting(None, or_null(_pair)),
    "actor.dual_clip": None,
    "actor.loss_mode": word("ppo", ("ppo", "cispo", "gspo")),
    "algo.kl.use_loss": False,
    "algo.kl.init_coef": maybe(None),
    "algo.kl.estimator": word("k1", ESTIMATORS),
    "algo.advantage.estimator": unchecked(None),
}
OTHERS = (
    *under(
        "actor",
        "adam aux_loss_coef entropy_coef freeze_moe_router freeze_visual_encoder freezing_steps gradient_checkpoint "
        "lr_scheduler lr_warmup_ratio max_norm min_lr_ratio model_name_or_path muon num_gpus_per_node num_nodes optim",
    ),
    *under("algo", "dynamic_filtering_enable dynamic_filtering_range"),
    *under("algo.advantage", "gamma lam no_whiten"),
    *under("algo.kl", "horizon target"),
)


settings = partial(flags_in, rows=TABLE, others=OTHERS)


def read(given: Given) -> Spec:
    """Read molt's arguments: a namespace, nested or with dots in its names, or a mapping."""
    level, mode = (given[name] for name in [*IS][:2])
    if level == "off":
        return Spec()
    low, high = given[[*IS][2]]
    if level != "token" and mode != "mask":
        raise refused("is_correction_mode", f"expected 'mask' with is_correction_level {level!r}, got {mode!r}")
    return _made(level, low, high, mode)


_LEVEL, _MODE, _BOUNDS = IS
WRITTEN = (
    (
        {_LEVEL: "off"},
        {_LEVEL: "token", _MODE: ("trunc", "clip"), _BOUNDS: [LOW, HIGH]},
        {_LEVEL: tuple(TESTED), _MODE: "mask", _BOUNDS: [LOW, HIGH]},
    ),
)


def recipe(given: Given) -> Recipe:
    """Read the whole loss but its entropy bonus."""
    found = read(given)
    return Recipe(found if found.acts else None, Loss(_surrogate(given), kl=_kl(given)))


def _surrogate(given: Given) -> Surrogate:
    mode, sides, dual = given["actor.loss_mode"], given["actor.eps_clip_low_high"] or SIDES, given["actor.dual_clip"]
    if mode == "ppo":
        return _ppo(sides, dual)
    if dual is not None:
        raise refused("actor.dual_clip", f"expected None with actor.loss_mode {mode!r}, as molt does, got {dual!r}")
    return _gspo(sides) if mode == "gspo" else _cispo(sides)


def _kl(given: Given) -> KL | None:
    # With on_policy_distill the KL to the teacher is the advantage.
    if given["algo.advantage.estimator"] == "on_policy_distill" or not given["algo.kl.use_loss"]:
        return None
    coefficient = given["algo.kl.init_coef"]
    coefficient = 0.01 if coefficient is None else coefficient
    if coefficient <= 0.0:
        return None
    kind = given["algo.kl.estimator"]
    return KL(kind, coefficient, log_clamp=LIMIT, value_clamp=10.0 if kind == "k3" else None)

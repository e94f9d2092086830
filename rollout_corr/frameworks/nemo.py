"""NeMo RL: `truncated_importance_sampling_type` and the loss of ClippedPGLossConfig; `seq_logprob_error_threshold`.

NeMo's weight is 0 at a token with non-finite log-probs, and only there; here its whole sequence is rejected.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ..specs.choices import Outside
from ..specs.correction import Criterion, Spec, Weight
from ..specs.loss import Loss
from ..specs.surrogate import Surrogate
from ..specs.surrogates import GPG, GSPO
from ..specs.terms import KL, Mean, MeanOver
from ..specs.validate import LARGEST_CLAMP, one_of
from .shared.checking import Checks, Rule, roles, without
from .shared.preset import HIGH, LEVELS, LOW, gated, presets, truncated
from .shared.recipe import (
    BOTH,
    DECOUPLED,
    GLOBAL,
    SEQUENCES,
    TOKENS,
    WITH_REFERENCE,
    Named,
    Recipe,
    around_one,
    clip,
    named_recipe,
    of_presets,
)
from .shared.settings import Given, NoEquivalent, given_in, maybe, only, refused, unchecked, word

# --- presets ---


def _gate(level: str, ratio_min: float | None, ratio: float | None) -> Spec:
    """Weigh tokens by their ratio, and by 0 where the ratio of a level lies outside."""
    return gated(Criterion("ratio", *LEVELS[level], lower=ratio_min, upper=ratio))


def _error(threshold: float) -> Criterion:
    return Criterion("ratio_error", over="sequence", reduce="mean", upper=threshold)


presets("nemo", "NeMo RL 7ea279a (2026-08-22)")(
    tis=("w = exp(D) clamped to [ratio_min, ratio].", truncated, {"ratio": maybe(2.0), "ratio_min": None}),
    icepop=(
        "w = exp(D) inside [ratio_min, ratio], else 0.",
        lambda ratio_min, ratio: _gate("token", ratio_min, ratio),
        {"ratio_min": maybe(0.5), "ratio": maybe(5.0)},
    ),
    seq_mask_tis=(
        "w = exp(D), and 0 for a sequence whose exp(mean D) is outside [ratio_min, ratio].",
        lambda ratio_min, ratio: _gate("geometric", ratio_min, ratio),
        {"ratio_min": maybe(0.999), "ratio": maybe(1.002)},
    ),
    gspo_is=(
        'w = exp(sum D), the weight of `sequence_level_importance_ratios`; level "geometric": exp(mean D) (NeMo#2269).',
        lambda level: Spec(weight=Weight(*LEVELS[one_of("level", level, LEVELS)])),
        {"level": "sequence"},
    ),
    mult_err=(
        "No weight; mask a sequence whose mean exp(abs D) is above threshold.",
        lambda threshold: Spec(criteria=(_error(threshold),)),
        {"threshold": 2.0},
    ),
)

# --- losses ---


def _level_mean(token_level_loss: bool) -> Mean:
    return TOKENS if token_level_loss else SEQUENCES


def _kl(coefficient: float, log_clamp: float | None = 20.0, value_clamp: float | None = 10.0) -> KL | None:
    """NeMo's k3: a factor that is 1 and has the gradient of the log-prob gives it the gradient of k2."""
    if coefficient == 0.0:
        return None
    # Without a clamp of its own it has the widest that there is.
    return KL("k3", coefficient, "k2", LARGEST_CLAMP if log_clamp is None else log_clamp, value_clamp)


SIDES = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.2}
DUAL = SIDES | {"ratio_clip_c": None}
KL_OF_NAMES: dict[str, Any] = {"kl": Named(_kl, reference_policy_kl_penalty=0.0)}
PARTS = KL_OF_NAMES | {"mean": Named(_level_mean, token_level_loss=True)}
of_presets("nemo", Named(clip, **DUAL), BOTH, GLOBAL, **PARTS)
named_recipe("nemo.ppo", Named(clip, **DUAL), DECOUPLED, f"without correction; {GLOBAL}", **PARTS)
named_recipe(
    "nemo.grpo",
    Named(clip, **DUAL),
    WITH_REFERENCE,
    f"without correction, with the KL of ClippedPGLossConfig; {GLOBAL}",
    **PARTS | {"kl": Named(_kl, reference_policy_kl_penalty=0.01)},
)
named_recipe("nemo.cispo", Named(around_one, **SIDES), DECOUPLED, GLOBAL, **KL_OF_NAMES)
# NeMo refuses sequence_level_importance_ratios together with token_level_loss.
ALL_SEQUENCES = "total: sequences of all ranks"
named_recipe(
    "nemo.gspo_is", Named(GSPO, **DUAL), BOTH, ALL_SEQUENCES, spec="nemo.gspo_is", mean=SEQUENCES, **KL_OF_NAMES
)
COUNTED = "samples are masked before they are counted"
named_recipe("nemo.mult_err", Named(clip, **DUAL), BOTH, COUNTED, spec="nemo.mult_err", over="kept", **PARTS)

# --- the configuration ---

USES, WHOLE = "use_importance_sampling_correction", "sequence_level_importance_ratios"
TYPE, RATIO = "truncated_importance_sampling_type", "truncated_importance_sampling_ratio"
LEAST, ERRORS = f"{RATIO}_min", "seq_logprob_error_threshold"
TYPES = ("tis", "icepop", "seq-mask-tis")
# Of the correction, and the settings of ClippedPGLossConfig that only the loss reads.
OF_SPEC: dict[str, Any] = {USES: False, WHOLE: False, TYPE: word(None, TYPES), RATIO: None, LEAST: None, ERRORS: None}
TABLE = {
    **OF_SPEC,
    **DUAL,
    "disable_ppo_ratio": False,
    "token_level_loss": True,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": unchecked("k3"),
    "kl_input_clamp_value": maybe(20.0),
    "kl_output_clamp_value": maybe(10.0),
    "use_kl_in_reward": False,
    "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "positive_example_nll_weight": only(0.0, "add this loss to the value of policy_loss"),
}
# Keys of the block `grpo`, which has many more.
OF_GRPO = ("num_prompts_per_step", "num_generations_per_prompt", "max_num_steps", "max_num_epochs", "adv_estimator")
settings = partial(given_in, rows=TABLE, blocks=[("loss_fn",), ("grpo",)], whole=OF_GRPO)


def read(given: Given) -> Spec:
    """Read the block `loss_fn`, or a configuration that holds it, with or without the block `grpo`."""
    used, whole, kind, ratio, least, threshold = (given[name] for name in OF_SPEC)
    if kind is not None:
        if not used:
            raise refused(TYPE, f"needs {USES}: true")
        if ratio is None or (least is None and kind != "tis"):
            raise refused(RATIO if ratio is None else LEAST, f"expected a number with type {kind!r}")
        if kind == "seq-mask-tis" and whole:
            raise refused(TYPE, "'seq-mask-tis' weighs tokens, as NeMo says")
    elif ratio is not None:
        raise refused(TYPE, f"expected one of {list(TYPES)} with {RATIO}={ratio!r}, got None")
    if kind == "seq-mask-tis":
        if threshold is not None:
            why = "masks sequences before they are counted, and 'seq-mask-tis' weighs them by 0; no Spec does both"
            raise refused(ERRORS, why, NoEquivalent)
        return _gate("geometric", least, ratio)
    weight = None
    if used:
        outside: Outside = "zero" if kind == "icepop" else "clamp"
        # Without a type NeMo bounds nothing.
        lower = None if kind is None else least
        weight = Weight(*LEVELS["sequence" if whole else "token"], lower=lower, upper=ratio, outside=outside)
    return Spec(weight=weight, criteria=() if threshold is None else (_error(threshold),))


USED = {USES: True, WHOLE: (False, True)}
WRITTEN = (
    (
        {"loss_fn": {USES: False, WHOLE: False, TYPE: None}},
        {"loss_fn": USED | {TYPE: None}},
        {"loss_fn": USED | {TYPE: TYPES, RATIO: HIGH, LEAST: LOW}},
    ),
    ({"grpo": {ERRORS: (None, HIGH)}},),
)


def recipe(given: Given) -> Recipe:
    """Read the whole loss. With `force_on_policy_ratio`, `old_logp` is to be `new_logp.detach()`."""
    found, mean = read(given), _level_mean(given["token_level_loss"])
    over: MeanOver = "original" if given[ERRORS] is None else "kept"
    loss = Loss(_surrogate(given, mean == TOKENS), replace(mean, over=over), _read_kl(given))
    return Recipe(found if found.acts else None, loss)


def _surrogate(given: Given, tokens: bool) -> Surrogate:
    sides, dual = (given["ratio_clip_min"], given["ratio_clip_max"]), given["ratio_clip_c"]
    whole, plain, forced = (given[name] for name in (WHOLE, "disable_ppo_ratio", "force_on_policy_ratio"))
    if whole and tokens:
        raise refused(WHOLE, "needs token_level_loss: false, as NeMo does; the mean is then over sequences")
    if given["use_cispo"]:
        if plain or forced or whole or dual is not None or not tokens:
            raise refused(
                "use_cispo",
                "NeMo refuses it together with disable_ppo_ratio, force_on_policy_ratio, "
                f"{WHOLE}, ratio_clip_c and token_level_loss: false",
            )
        return around_one(*sides)
    if plain and not forced:
        return GPG()
    return GSPO(*sides, dual) if whole and not forced else clip(*sides, dual)


def _read_kl(given: Given) -> KL | None:
    coefficient, kind = given["reference_policy_kl_penalty"], given["reference_policy_kl_type"]
    if given["use_kl_in_reward"] or coefficient == 0.0:
        return None
    if kind != "k3":
        why = f"expected 'k3', got {kind!r}: no KL of this package has the gradient that NeMo gives it"
        raise refused("reference_policy_kl_type", why)
    if given["use_on_policy_kl_approximation"]:
        why = "weighs the KL by new/rollout and the loss by new/old; no KL here does"
        raise refused("use_on_policy_kl_approximation", why)
    return _kl(coefficient, given["kl_input_clamp_value"], given["kl_output_clamp_value"])


# --- mistakes ---

SWITCH, KIND, WHOLE_SEQUENCES = f"loss_fn.{USES}", f"loss_fn.{TYPE}", f"loss_fn.{WHOLE}"
BOUNDS, THRESHOLD, GENERATION = (f"loss_fn.{RATIO}", f"loss_fn.{LEAST}"), f"grpo.{ERRORS}", "policy.generation."
CHECKS = Checks(
    keys=(*(f"loss_fn.{name}" for name in OF_SPEC if name != ERRORS), THRESHOLD),
    context=("grpo.async_grpo.enabled", "loss_fn.token_level_loss"),
    alike=("ppo.seq_logprob_error_threshold",),
    roles=roles(
        GENERATION,
        "temperature",
        mode=f"{GENERATION}vllm_cfg.logprobs_mode",
        length="policy.max_total_sequence_length",
    ),
    bounds={"criteria": BOUNDS, "weight": BOUNDS},
    rules=(
        *without(KIND, BOUNDS[1]),
        Rule(
            SWITCH,
            lambda run: run.is_("grpo.async_grpo.enabled", True) and run.off(SWITCH, False),
            "NeMo refuses async_grpo without it",
            "write true",
        ),
        Rule(
            WHOLE_SEQUENCES,
            lambda run: run.is_(WHOLE_SEQUENCES, True) and run.is_("loss_fn.token_level_loss", True, default=True),
            "NeMo refuses it together with token_level_loss: true",
            "write token_level_loss: false",
        ),
        Rule(
            THRESHOLD,
            lambda run: run.number(THRESHOLD) <= 1.0,
            "{value} masks every sequence: the mean of exp(|D|) is at least 1",
            "write 1.5 or 2",
        ),
    ),
)

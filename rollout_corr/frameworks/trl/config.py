"""TRL's GRPOTrainer: presets by `vllm_importance_sampling_mode`, losses and GRPOConfig; unsloth's is a `Trainer` too.

TRL's "sequence" is the product of the ratios. A token whose log-prob is NaN gets ratio 1 there ("neutral"). Rejection
zeroes the weight, so no denominator changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...specs.correction import Criterion, Spec, Weight
from ...specs.loss import Loss
from ...specs.surrogate import Surrogate
from ...specs.surrogates import GMPO, GPG, GSPO, PPO, SAPO, VESPO, Score
from ...specs.terms import KL, Mean
from ...specs.validate import one_of
from ..shared.preset import HIGH, LEVELS, LOW, PRESETS, Alternatives, Mark, Row, off_policy, presets
from ..shared.recipe import (
    BOTH,
    BYPASS,
    DECOUPLED,
    GLOBAL,
    ROWS,
    TOKENS,
    Named,
    Recipe,
    add_recipe,
    as_wide,
    clip,
    named_recipe,
    penalty,
)
from ..shared.settings import Given, NoEquivalent, given_in, maybe, only, refused, unchecked, warn_old, word, words

# --- presets ---

RATIOS = {"token": "exp(D)", "sequence": "exp(sum D)", "geometric": "exp(mean D)"}
BOUNDS = {"clip_max": maybe(3.0), "clip_min": None}


def truncate(level: str, clip_max: float | None, clip_min: float | None) -> Spec:
    """Clamp the ratio of a level to [clip_min, clip_max]."""
    if clip_max is None and clip_min is None:
        raise ValueError("expected clip_max, clip_min or both, got neither (nothing would be truncated)")
    return Spec(weight=Weight(*LEVELS[level], lower=clip_min, upper=clip_max), nonfinite="neutral")


def mask(level: str, clip_max: float | None, clip_min: float | None) -> Spec:
    """Keep the ratio of a level inside [clip_min, clip_max] and make it 0 outside."""
    criterion = Criterion("ratio", *LEVELS[level], lower=clip_min, upper=clip_max)
    return Spec(weight=Weight(*LEVELS[level]), criteria=(criterion,), rejected="zero", nonfinite="neutral")


def modes(levels: Iterable[str], trainer: str) -> dict[str, Row]:
    """The presets of a trainer: a mask and a truncation of each level, and its default."""
    default = f"{trainer}'s default, sequence_mask: w = exp(sum D) inside the bounds, else 0."
    rows: dict[str, Row] = {"default": (default, partial(mask, "sequence"), BOUNDS)}
    for level in levels:
        whole = "" if level == "token" else " for the whole sequence"
        masks = f"w = {RATIOS[level]} inside the bounds, else 0{whole}."
        rows[f"{level}_mask"] = masks, partial(mask, level), BOUNDS
        rows[f"{level}_truncate"] = f"w = {RATIOS[level]} clamped to the bounds.", partial(truncate, level), BOUNDS
    return rows


def _opsm(delta: float, clip_max: float | None, clip_min: float | None) -> Spec:
    return masked(mask("sequence", clip_max, clip_min), delta)


presets("trl", "TRL 1.16.0")(
    **modes(("token", "sequence"), "GRPOTrainer"),
    # `off_policy_mask_threshold` has no default in TRL; 0.1 is Trinity's.
    opsm=(
        "sequence_mask, and 0 for a sequence with A < 0 whose mean(rollout - new) exceeds delta (off-policy mask).",
        _opsm,
        {"delta": 0.1, **BOUNDS},
    ),
)

# --- settings ---

NAME = "vllm_importance_sampling"
CORRECTION, MODE, CAP = f"{NAME}_correction", f"{NAME}_mode", f"{NAME}_cap"
CLIP_MAX, CLIP_MIN = f"{NAME}_clip_max", f"{NAME}_clip_min"
TOKEN_MODES = ("token_truncate", "token_mask")
MODES = (*TOKEN_MODES, "sequence_truncate", "sequence_mask")

# loss_type: its mean. dr_grpo's is divided by max_completion_length too.
MEANS: dict[str, Mean] = {
    "grpo": ROWS,
    "bnpo": TOKENS,
    "dapo": TOKENS,
    "dr_grpo": Mean("sequence_sum", over="rows"),
    "luspo": Mean("sequence_sum", over="rows"),
    "sapo": ROWS,
    "cispo": TOKENS,
    "vespo": TOKENS,
}
NOTES = {"dapo": GLOBAL, "cispo": GLOBAL, "dr_grpo": "max_completion_length is the trainer's"}

# Settings of the loss, by TRL's names and with its defaults.
LOSS: dict[str, Any] = {
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": maybe(0.0),
    "use_bias_correction_kl": True,
    "importance_sampling_level": word("token", ("token", "sequence")),
    "max_completion_length": maybe(512.0),
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    CORRECTION: True,
    MODE: unchecked("sequence_mask"),
    "off_policy_mask_threshold": None,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
WHOLE_DISTRIBUTION = "needs the whole distribution"
BONUS = f"{WHOLE_DISTRIBUTION}; add the bonus to the value of policy_loss"
TABLE = LOSS | {
    "loss_type": word("dapo", MEANS),
    # False in TRL, where nothing is corrected then: whoever reads a few settings of the correction means it.
    "use_vllm": True,
    CLIP_MAX: maybe(3.0),
    CLIP_MIN: None,
    CAP: None,
    "top_entropy_quantile": only(1.0, f"{WHOLE_DISTRIBUTION}; pass a mask of your own", NoEquivalent),
    **{name: only(off, BONUS, NoEquivalent) for name, off in (("entropy_coef", 0.0), ("use_adaptive_entropy", False))},
}
# Keys that stand in a whole GRPOConfig, with many that do not concern this package.
WHOLE = words(
    "output_dir learning_rate max_steps num_train_epochs per_device_train_batch_size model_init_kwargs "
    "gradient_accumulation_steps num_generations num_iterations temperature scale_rewards vllm_mode "
    "generation_batch_size steps_per_generation mask_truncated_completions bf16 model_name_or_path"
)

# --- parts of a loss ---


def mean_of(mean: Mean, loss_type: str, given: Given) -> Mean:
    """The mean of a loss_type."""
    return replace(mean, length=given["max_completion_length"]) if loss_type == "dr_grpo" else mean


def surrogate(
    loss_type: str, given: Given, taus: tuple[str, str] = ("sapo_temperature_pos", "sapo_temperature_neg")
) -> Surrogate:
    """The loss of a token, from settings by TRL's names, but for SAPO's temperatures."""
    level, low, high = (given[name] for name in ("importance_sampling_level", "epsilon", "epsilon_high"))
    high = low if high is None else high
    if loss_type in ("cispo", "sapo", "vespo"):
        if level != "token":
            raise refused("importance_sampling_level", f"expected 'token' with loss_type {loss_type!r}, got {level!r}")
        if loss_type == "vespo":
            return _vespo(given)
        return Score(upper=high) if loss_type == "cispo" else SAPO(*(given[tau] for tau in taus))
    if level == "token":
        return PPO(low, high, delta=given["delta"])
    return GSPO(low, high, delta=given["delta"], through="token" if level == "sequence_token" else "sequence")


def _vespo(given: Given) -> VESPO:
    """VESPO; its rates are at least 1e-4 in TRL."""
    sides = ((given[f"vespo_k_{side}"], max(given[f"vespo_lambda_{side}"], 1e-4)) for side in ("pos", "neg"))
    return VESPO(*next(sides), *next(sides))


def masked(spec: Spec | None, threshold: float) -> Spec:
    """Add the off-policy mask to a correction. A masked sequence keeps its KL and is counted by the mean."""
    found = Spec(nonfinite="neutral") if spec is None else spec
    return replace(found, criteria=(*found.criteria, off_policy(threshold)), rejected="zero")


# --- the trainers ---


@dataclass(frozen=True)
class Trainer:
    """A trainer with TRL's losses and settings, under whose name its presets are registered."""

    framework: str
    table: Mapping[str, Any] = field(default_factory=lambda: TABLE)
    levels: tuple[str, ...] = ("token", "sequence")  # its ratios, as presets call them
    named: Mapping[str, Any] = field(default_factory=dict)  # defaults of its recipes by name that are others
    # The settings of the bounds: the argument of a preset, and the number that it takes.
    bounds: Mapping[str, tuple[str, Mark]] = field(
        default_factory=lambda: {CLIP_MAX: ("clip_max", HIGH), CLIP_MIN: ("clip_min", LOW)}
    )
    dapo_high: float | None = None  # `epsilon_high` of loss_type dapo, if not `epsilon`
    kl_clamp: float | None = None  # the largest value of the KL
    losses: tuple[str, ...] = tuple(MEANS)  # its `loss_type`s

    def register(
        self, needs: tuple[str, ...], defaults: Mapping[str, Mapping[str, Any]] = {}, notes: Mapping[str, str] = {}
    ) -> None:
        """Register a recipe for each loss_type, with defaults and a note of its own."""
        of_preset = PRESETS[f"{self.framework}.token_truncate"].table
        for loss_type in self.losses:
            table = {name: self.table[name] for name in LOSS if name in self.table}
            table |= {**self.named, **defaults.get(loss_type, {}), **of_preset}
            note = {**NOTES, **notes}.get(loss_type, "")
            add_recipe(f"{self.framework}.{loss_type}", partial(self._by_name, loss_type), table, needs, note)

    def _by_name(self, loss_type: str, given: Given) -> Recipe:
        if loss_type == "cispo" and given["epsilon_high"] is None:
            # What TRL recommends; TRL itself takes epsilon.
            given = given.but(epsilon_high=5.0)
        return self._loss(loss_type, given, {argument: given[argument] for argument, _ in self.bounds.values()})

    def _loss(self, loss_type: str, given: Given, bounds: Mapping[str, Any]) -> Recipe:
        """A loss of the trainer; `bounds` are those of the preset that corrects it."""
        corrected = given[CORRECTION] and ("use_vllm" not in given or given["use_vllm"])
        own = [f"{level}_{way}" for level in self.levels for way in ("truncate", "mask")]
        mode = one_of(MODE, given[MODE], TOKEN_MODES if loss_type == "vespo" and corrected else own)
        found: Spec | None = PRESETS[f"{self.framework}.{mode}"].of(bounds)
        found = found if corrected else None
        if loss_type == "dapo" and given["epsilon_high"] is None:
            given = given.but(epsilon_high=self.dapo_high)
        if "vespo" in self.losses:
            _vespo(given)  # its settings are checked with any loss
        kl, beta = None, given["beta"]
        if beta:
            kl = KL("k3", beta, value_clamp=self.kl_clamp, weight="ratio" if given["use_bias_correction_kl"] else None)
        threshold, mean = given["off_policy_mask_threshold"], mean_of(MEANS[loss_type], loss_type, given)
        found = found if threshold is None else masked(found, threshold)
        return Recipe(found, Loss(surrogate(loss_type, given), mean, kl))

    def settings(self, config: object) -> Given:
        """Find the settings in a GRPOConfig, or in a mapping or namespace with its names."""
        given = given_in(config, self.table, whole=WHOLE)
        if given.says(CAP):
            cap = given[CAP]
            warn_old("trl", [CAP], f"write {CLIP_MAX}: {cap!r}")
            given = given.but(**{CLIP_MAX: cap})
        return given

    def read(self, given: Given) -> Spec:
        """Read the correction: `vllm_importance_sampling_*` and `off_policy_mask_threshold`."""
        return self.recipe(given).spec or Spec()

    def recipe(self, given: Given) -> Recipe:
        """Read the whole loss."""
        bounds = {argument: given[setting] for setting, (argument, _) in self.bounds.items()}
        return self._loss(given["loss_type"], given, bounds)

    @property
    def written(self) -> Alternatives:
        """The table of settings for `to_config`: `vllm_importance_sampling_*` and `off_policy_mask_threshold`."""
        modes = tuple(f"{level}_{way}" for level in self.levels for way in ("truncate", "mask"))
        corrects = {CORRECTION: True, MODE: modes, **{setting: mark for setting, (_, mark) in self.bounds.items()}}
        return ({CORRECTION: False}, corrects), ({"off_policy_mask_threshold": (None, HIGH)},)


TRL = Trainer("trl")
# VESPO takes the ratios of tokens alone, so TRL refuses it with the default mode.
TRL.register(
    BOTH,
    {"vespo": {MODE: unchecked("token_truncate")}},
    {"vespo": f"{MODE} token_truncate or token_mask; {GLOBAL}"},
)
settings, read, recipe, WRITTEN = TRL.settings, TRL.read, TRL.recipe, TRL.written
# AsyncGRPOTrainer clips the ratio of trainer to engine and corrects nothing else.
named_recipe(
    "trl.iw_opd", GPG(), (), "advantages a * rc.early_token_weights(a, gamma=0.5), where a = ref_logp - rollout_logp"
)
GMPO_NOTE = "GMPOTrainer, experimental: it leaves the ratio of vLLM out; the bounds are of the log-ratio"
named_recipe(
    "trl.gmpo",
    Named(as_wide(GMPO), epsilon=0.4, epsilon_high=None),
    DECOUPLED,
    GMPO_NOTE,
    mean=ROWS,
    kl=penalty(beta=0.0),
)
named_recipe("trl.async_grpo", Named(clip, epsilon=0.2, epsilon_high=None), BYPASS, GLOBAL)

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
from ...specs.validate import number, one_of
from ..shared import lookup
from ..shared.preset import LEVELS, Row, is_off_policy, level_of, off_policy, presets
from ..shared.recipe import (
    BOTH,
    BYPASS,
    DECOUPLED,
    GLOBAL,
    ROWS,
    TOKENS,
    Named,
    Recipe,
    as_wide,
    built_recipe,
    clip,
    named_recipe,
    penalty,
)
from ..shared.settings import NoEquivalent, boolean, maybe, settings_of, warn_old, words

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

# Settings of the loss, by TRL's names and with its defaults.
LOSS: dict[str, Any] = {
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "importance_sampling_level": "token",
    "max_completion_length": 512.0,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "off_policy_mask_threshold": None,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
KNOWN = LOSS | {
    "loss_type": "dapo",
    # False in TRL, where nothing is corrected then: whoever reads a few settings of the correction means it.
    "use_vllm": True,
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
}
# Keys that stand in a whole GRPOConfig, with many that do not concern this package.
WHOLE = words(
    "output_dir learning_rate max_steps num_train_epochs per_device_train_batch_size model_init_kwargs "
    "gradient_accumulation_steps num_generations num_iterations temperature scale_rewards vllm_mode "
    "generation_batch_size steps_per_generation mask_truncated_completions bf16 model_name_or_path"
)
OLD_CAP, CLIP_MAX = "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"
TOKEN_MODES = ("token_truncate", "token_mask")
MODES = (*TOKEN_MODES, "sequence_truncate", "sequence_mask")

# loss_type: its mean. That of dr_grpo is divided by max_completion_length too.
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
IMPORTANCE_LEVELS = ("token", "sequence")

# --- parts of a loss ---


def mean_of(means: Mapping[str, Mean], loss_type: str, max_completion_length: float | None) -> Mean:
    """The mean of a loss_type."""
    mean = means[one_of("loss_type", loss_type, means)]
    return replace(mean, length=max_completion_length) if loss_type == "dr_grpo" else mean


def surrogate(loss_type: str, given: Mapping[str, Any], levels: Iterable[str] = IMPORTANCE_LEVELS) -> Surrogate:
    """The loss of a token, from settings by TRL's names."""
    level = one_of("importance_sampling_level", given["importance_sampling_level"], levels)
    high = given["epsilon"] if given["epsilon_high"] is None else given["epsilon_high"]
    if loss_type in ("cispo", "sapo", "vespo"):
        if level != "token":
            raise ValueError(f"importance_sampling_level: expected 'token' with loss_type {loss_type!r}, got {level!r}")
        if loss_type == "cispo":
            return Score(upper=high)
        if loss_type == "sapo":
            return SAPO(given["sapo_temperature_pos"], given["sapo_temperature_neg"])
        return vespo(given)
    if level == "token":
        return PPO(given["epsilon"], high, delta=given["delta"])
    token = level == "sequence_token"
    return GSPO(given["epsilon"], high, delta=given["delta"], through="token" if token else "sequence")


def vespo(given: Mapping[str, Any]) -> VESPO:
    """VESPO; its rates are at least 1e-4 in TRL."""
    sides = ((given[f"vespo_k_{side}"], max(given[f"vespo_lambda_{side}"], 1e-4)) for side in ("pos", "neg"))
    return VESPO(*next(sides), *next(sides))


def masked(spec: Spec | None, threshold: float) -> Spec:
    """Add the off-policy mask to a correction. A masked sequence keeps its KL and is counted by the mean."""
    spec = Spec(nonfinite="neutral") if spec is None else spec
    return replace(spec, criteria=(*spec.criteria, off_policy(threshold)), rejected="zero")


# --- a trainer ---


@dataclass(frozen=True)
class Trainer:
    """GRPOTrainer of a framework, under whose name its presets are registered."""

    framework: str
    levels: tuple[str, ...] = ("token", "sequence")  # levels of its weights
    # The settings of its configuration, with its defaults.
    known: Mapping[str, Any] = field(default_factory=lambda: KNOWN)
    named: Mapping[str, Any] = field(default_factory=dict)  # defaults of its recipes by name that are others
    dapo_high: float | None = None  # `epsilon_high` of loss_type dapo, if not `epsilon`
    kl_clamp: float | None = None  # the largest value of the KL
    losses: tuple[str, ...] = tuple(MEANS)  # its `loss_type`s

    def register(
        self, needs: tuple[str, ...], defaults: Mapping[str, Mapping[str, Any]] = {}, notes: Mapping[str, str] = {}
    ) -> None:
        """Register a recipe for each loss_type, with defaults and a note of its own."""
        for loss_type in self.losses:
            table = {name: self.known[name] for name in LOSS if name in self.known} | {
                **self.named,
                **defaults.get(loss_type, {}),
            }
            build, note = partial(self._by_name, loss_type, table), {**NOTES, **notes}.get(loss_type, "")
            built_recipe(f"{self.framework}.{loss_type}", build, needs, note, table)

    def _by_name(self, loss_type: str, table: dict[str, Any], /, **settings: Any) -> Recipe:
        given = table | {name: settings.pop(name) for name in table if name in settings}
        if loss_type == "cispo" and given["epsilon_high"] is None:
            # What TRL recommends; TRL itself takes epsilon.
            given["epsilon_high"] = 5.0
        return self.loss(loss_type, given, settings)

    def loss(self, loss_type: str, given: dict[str, Any], bounds: dict[str, Any]) -> Recipe:
        """Return a loss of the trainer; `bounds` are those of the preset that corrects it."""
        corrected = given["vllm_importance_sampling_correction"]
        own = [f"{level}_{way}" for level in self.levels for way in ("truncate", "mask")]
        allowed = TOKEN_MODES if loss_type == "vespo" and corrected else own
        mode = one_of("vllm_importance_sampling_mode", given["vllm_importance_sampling_mode"], allowed)
        found: Spec | None = lookup.named(f"{self.framework}.{mode}", **bounds)
        found = found if corrected else None
        if loss_type == "dapo" and given["epsilon_high"] is None:
            given = given | {"epsilon_high": self.dapo_high}
        mean = mean_of(MEANS, loss_type, given["max_completion_length"])
        if "vespo" in self.losses:
            vespo(given)  # its settings are checked with any loss
        of_tokens, beta, weighed = surrogate(loss_type, given), given["beta"], given["use_bias_correction_kl"]
        kl = (
            KL("k3", beta, value_clamp=self.kl_clamp, weight="ratio" if weighed else None)
            if beta is not None and number("beta", beta)
            else None
        )
        threshold = given["off_policy_mask_threshold"]
        return Recipe(found if threshold is None else masked(found, threshold), Loss(of_tokens, mean, kl))

    def recipe(self, config: object) -> Recipe:
        """Read the whole loss from a GRPOConfig, or from a mapping or namespace with its names."""
        given = self._settings(config)
        refuse_entropy(given)
        bonus = number("entropy_coef", given["entropy_coef"]) != 0.0
        if bonus or boolean("use_adaptive_entropy", given["use_adaptive_entropy"]):
            raise NoEquivalent("entropy_coef: needs the whole distribution; add the bonus to the value of policy_loss")
        return self._read(given)

    def read(self, config: object) -> Spec:
        """Read the correction: `vllm_importance_sampling_*` and `off_policy_mask_threshold`."""
        found = self._read(self._settings(config)).spec
        return Spec() if found is None else found

    def _settings(self, config: object) -> dict[str, Any]:
        given = settings_of(config, self.known, whole=WHOLE)
        if given[OLD_CAP] is not None:
            warn_old("trl", [OLD_CAP], f"write {CLIP_MAX}: {given[OLD_CAP]!r}")
            given[CLIP_MAX] = given[OLD_CAP]
        one_of("loss_type", given["loss_type"], self.losses)
        return given

    def _read(self, given: dict[str, Any]) -> Recipe:
        corrected = boolean("vllm_importance_sampling_correction", given["vllm_importance_sampling_correction"])
        given["vllm_importance_sampling_correction"] = corrected and boolean("use_vllm", given["use_vllm"])
        bounds = {"clip_max": given[CLIP_MAX], "clip_min": given["vllm_importance_sampling_clip_min"]}
        return self.loss(given["loss_type"], given, bounds)

    def write(self, spec: Spec) -> dict[str, Any]:
        """Write `vllm_importance_sampling_*` and `off_policy_mask_threshold`."""
        opsm = next((c for c in spec.criteria if is_off_policy(c)), None)
        gate = next((c for c in spec.criteria if c is not opsm), None)
        made: dict[str, Any] = {
            "vllm_importance_sampling_correction": spec.weight is not None,
            "off_policy_mask_threshold": None if opsm is None else opsm.high,
        }
        level = None if spec.weight is None else level_of(spec.weight)
        if spec.weight is None or level not in self.levels:
            return made
        bounds: Weight | Criterion = spec.weight if gate is None else gate
        mode = f"{level}_{'truncate' if gate is None else 'mask'}"
        return made | {"vllm_importance_sampling_mode": mode} | self.written_bounds(bounds)

    def written_bounds(self, bounds: Weight | Criterion) -> dict[str, Any]:
        """The settings that say the bounds of a weight, or of the criterion that rejects in its place."""
        return {CLIP_MAX: bounds.high, "vllm_importance_sampling_clip_min": bounds.low}


def refuse_entropy(given: Mapping[str, Any]) -> None:
    """Refuse a loss of the tokens with the largest entropy."""
    if number("top_entropy_quantile", given["top_entropy_quantile"]) < 1.0:
        raise NoEquivalent("top_entropy_quantile: needs the whole distribution; pass a mask of your own")


TRL = Trainer("trl")
# VESPO takes the ratios of tokens alone, so TRL refuses it with the default mode.
TRL.register(
    BOTH,
    {"vespo": {"vllm_importance_sampling_mode": "token_truncate"}},
    {"vespo": f"vllm_importance_sampling_mode token_truncate or token_mask; {GLOBAL}"},
)
read, recipe, write = TRL.read, TRL.recipe, TRL.write
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

"""axolotl: `vllm_importance_sampling_mode` and the losses of its AsyncGRPOTrainer; its other trainer is TRL's.

The modes have TRL's names and one setting, the cap C: every weight is at least 1 / C. Its masks write 0 for a ratio
above C and then raise that 0 to 1 / C, so that what is rejected trains; here it has weight 0, as the name says.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..specs.correction import Criterion, Spec, Weight
from ..specs.validate import number, one_of
from .shared.checking import Checks, Rule, without
from .shared.preset import LEVELS, Row, presets
from .shared.recipe import BOTH, Recipe
from .shared.settings import boolean, settings_of
from .trl.config import KNOWN, MEANS, MODES, OLD_CAP, RATIOS, WHOLE, Trainer, refuse_entropy


def _weighed(level: str, masks: bool, cap: float) -> Spec:
    upper = number("cap", cap)
    if upper < 1.0:
        raise ValueError(f"cap: expected a number >= 1, the floor being 1 / cap, got {cap!r}")
    weight = Weight(*LEVELS[level], lower=1.0 / upper, upper=None if masks else upper)
    gates = (Criterion("ratio", *LEVELS[level], upper=upper),) if masks else ()
    return Spec(weight, gates, "zero" if masks else "mask", nonfinite="propagate")


def _rows() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for mode in MODES:
        level, way = mode.split("_")
        says = "and 0 above cap" if way == "mask" else "at most cap"
        rows[mode] = (
            f"w = {RATIOS[level]}, at least 1 / cap, {says}.",
            partial(_weighed, level, way == "mask"),
            {"cap": 3.0},
        )
    return rows


presets("axolotl", "axolotl 067b021 (2026-07-24)")(**_rows())

# Settings of TRL that the trainer does not read.
LEFT_OUT = (
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "entropy_coef",
    "use_adaptive_entropy",
)
OWN = {"use_bias_correction_kl": False, "vllm_importance_sampling_mode": "token_truncate", OLD_CAP: 3.0}


class AsyncTrainer(Trainer):
    """AsyncGRPOTrainer: TRL's losses, with one bound."""

    def recipe(self, config: object) -> Recipe:
        """Read the whole loss from the block `trl`, or from a configuration that holds it."""
        given = self._settings(config)
        refuse_entropy(given)
        return self._read(given)

    def _settings(self, config: object) -> dict[str, Any]:
        found = settings_of(config, dict.fromkeys(self.known), blocks=[("trl",)], whole=(*WHOLE, "rl", "base_model"))
        # null is the trainer's default there.
        given = {name: self.known[name] if value is None else value for name, value in found.items()}
        one_of("loss_type", given["loss_type"], self.losses)
        return given

    def _read(self, given: dict[str, Any]) -> Recipe:
        corrected = boolean("vllm_importance_sampling_correction", given["vllm_importance_sampling_correction"])
        given["vllm_importance_sampling_correction"] = corrected and boolean("use_vllm", given["use_vllm"])
        return self.loss(given["loss_type"], given, {"cap": given[OLD_CAP]})

    def written_bounds(self, bounds: Weight | Criterion) -> dict[str, Any]:
        """The cap, from which the floor follows."""
        return {OLD_CAP: bounds.high}


AXOLOTL = AsyncTrainer(
    "axolotl",
    known={name: value for name, value in (KNOWN | OWN).items() if name not in LEFT_OUT and "vespo" not in name},
    losses=tuple(loss_type for loss_type in MEANS if loss_type != "vespo"),
)
AXOLOTL.register(BOTH)
read, recipe, write = AXOLOTL.read, AXOLOTL.recipe, AXOLOTL.write

# --- mistakes ---

PLACE = "trl."
CORRECTION, MODE, CAP = (f"{PLACE}vllm_importance_sampling_{name}" for name in ("correction", "mode", "cap"))
USUAL = {MODE: OWN["vllm_importance_sampling_mode"], CAP: OWN[OLD_CAP]}
CHECKS = Checks(
    keys=(CORRECTION, MODE, CAP, f"{PLACE}use_vllm", f"{PLACE}off_policy_mask_threshold"),
    launchers=r"\baxolotl\s+train\b",
    temperature=f"{PLACE}temperature",
    top_p=f"{PLACE}top_p",
    top_k=f"{PLACE}top_k",
    min_p=f"{PLACE}min_p",
    bounds={"weight": (CAP,), "criteria": (CAP,)},
    rules=(
        *without(CORRECTION, MODE, CAP, default=True, usual=USUAL),
        *without(f"{PLACE}use_vllm", MODE, CAP, default=True, usual=USUAL),
        Rule(
            MODE,
            lambda run: run.is_(MODE, "token_mask", "sequence_mask") and run.on(CORRECTION, True),
            "{value} does not mask: axolotl raises the 0 of what is above the cap to 1 / cap, and trains on it",
            "write token_truncate or sequence_truncate",
        ),
    ),
)

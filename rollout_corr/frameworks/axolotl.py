"""axolotl: `vllm_importance_sampling_mode` and the losses of its AsyncGRPOTrainer; its other trainer is TRL's.

The modes have TRL's names and one setting, the cap C: every weight is at least 1 / C. Its masks write 0 for a ratio
above C and then raise that 0 to 1 / C, so that what is rejected trains; here it has weight 0, as the name says.
"""

from __future__ import annotations

from functools import partial

from ..specs.correction import Criterion, Spec, Weight
from .shared.checking import Checks, Rule, roles, without
from .shared.preset import HIGH, LEVELS, Row, presets
from .shared.recipe import BOTH
from .shared.settings import Given, Setting, at_least, given_in, unchecked, word
from .trl.config import CAP, CLIP_MAX, CLIP_MIN, CORRECTION, MEANS, MODE, MODES, RATIOS, TABLE, WHOLE, Trainer


def _weighed(level: str, masks: bool, cap: float) -> Spec:
    # The floor of weights is 1 / cap.
    weight = Weight(*LEVELS[level], lower=1.0 / cap, upper=None if masks else cap)
    gates = (Criterion("ratio", *LEVELS[level], upper=cap),) if masks else ()
    return Spec(weight, gates, "zero" if masks else "mask", nonfinite="propagate")


def _rows() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for mode in MODES:
        level, way = mode.split("_")
        says = "and 0 above cap" if way == "mask" else "at most cap"
        rows[mode] = (
            f"w = {RATIOS[level]}, at least 1 / cap, {says}.",
            partial(_weighed, level, way == "mask"),
            {"cap": Setting(3.0, at_least(1.0))},
        )
    return rows


presets("axolotl", "axolotl 067b021 (2026-07-24)")(**_rows())

# Settings of TRL that the trainer does not read.
LEFT_OUT = (CLIP_MAX, CLIP_MIN, "entropy_coef", "use_adaptive_entropy")
LOSSES = tuple(loss_type for loss_type in MEANS if loss_type != "vespo")
OWN = {
    "use_bias_correction_kl": False,
    "loss_type": word("dapo", LOSSES),
    MODE: unchecked("token_truncate"),
    CAP: Setting(3.0, at_least(1.0)),
}


class AsyncTrainer(Trainer):
    """AsyncGRPOTrainer: TRL's losses, with one bound."""

    def settings(self, config: object) -> Given:
        """Find the settings in the block `trl`, or in a configuration that holds it; null is the default there."""
        return given_in(config, self.table, blocks=[("trl",)], whole=(*WHOLE, "rl", "base_model")).without_null()


AXOLOTL = AsyncTrainer(
    "axolotl",
    {name: row for name, row in (TABLE | OWN).items() if name not in LEFT_OUT and "vespo" not in name},
    bounds={CAP: ("cap", HIGH)},
    losses=LOSSES,
)
AXOLOTL.register(BOTH)
settings, read, recipe, WRITTEN = AXOLOTL.settings, AXOLOTL.read, AXOLOTL.recipe, AXOLOTL.written

# --- mistakes ---

PLACE = "trl."
SWITCH, WAY, BOUND = f"{PLACE}{CORRECTION}", f"{PLACE}{MODE}", f"{PLACE}{CAP}"
CHECKS = Checks(
    keys=(SWITCH, WAY, BOUND, f"{PLACE}use_vllm", f"{PLACE}off_policy_mask_threshold"),
    launchers=r"\baxolotl\s+train\b",
    roles=roles(PLACE, "temperature top_p top_k min_p"),
    bounds={"weight": (BOUND,), "criteria": (BOUND,)},
    rules=(
        *without(SWITCH, WAY, BOUND, default=True, usual=True),
        *without(f"{PLACE}use_vllm", WAY, BOUND, default=True, usual=True),
        Rule(
            WAY,
            lambda run: run.is_(WAY, "token_mask", "sequence_mask") and run.on(SWITCH, True),
            "{value} does not mask: axolotl raises the 0 of what is above the cap to 1 / cap, and trains on it",
            "write token_truncate or sequence_truncate",
        ),
    ),
)

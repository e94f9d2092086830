"""axolotl: the statements of AsyncGRPOTrainer that make the ratio and the loss, and its off-policy mask."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.batches import PADDED, Batch
from conformance.declared import BF16, CLAMP, PROPAGATES, Declared, among, where_ours_trains
from conformance.peers.trl import MODES, loss_by, sequence_level, settings_of, tokenwise, weighed_kl
from conformance.rows import Result, Row, configuration, draw, preset, recipe
from conformance.sources import Source
from rollout_corr.frameworks.axolotl import AXOLOTL
from rollout_corr.frameworks.shared.settings import default_of

DISTRIBUTION, PACKAGE, CHECKOUT, UNDER = None, "axolotl", "axolotl", "src"

TRAINER = "axolotl/core/trainers/grpo/async_trainer.py"
MODE = "vllm_importance_sampling_mode"
OLD_CAP = "vllm_importance_sampling_cap"
DEFAULTS = {name: default_of(row) for name, row in AXOLOTL.table.items()}


def tied(settings: dict[str, Any]) -> bool:
    """Tell whether a token that is masked also has a gradient from the KL, or from the ratio of its sequence."""
    of_sequence = sequence_level(settings) and settings[MODE].startswith("token")
    return bool(settings.get("beta") or of_sequence)


def floored(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether a mode that masks meets a ratio above the cap."""
    settings = DEFAULTS | settings
    d = (given.old - given.rollout).double().where(given.mask, 0.0)
    d = d.sum(1) if settings[MODE].startswith("sequence") else d
    cap = settings.get("cap", settings[OLD_CAP])
    return bool(settings[MODE].endswith("mask") and (d > math.log(cap) - 1e-6).any())


def of_mode(**mode: str) -> tuple[Declared, ...]:
    """Declare the difference at masked tokens, and at others where a sequence ties them to masked ones."""
    stated = "a ratio that is masked", "axolotl's masks set a rejected weight to 0"
    return (
        Declared(*stated, lambda b, s: floored(b, mode | s), shows=where_ours_trains),
        Declared(*stated, lambda b, s: floored(b, mode | s) and tied(DEFAULTS | mode | s)),
    )


EMPTY = Declared("no token", "0 / 0 is NaN", among("all_masked"))
KL_RATIO = Declared("the KL's ratio", "weighted by the ratio of the sequence", lambda b, s: weighed_kl(b, DEFAULTS | s))
PADDED_LUSPO = Declared("luspo over padding", "averages tokens over padding", lambda b, s: tokenwise(b, DEFAULTS | s))


def rows(source: Source) -> Iterator[Row]:
    """Compare presets, recipes and the reader."""
    generate, compute = "AsyncGRPOTrainer._compute_deferred_scores", "AsyncGRPOTrainer._compute_loss"
    ratio_of = source.lines(TRAINER, generate, "sampling_logps = ", "data[")
    statements = source.lines(TRAINER, compute, "advantages = inputs", 'if self.loss_type in ("grpo", "sapo")')
    keep = source.cut(TRAINER, "AsyncGRPOTrainer.get_off_policy_mask")

    def ratio(given: Batch, mode: str, cap: float) -> Tensor:
        made = ratio_of(
            self=SimpleNamespace(vllm_importance_sampling_mode=mode, vllm_importance_sampling_cap=cap),
            data={"sampling_per_token_logps": given.rollout},
            old_per_token_logps=given.old,
            completion_mask=given.mask.to(torch.int64),
        )
        return made["is_ratio"]

    def weights(given: Batch, mode: str, cap: float = 3.0) -> Result:
        return {"weights": ratio(given, mode, cap).expand_as(given.old)}

    def loss(given: Batch, loss_type: str, **config: Any) -> Tensor:
        settings = DEFAULTS | config | {"loss_type": loss_type}
        cap = settings.pop("cap", settings[OLD_CAP])
        return loss_by(statements, given, ratio(given, settings[MODE], cap), get_off_policy_mask=keep, **settings)

    more: dict[str, Any] = {"declared": (*of_mode(), PROPAGATES, BF16, CLAMP), "kinds": PADDED}
    for mode in MODES:
        own = more | {"declared": (*of_mode(**{MODE: mode}), PROPAGATES, BF16, CLAMP)}
        run = partial(weights, mode=mode)
        yield preset(f"axolotl.{mode}", f"{TRAINER}: {mode}", run, draw(cap=(1.05, 3.0)), **own)
    for loss_type in AXOLOTL.losses:
        extra = {"luspo": (PADDED_LUSPO,), "dapo": (EMPTY,), "cispo": (EMPTY,)}.get(loss_type, ())
        own = more | {"declared": (*more["declared"], KL_RATIO, *extra)}
        if loss_type == "sapo":
            own["within"] = (3e-7, 2e-5)
        place, drawn = f"{TRAINER}: _compute_loss, {loss_type}", partial(drawn_settings, loss_type)
        yield recipe(f"axolotl.{loss_type}", place, partial(loss, loss_type=loss_type), drawn, **own)
        yield configuration("axolotl", place, loss, partial(drawn_config, loss_type), hold, **own)


def drawn_settings(loss_type: str, rng: Random) -> dict[str, Any]:
    """Draw what TRL's losses have, with the cap for its bounds."""
    drawn = settings_of(loss_type, ("token", "sequence"))(rng)
    return {name: value for name, value in drawn.items() if "clip_m" not in name} | {"cap": rng.choice((1.05, 3.0))}


def drawn_config(loss_type: str, rng: Random) -> dict[str, Any]:
    """Draw a block `trl`, without some of its settings."""
    drawn = {name: value for name, value in drawn_settings(loss_type, rng).items() if rng.random() < 0.8}
    return {"loss_type": loss_type, **drawn}


def hold(drawn: dict[str, Any]) -> Any:
    """Put the settings where they stand in a configuration."""
    block = {OLD_CAP if name == "cap" else name: value for name, value in drawn.items()}
    return {"base_model": "x", "rl": "grpo", "trl": block}

"""CTPO: its four losses, of the fork of verl that its authors published. Gradients alone: see docs/losses.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from conformance.batches import FINITE, Batch
from conformance.declared import CLAMP, Declared
from conformance.rows import Row, Side, draw, loss_of, of_loss
from conformance.sources import Source
from conformance.verl_parts import Settings

DISTRIBUTION, PACKAGE, CHECKOUT = None, "verl", "ctpo"

ALGORITHMS = "verl/trainer/ppo/core_algos.py"


# The bounds of the losses whose band is fixed, and of those whose band grows.
AROUND_ONE = draw(clip_ratio_low=(0.2, 0.02), clip_ratio_high=(0.28, 0.02), clip_ratio_c=(3.0, 1.1))
GROWING = draw(**dict.fromkeys(("la_clip_low", "la_clip_high", "la_clip_c"), (0.025, 0.05, 0.3)))

# The least weight here is exp(-20).
FAINT = Declared(
    "a product below exp(-20)",
    CLAMP.says,
    CLAMP.when,
    shows=lambda theirs, ours, given: torch.allclose(theirs.double(), ours.double(), rtol=2e-5, atol=3e-9),
)


def rows(source: Source) -> Iterator[Row]:
    """Compare the gradients of the recipes."""
    yield from (
        row(source, f"{mode}{'_la' * adaptive}", mode, adaptive)
        for mode in ("cumprod", "geomean")
        for adaptive in (False, True)
    )


def row(source: Source, name: str, mode: str, adaptive: bool) -> Row:
    """Compare one of them."""
    function = f"_compute_policy_loss_cum_token{'_la' * adaptive}_impl"
    cut = source.cut(ALGORITHMS, function, ActorConfig=Settings)
    power = {"clip_ratio_la_power": 0.5 if mode == "cumprod" else -0.5}

    def ours(given: Batch, **drawn: Any) -> Tensor:
        return loss_of(rc.recipe(f"ctpo.{name}", **drawn), given, rollout_logp=given.old)

    def theirs(given: Batch, **drawn: Any) -> Tensor:
        plain = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "global_batch_info": {}}
        config = Settings(**{**plain, **power, **drawn})
        return cut(given.old, given.new, given.token_advantages, given.mask, config=config, ratio_mode=mode)[0]

    def gradient(run: Any) -> Side:
        return lambda given, drawn: {"gradient": of_loss(run)(given, drawn)["gradient"]}

    place, settings = f"core_algos.py: {function}, the gradient", GROWING if adaptive else AROUND_ONE
    more: dict[str, Any] = {"kinds": FINITE, "declared": (FAINT,)}
    return Row("recipe", f"ctpo.{name}", place, gradient(ours), gradient(theirs), settings, **more)

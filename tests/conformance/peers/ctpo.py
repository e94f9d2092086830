"""CTPO: its four losses, of the fork of verl that its authors published. Gradients alone: see docs/losses.md."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import rollout_corr as rc
from conformance.batches import FINITE, Batch
from conformance.rows import Result, Row, Settings, loss_and_gradient
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = None, "verl", "ctpo"

ALGORITHMS = "verl/trainer/ppo/core_algos.py"


class Config(SimpleNamespace):
    """The attributes of verl's ActorConfig that the losses read."""

    def get(self, name: str, default: Any) -> Any:
        """Read a field of the mapping that ActorConfig is too."""
        return getattr(self, name, default)


def around_one(rng: Random) -> dict[str, Any]:
    """Draw the bounds of the losses whose band is fixed."""
    clips = {"clip_ratio_low": rng.choice((0.2, 0.02)), "clip_ratio_high": rng.choice((0.28, 0.02))}
    return clips | {"clip_ratio_c": rng.choice((3.0, 1.1))}


def growing(rng: Random) -> dict[str, Any]:
    """Draw the bounds of the losses whose band grows."""
    return {name: rng.choice((0.025, 0.05, 0.3)) for name in ("la_clip_low", "la_clip_high", "la_clip_c")}


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
    theirs = source.cut(ALGORITHMS, function, ActorConfig=Config)
    settings: Settings = growing if adaptive else around_one
    power = {"clip_ratio_la_power": 0.5 if mode == "cumprod" else -0.5}

    def both(given: Batch, drawn: dict[str, Any]) -> tuple[Result, Result]:
        mine, peer = given.trains(), given.trains()
        made = rc.recipe(f"ctpo.{name}", **drawn)
        policies = {"rollout_logp": given.old, "spec": made.spec}
        loss = rc.policy_loss(mine.new, given.advantages, mask=given.mask, loss=made.loss, **policies)
        config = Config(
            **{"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, **power, **drawn},
            global_batch_info={},
        )
        value, _ = theirs(given.old, peer.new, given.token_advantages, given.mask, config=config, ratio_mode=mode)
        sides = loss_and_gradient(loss.value, mine), loss_and_gradient(value, peer)
        return {"gradient": sides[0]["gradient"]}, {"gradient": sides[1]["gradient"]}

    return Row("recipe", f"ctpo.{name}", f"core_algos.py: {function}, the gradient", both, settings, kinds=FINITE)

"""Versions of the policies that sampled the tokens of a batch, and the loss with log-probs interpolated by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from conformance.batches import Batch
from conformance.rows import Result, Row, Settings, loss_and_gradient, none

CURRENT = 7


def versions_of(given: Batch) -> Tensor:
    """[B, T] int64 up to CURRENT, from 0 on and not falling along a row; -1 where nothing was sampled."""
    made = torch.Generator().manual_seed(given.seed)
    found = torch.randint(0, CURRENT + 1, given.mask.shape, generator=made).sort(1).values
    return found.where(given.mask, -1)


def staleness(name: str, theirs: str, run: Callable[..., Tensor], settings: Settings = none) -> Row:
    """Compare the mask of a preset that tests ages with a framework's, [B, T]."""

    def both(given: Batch, drawn: dict[str, Any]) -> tuple[Result, Result]:
        spec, versions = rc.spec(name, **drawn), versions_of(given)
        # What is not finite in the log-probs is not the matter here.
        logps = torch.zeros_like(given.old), torch.zeros_like(given.old)
        out = rc.correct(*logps, batch=rc.Batch(mask=given.mask, versions=rc.Versions(versions, CURRENT)), spec=spec)
        return {"mask": out.mask}, {"mask": run(given, versions, **drawn)}

    return Row("preset", name, theirs, both, settings)


def interpolated(
    name: str, shown: str, theirs: str, run: Callable[..., Tensor], settings: Settings, **more: Any
) -> Row:
    """Compare a recipe whose old log-probs are `rc.proximal`'s with a framework's loss, which has its own.

    Args:
        name: The recipe.
        shown: The name of the row.
        theirs: File and function of the framework.
        run: Takes a batch whose `new` has a gradient, versions, and the settings; returns the loss.
        settings: Draws the recipe's settings.
        **more: Further attributes of the row.
    """

    def both(given: Batch, drawn: dict[str, Any]) -> tuple[Result, Result]:
        versions, mine, peer = versions_of(given), given.trains(), given.trains()
        old = rc.proximal(mine.new, given.rollout, rc.Batch(versions=rc.Versions(versions, CURRENT)))
        logps = {"old_logp": old, "rollout_logp": given.rollout}
        spec, loss = rc.recipe(name, **drawn)
        out = rc.policy_loss(mine.new, given.advantages, loss=loss, mask=given.mask, spec=spec, **logps)
        return loss_and_gradient(out.value, mine), loss_and_gradient(run(peer, versions, **drawn), peer)

    return Row("recipe", shown, theirs, both, settings, **more)

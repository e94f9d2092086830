"""Versions of the policies that sampled the tokens of a batch, and the loss with log-probs interpolated by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from conformance.batches import Batch
from conformance.rows import Result, Row, Settings, loss_of, none, of_loss

CURRENT = 7


def versions_of(given: Batch) -> Tensor:
    """[B, T] int64 up to CURRENT, from 0 on and not falling along a row; -1 where nothing was sampled."""
    made = torch.Generator().manual_seed(given.seed)
    found = torch.randint(0, CURRENT + 1, given.mask.shape, generator=made).sort(1).values
    return found.where(given.mask, -1)


def staleness(name: str, place: str, run: Callable[..., Tensor], settings: Settings = none) -> Row:
    """Compare the mask of a preset that tests ages with a framework's, [B, T]."""

    def ours(given: Batch, drawn: dict[str, Any]) -> Result:
        # What is not finite in the log-probs is not the matter here.
        logps = torch.zeros_like(given.old), torch.zeros_like(given.old)
        batch = rc.Batch(mask=given.mask, versions=rc.Versions(versions_of(given), CURRENT))
        return {"mask": rc.correct(*logps, batch=batch, spec=rc.spec(name, **drawn)).mask}

    return Row(
        "preset", name, place, ours, lambda given, drawn: {"mask": run(given, versions_of(given), **drawn)}, settings
    )


def interpolated(name: str, shown: str, place: str, run: Callable[..., Tensor], settings: Settings, **more: Any) -> Row:
    """Compare a recipe whose old log-probs are `rc.proximal`'s with a framework's loss, which has its own."""

    def ours(given: Batch, **drawn: Any) -> Tensor:
        old = rc.proximal(given.new, given.rollout, rc.Batch(versions=rc.Versions(versions_of(given), CURRENT)))
        return loss_of(rc.recipe(name, **drawn), given, old_logp=old, rollout_logp=given.rollout)

    def theirs(given: Batch, **drawn: Any) -> Tensor:
        return run(given, versions_of(given), **drawn)

    return Row("recipe", shown, place, of_loss(ours), of_loss(theirs), settings, **more)

"""torchtitan: DAPOLoss of its RL experiment is called as it is, on the tokens of a batch one after another."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from conformance.batches import Batch
from conformance.declared import BF16
from conformance.rows import Row, configuration, draw, loss_of, of_loss, recipe
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = None, "torchtitan", "torchtitan"

LOSS = "torchtitan/experiments/rl/losses/dapo.py"


def rows(source: Source) -> Iterator[Row]:
    """Compare the preset, the recipes and the reader."""
    given_logprobs = {"compute_logprobs": lambda logits, labels, return_entropy: (logits, torch.zeros_like(logits))}
    call = source.cut(LOSS, "DAPOLoss.__call__", **given_logprobs)

    def loss(given: Batch, ratio_clip_low: float = 0.2, ratio_clip_high: float = 0.2) -> Tensor:
        flat = {name: getattr(given, name).flatten() for name in ("new", "rollout", "token_advantages")}
        value, _ = call(
            SimpleNamespace(ratio_clip_low=ratio_clip_low, ratio_clip_high=ratio_clip_high),
            flat["new"],
            None,
            float(given.rollout[given.mask].isfinite().sum()),
            generator_logprobs=flat["rollout"],
            advantages=flat["token_advantages"],
            loss_mask=given.mask.flatten(),
        )
        return value

    def symmetric(given: Batch, clip_eps: float) -> Tensor:
        return loss(given, clip_eps, clip_eps)

    def ours(given: Batch) -> Tensor:
        made = rc.Recipe(rc.spec("torchtitan.finite"), rc.recipe("torchtitan.grpo").loss)
        return loss_of(made, given, rollout_logp=given.rollout)

    def drawn_config(rng: Random) -> dict[str, Any]:
        low, high = rng.choice((0.1, 0.2)), rng.choice((0.2, 0.28))
        return rng.choice(({"ratio_clip_low": low, "ratio_clip_high": high}, {"ratio_clip_high": high}, {}))

    def hold(drawn: dict[str, Any]) -> Any:
        chunked = {"num_chunks": 8, "loss_fn": SimpleNamespace(**drawn)}
        return chunked if len(drawn) == 1 else {"trainer": {"loss": chunked}} if drawn else {"loss": {"clip_eps": 0.2}}

    more: dict[str, Any] = {"declared": (BF16,)}
    place = f"{LOSS}: DAPOLoss"
    yield Row("preset", "torchtitan.finite", f"{LOSS}: effective_loss_mask", of_loss(ours), of_loss(loss), **more)
    both_sides = draw(ratio_clip_low=(0.1, 0.2), ratio_clip_high=(0.2, 0.28))
    yield recipe("torchtitan.dapo", place, loss, both_sides, **more)
    yield recipe("torchtitan.grpo", place, symmetric, draw(clip_eps=(0.05, 0.2)), **more)
    yield configuration("torchtitan", place, loss, drawn_config, hold, lambda given, drawn: None, **more)

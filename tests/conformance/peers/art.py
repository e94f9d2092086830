"""ART: loss_fn, called as it is on tokens that all have log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from conformance.batches import KINDS, Batch
from conformance.declared import BF16, CLAMP, PROPAGATES
from conformance.rows import Row, draw, recipe
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = "openpipe-art", "art", "art"

FILE = "art/loss.py"
DECLARED = (PROPAGATES, BF16, CLAMP)


def rows(source: Source) -> Iterator[Row]:
    """Compare both recipes."""
    loss_fn = source.cut(FILE, "loss_fn", Loss=lambda **found: found)

    def loss(given: Batch, **settings: Any) -> Tensor:
        # ART shifts what it is given by one token, and groups rows by an id of their tokens.
        mask, ids = given.mask, torch.arange(1, given.mask.shape[0] + 1)[:, None].expand(given.mask.shape)
        inputs = {
            "logprobs": pad(given.rollout.where(mask, 0.0), (1, 0)),
            "advantages": pad(given.token_advantages, (1, 0)),
            "assistant_mask": pad(mask, (1, 0)),
            "weights": pad(torch.ones_like(given.rollout), (1, 0)),
            "group_ids": pad(ids, (1, 0)),
        }
        new = pad(given.new.where(mask, 0.0), (0, 1))
        return loss_fn(inputs, new, None, None, settings)["policy_loss"]

    levels = ("token", "sequence", "average", "geometric_average")

    of_cispo = draw(epsilon=(0.1, 1.0), epsilon_high=(None, 0.2, 4.0), importance_sampling_level=levels)
    of_ppo = draw(epsilon=(0.1, 0.2), importance_sampling_level=levels)

    # Its denominator has 1e-6 more.
    more: dict[str, Any] = {"declared": DECLARED, "kinds": KINDS, "within": (2e-6, 2e-5)}
    yield recipe("art.default", f"{FILE}: loss_fn", loss, of_cispo, **more)
    yield recipe("art.ppo", f"{FILE}: loss_fn, ppo", partial(loss, ppo=True), of_ppo, **more)

"""verl's clip_cov and kl_cov next to `rc.ClipCov` and `rc.KLCov`.

clip_cov draws by `torch.randperm`, which no other library repeats. Here its draw is replaced by the order in which this
package draws, so the rest can be compared: which tokens may be drawn, how many are, and the loss with its gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from conformance.batches import Batch
from conformance.rows import Declared, Row, draw, recipe
from conformance.sources import Source
from conformance.verl_parts import Settings, Stranger, actor
from rollout_corr.backends.sees_batch import uniform

LOSSES = "verl/trainer/ppo/core_algos.py"


# Some settings of clip_cov with which all that may be drawn are.
clip_cov = draw(
    clip_ratio_low=(0.02, 0.2),
    clip_ratio_high=(0.05, 0.28),
    clip_cov_ratio=(0.0002, 0.05, 0.3, 1.0),
    clip_cov_lb=(0.1, 1.0),
    clip_cov_ub=(2.0, 5.0),
)
kl_cov = draw(kl_cov_ratio=(0.0002, 0.05, 0.3), ppo_kl_coef=(0.1, 1.0))


def covariances(given: Batch) -> Tensor:
    """Of the tokens of the mask."""
    a, x = given.token_advantages[given.mask], given.new[given.mask]
    return (a - a.mean()) * (x - x.mean())


def ties(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether the last token chosen has about the covariance of the first that is not."""
    found = covariances(given).sort(descending=True).values.double()
    count = max(1, int(len(found) * settings["kl_cov_ratio"]))
    # Where all advantages are equal the covariances are what rounding leaves of their mean.
    scale = given.token_advantages[given.mask].abs().max() * given.new[given.mask].abs().max()
    return count < len(found) and bool((found[count - 1] - found[count]).abs() <= 1e-6 * scale)


TIED = Declared("covariances that tie", "differences.md", "takes all tied tokens", ties)


def rows(source: Source, declared: tuple[Declared, ...]) -> Iterator[Row]:
    """Compare both recipes."""
    given = {"ActorConfig": Settings, "AlgoConfig": Stranger}
    theirs = {name: source.cut(LOSSES, f"compute_policy_loss_{name}", **given) for name in ("clip_cov", "kl_cov")}

    def run(name: str) -> Callable[..., Tensor]:
        def loss(batch: Batch, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, **of_loss: float) -> Tensor:
            config = actor(
                policy_loss=Settings(**of_loss), clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high
            )
            arguments = (batch.old, batch.new, batch.token_advantages, batch.mask, "token-mean", config)
            with patch.object(torch, "randperm", lambda n: order(batch)):
                return theirs[name](*arguments)[0]

        return loss

    place = f"{LOSSES}: compute_policy_loss_"
    yield recipe("verl.clip_cov", f"{place}clip_cov", run("clip_cov"), clip_cov, declared=declared)
    yield recipe("verl.kl_cov", f"{place}kl_cov", run("kl_cov"), kl_cov, declared=(*declared, TIED))


def order(batch: Batch) -> Tensor:
    """The order in which this package draws, of the places that verl's function has found."""
    frame = sys._getframe(2)
    places = frame.f_locals["top_k_idx"]
    numbers = uniform(0, torch.arange(len(batch.mask))[:, None], batch.mask.long().cumsum(1))
    return numbers[places[:, 0], places[:, 1]].argsort()

"""Batches as slime and miles have them: a list of samples, over ranks of context parallelism."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from builders.threaded_ranks import Threads
from conformance.batches import Batch
from conformance.rows import draw

Samples = list[Tensor]


def lengths_of(given: Batch) -> list[int]:
    """The response of each row: up to its last valid token, and one token where there is none."""
    at = torch.arange(1, given.mask.shape[1] + 1)
    return (given.mask * at).amax(1).clamp(min=1).tolist()


def samples_of(x: Tensor, lengths: list[int]) -> Samples:
    """Cut the rows of a padded tensor to their responses."""
    return [row[:n] for row, n in zip(x, lengths, strict=True)]


def padded(samples: Samples, width: int) -> Tensor:
    """[B, T] from samples, 0 behind them."""
    return torch.stack([pad(x, (0, width - x.shape[0])) for x in samples])


def rollout_batch(given: Batch) -> dict[str, Any]:
    """The batch as the policy loss of slime and miles takes it, with a prompt of three tokens before each response."""
    lengths = lengths_of(given)
    masks = samples_of(given.mask.int(), lengths)
    return {
        "advantages": samples_of(given.token_advantages, lengths),
        "log_probs": samples_of(given.old, lengths),
        "rollout_log_probs": samples_of(given.rollout, lengths),
        "ref_log_probs": samples_of(given.ref, lengths),
        "loss_masks": masks,
        "response_lengths": lengths,
        "total_lengths": [n + 3 for n in lengths],
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "unconcat_tokens": None,
    }


class Ranks(Threads):
    """Ranks of context parallelism as threads: what Megatron tells of them, and their all-reduce."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.here = local()
        self.mpu = SimpleNamespace(
            get_context_parallel_rank=lambda: self.here.rank,
            get_context_parallel_world_size=lambda: ranks,
            get_context_parallel_group=lambda: None,
            get_data_parallel_world_size=lambda with_context_parallel: ranks,
        )
        self.dist = SimpleNamespace(nn=SimpleNamespace(all_reduce=self.all_reduce))

    def state(self) -> SimpleNamespace:
        """The parallel state of miles."""
        cp = SimpleNamespace(rank=self.here.rank, size=self.ranks, group=None)
        return SimpleNamespace(cp=cp, intra_dp=SimpleNamespace(size=1), intra_dp_cp=SimpleNamespace(size=self.ranks))

    def all_reduce(self, x: Tensor, group: Any = None) -> Tensor:
        """Add up the parts of all ranks; the gradient is this rank's own."""
        parts = self.exchange(self.here.rank, x)
        return x + sum(part.detach() for i, part in enumerate(parts) if i != self.here.rank)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call a function on each rank, and return what it gives."""

        def on(rank: int) -> Any:
            self.here.rank = rank
            return function(rank)

        # One rank in this thread, where a caller may count what it does.
        return [on(0)] if self.ranks == 1 else super().run(on)


@contextmanager
def loaded(name: str, **members: Any) -> Iterator[None]:
    """Let `sys.modules` hold a module with some members, as when the framework itself runs."""
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]


# The bounds of `--use-tis`.
bounds = draw(tis_clip=(1.05, 2.0, 5.0), tis_clip_low=(0.0, 0.5, 0.95))

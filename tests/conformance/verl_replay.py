"""verl: what its asynchronous replay buffer drops as stale."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

from torch import Tensor

from conformance.batches import Batch
from conformance.rows import Row, draw
from conformance.sources import Source
from conformance.versions import CURRENT, staleness

FILE, METHOD = "verl/trainer/ppo/v1/replay_buffer.py", "ReplayBufferAsync._stale_terminal_keys"


def rows(source: Source) -> Iterator[Row]:
    """Compare the preset of ages, where verl has that buffer."""
    if not source.has(FILE, METHOD):
        return
    stale = source.cut(FILE, METHOD)

    def run(given: Batch, versions: Tensor, max_off_policy_threshold: int) -> Tensor:
        oldest = {row: versions[row][mask].min().item() for row, mask in enumerate(given.mask) if mask.any()}
        buffer = SimpleNamespace(
            max_off_policy_strategy="drop",
            max_off_policy_threshold=max_off_policy_threshold,
            prompt_global_steps={"train": oldest},
            finished_keys={"train": set(oldest)},
        )
        kept = given.mask.clone()
        kept[sorted(stale(buffer, CURRENT, "train"))] = False
        return kept

    yield staleness("verl.staleness", f"{FILE}: {METHOD}", run, draw(max_off_policy_threshold=(1, 2, 4, 8)))

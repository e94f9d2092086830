"""The backend that runs a call, and the process groups that it runs over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from rollout_corr.backends import operators
from rollout_corr.backends.batch import Batch
from rollout_corr.backends.staleness import Versions
from rollout_corr.metrics.collectives import check_group
from rollout_corr.metrics.labels import SEQUENCES
from rollout_corr.spec.choices import SEQUENCE_ORDERS, SequenceOrder
from rollout_corr.spec.validate import choice

BackendName = Literal["auto", "triton", "torch"]

BACKENDS: tuple[BackendName, ...] = get_args(BackendName)


class Backend(NamedTuple):
    """A backend and the reason why it was chosen."""

    name: str
    reason: str


def backend_for(tensor: Tensor) -> Backend:
    """Say which backend `backend="auto"` takes for this tensor, and why.

    Args:
        tensor: Any tensor on the device in question.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor: expected a tensor, got {type(tensor).__name__}")
    where = tensor.device.type
    if where not in operators.DEVICES:
        return Backend("torch", f"tensors on {where} run on the plain-torch reference")
    reason = operators.why_not(tensor.device)
    if reason is not None:
        return Backend("torch", reason)
    return Backend("triton", f"tensors on {where} run on the Triton kernels")


def chosen_backend(tensor: Tensor, backend: str) -> str:
    """Name the backend that runs for a tensor; raise if the one asked for cannot."""
    chosen = backend_for(tensor).name if backend == "auto" else backend
    if chosen == "triton" and (reason := operators.why_not(tensor.device)) is not None:
        raise ValueError(f"backend: expected 'auto' or 'torch' for {tensor.device} tensors, got 'triton': {reason}")
    return chosen


class Groups(NamedTuple):
    """The process groups of a call; None: this rank alone.

    Attributes:
        batch: Ranks over which means and counts of the batch are taken.
        sequence: Ranks over which the tokens of each sequence are split.
        order: Which of them a rank holds, where something depends on it.
    """

    batch: Any = None
    sequence: Any = None
    order: SequenceOrder | None = None

    def some(self) -> bool:
        """True if there is a group at all."""
        return self.batch is not None or self.sequence is not None

    def check(self) -> None:
        """Refuse objects that are no groups of this rank."""
        check_group("sequence_group", self.sequence)
        check_group("batch_group", self.batch)
        if self.order is not None:
            choice("sequence_order", self.order, SEQUENCE_ORDERS)
            if self.sequence is None:
                raise ValueError(f"sequence_order: expected None without a sequence_group, got {self.order!r}")

    def check_advantages(self, batch: Batch, leader: object, advantages: object) -> None:
        """Refuse advantages that a rank could take for those of its tokens.

        Args:
            batch: The batch as it was read.
            leader, advantages: Log-probs and advantages as the caller gave them.
        """
        if self.sequence is not None:
            from rollout_corr.backends import split

            packed = batch.offsets is not None
            split.check_per_sequence("advantages", advantages, leader, batch.per_sequence, packed)

    def check_versions(self, batch: Batch, leader: object, versions: Versions | None) -> None:
        """Refuse versions that a rank could take for those of its tokens; arguments are those of `check_advantages`."""
        if self.sequence is not None and versions is not None:
            from rollout_corr.backends import split

            packed = batch.offsets is not None
            split.check_per_sequence("versions", versions.given, leader, batch.ages_per_sequence, packed)

    def check_labels(self, batch: Batch, leader: object, labels: object) -> None:
        """Refuse labels that a rank could take for those of its tokens; arguments are those of `check_advantages`."""
        if self.sequence is not None and isinstance(labels, Mapping):
            from rollout_corr.backends import split

            packed = batch.offsets is not None
            for (name, given), found in zip(labels.items(), batch.labels, strict=False):  # made ages come behind them
                of_sequences = found.labels.units == SEQUENCES
                split.check_per_sequence(f"labels[{name!r}]", given, leader, of_sequences, packed)

    def first(self) -> bool:
        """True if this rank adds the statistics of whole sequences, which all ranks of the sequence group know."""
        if self.sequence is None:
            return True
        from rollout_corr.backends import split

        return split.is_first(self.sequence)

    def rank(self) -> int:
        """The number of this rank in the batch group; 0 without one."""
        if self.batch is None:
            return 0
        from rollout_corr.backends import split

        return split.rank_in(self.batch)

    def sum(self, totals: Tensor) -> Tensor:
        """Add up totals over the batch group; ranks that share sequences count once."""
        if self.batch is None:
            return totals
        from rollout_corr.backends import split

        return split.sum_over(totals, self.batch, self.sequence)

    def highest(self, x: Tensor) -> Tensor:
        """Take the maximum of each over the batch group."""
        if self.batch is None:
            return x
        from rollout_corr.backends import split

        return split.highest_over(x, self.batch)

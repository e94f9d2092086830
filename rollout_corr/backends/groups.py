"""The process groups that a call runs over: what is added up over them, and the comparison of the ranks' calls."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from rollout_corr.backends.batch import Batch
from rollout_corr.backends.layouts import dtype_of
from rollout_corr.backends.staleness import Versions
from rollout_corr.metrics import collectives
from rollout_corr.metrics.collectives import check_group
from rollout_corr.metrics.labels import SEQUENCES
from rollout_corr.spec.choices import SEQUENCE_ORDERS, SequenceOrder
from rollout_corr.spec.validate import choice


class Claims(NamedTuple):
    """The parts of a call that have to be equal with validate=True, as text by name.

    Attributes:
        call: On all ranks.
        sequences: On ranks that share sequences.
    """

    call: dict[str, str]
    sequences: dict[str, str]


def claims_of(call: str, batch: Batch, tensors: dict[str, Tensor | None], fixed: dict[str, str]) -> Claims:
    """The claims of a call; reads advantages that are given per sequence.

    Args:
        call: Its name.
        batch: The batch, with its advantages.
        tensors: Those whose dtypes have to be equal, by name; None for one that was not given.
        fixed: Everything else that has to be equal, as text by name.
    """
    dtypes = {name: "None" if x is None else dtype_of(x) for name, x in tensors.items()}
    sequences = {"sequences": str(batch.count), "layout": "rows" if batch.offsets is None else "packed"}
    if batch.turns is not None:
        sequences["turns"] = str(batch.turns.shape[0] - 1)
    advantages = "None"
    if batch.advantages is not None:
        advantages = "per sequence" if batch.per_sequence else "per token"
        if batch.per_sequence:
            sequences |= {f"advantages[{i}]": repr(x) for i, x in enumerate(batch.advantages.tolist())}
    on = {"advantages": advantages, "device": batch.train.device.type}
    return Claims({"call": call, **fixed, **dtypes, **on}, sequences)


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

    # --- the comparison of calls ---

    def compare(self, claims: Claims) -> None:
        """Raise on all ranks of a group where their calls differ: one collective a group, and a read on the host.

        First over the sequence group; the batch group hears of an error there, because its ranks wait.
        """
        raised: ValueError | None = None
        for name, group in (("sequence_group", self.sequence), ("batch_group", self.batch)):
            if group is None or (name == "batch_group" and group is self.sequence):
                continue
            if raised is not None:
                told = {collectives.RAISED: f"ValueError: {raised}"}
            elif collectives.RAISED in claims.call:
                told = claims.call
            else:
                told = {**claims.call, name: collectives.named(collectives.ranks_of(group))}
                told |= claims.sequences if name == "sequence_group" else {}
            try:
                collectives.compare(name, group, told)
            except ValueError as error:
                raised = raised or error
        if raised is not None:
            raise raised

    def tell(self, error: Exception) -> None:
        """Let ranks that compare their calls know of the error that this one is about to raise."""
        # Neither their complaint about it nor a group that has gone is what this rank has to report.
        with contextlib.suppress(ValueError, RuntimeError):
            self.compare(Claims({collectives.RAISED: f"{type(error).__name__}: {error}"}, {}))

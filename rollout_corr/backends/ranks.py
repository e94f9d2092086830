"""The process groups that a call runs over: what is added up over them, and the comparison of the ranks' calls."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..specs.operands import LossOperands
from .batch import OpenBatch
from .layouts import dtype_of

if TYPE_CHECKING or dist.is_available():
    from torch.distributed import ProcessGroup


class Claims(NamedTuple):
    """The parts of a call that have to be equal with validate=True, as text by name."""

    call: dict[str, str]  # equal on all ranks
    sequences: dict[str, str]  # equal on ranks that share sequences


def claims_of(
    call: str, batch: OpenBatch | LossOperands, tensors: dict[str, Tensor | None], fixed: dict[str, str]
) -> Claims:
    """The claims of a call by name, with the dtypes of tensors and fixed text; reads advantages per sequence."""
    dtypes = {name: "None" if x is None else dtype_of(x) for name, x in tensors.items()}
    sequences = {"sequences": str(batch.count), "layout": "rows" if batch.offsets is None else "packed"}
    if batch.turns is not None:
        sequences["turns"] = str(batch.turns.shape[0] - 1)
    advantages = "None"
    if batch.advantages is not None:
        advantages = "per sequence" if batch.per_sequence else "per token"
        if batch.per_sequence:
            sequences |= {f"advantages[{i}]": repr(x) for i, x in enumerate(batch.advantages.tolist())}
    on = {"advantages": advantages, "device": batch.first.device.type}
    return Claims({"call": call, **fixed, **dtypes, **on}, sequences)


class Ranks(NamedTuple):
    """The process groups that a batch is spread over; None: this rank alone.

    Attributes:
        batch: A torch.distributed group whose ranks hold other sequences of the same batch. `normalize="batch"` takes
            its mean over all of them, `normalize="group"` the means of groups that span ranks, and a loss counts its
            tokens or sequences over them: one all-reduce each.
        sequence: A torch.distributed group over which the tokens of each sequence are split, in any way. All its ranks
            pass the same sequences in the same order, each with the tokens that it holds, perhaps none, and get the
            results of the whole sequences: one all-reduce. Statistics are complete when they are reduced over the
            ranks. The value of a loss is this rank's share: the loss is the sum of all ranks' values, whose gradient
            every rank gets for its own tokens. See docs/ranks.md.
    """

    batch: ProcessGroup | None = None
    sequence: ProcessGroup | None = None

    def some(self) -> bool:
        """True if there is a group at all."""
        return self.batch is not None or self.sequence is not None

    def check(self) -> None:
        """Refuse objects that are no groups of this rank."""
        if self.some():
            from ..metrics.collectives import check_group

            check_group("ranks.sequence", self.sequence)
            check_group("ranks.batch", self.batch)

    def check_per_sequence(self, name: str, given: object, leader: object, packed: bool) -> None:
        """Refuse an argument per sequence in a shape that one per token can have on a rank with few tokens.

        Args:
            name: The argument, which was read as [S].
            given: That argument, as it came.
            leader: The log-probs, as they came.
            packed: The log-probs are [N] or [1, N].
        """
        if self.sequence is None or not isinstance(given, Tensor) or not isinstance(leader, Tensor) or leader.is_nested:
            return
        wanted = "[S, 1]" if packed else "[S]"
        if packed and leader.dim() == 2 and given.numel() == 1:
            wanted = "[1, N]"
        if wanted == "[1, N]" or (given.dim() == 2) != packed:
            raise ValueError(
                f"{name}: expected shape {wanted} with ranks.sequence, where {list(given.shape)} can also be the "
                "shape of a rank's tokens"
            )

    def first(self) -> bool:
        """True if this rank adds the statistics of whole sequences, which all ranks of `Ranks.sequence` know."""
        return self.sequence is None or dist.get_rank(self.sequence) == 0

    def rank(self) -> int:
        """The number of this rank in `Ranks.batch`; 0 without one."""
        return 0 if self.batch is None else int(dist.get_rank(self.batch))

    def sum(self, totals: Tensor) -> Tensor:
        """Add up totals over `Ranks.batch`.

        All ranks of `Ranks.sequence` know the same totals. Those of them that are in `Ranks.batch` too count once.
        """
        if self.batch is None:
            return totals
        from ..metrics import collectives

        counts = True
        if self.sequence is not None:
            shared = set(dist.get_process_group_ranks(self.sequence)) & set(dist.get_process_group_ranks(self.batch))
            counts = dist.get_rank() == min(shared)
        totals = totals.clone() if counts else torch.zeros_like(totals)
        return collectives.all_reduce(totals, self.batch, "ranks.batch: the mean or count over the batch")

    def highest(self, x: Tensor) -> Tensor:
        """Take the maximum of each over `Ranks.batch`."""
        if self.batch is None:
            return x
        from ..metrics import collectives

        what = "ranks.batch: the largest of each group"
        return collectives.all_reduce(x.clone(), self.batch, what, dist.ReduceOp.MAX)

    def gathered(self, *columns: Tensor) -> list[Tensor]:
        """Values of all ranks of `Ranks.batch`, one rank after the other; columns, [n] each, are of one length.

        The host waits for the lengths.
        """
        from ..metrics import collectives

        return collectives.gathered(columns, self.batch, "ranks.batch: the values that decide a bound")

    # --- the comparison of calls ---

    def compare(self, claims: Claims) -> None:
        """Raise on all ranks of a group where their calls differ: one collective a group, and a read on the host.

        First over `Ranks.sequence`; `Ranks.batch` hears of an error there, because its ranks wait.
        """
        from ..metrics import collectives

        raised: ValueError | None = None
        for name, group in (("ranks.sequence", self.sequence), ("ranks.batch", self.batch)):
            if group is None or (name == "ranks.batch" and group is self.sequence):
                continue
            if raised is not None:
                told = {collectives.RAISED: f"ValueError: {raised}"}
            elif collectives.RAISED in claims.call:
                told = claims.call
            else:
                told = {**claims.call, name: collectives.named(collectives.ranks_of(group))}
                told |= claims.sequences if name == "ranks.sequence" else {}
            try:
                collectives.compare(name, group, told)
            except ValueError as error:
                raised = raised or error
        if raised is not None:
            raise raised

    def tell(self, error: Exception) -> None:
        """Let ranks that compare their calls know of the error that this one is about to raise."""
        from ..metrics import collectives

        # Neither their complaint about it nor a group that has gone is what this rank has to report.
        with contextlib.suppress(ValueError, RuntimeError):
            self.compare(Claims({collectives.RAISED: f"{type(error).__name__}: {error}"}, {}))


THIS_RANK = Ranks()

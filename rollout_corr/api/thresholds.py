"""Bounds that several calls decide together: `threshold_statistics` of each micro-batch, added up round by round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..backends.bounds_of_batch import Progress, added_up, record
from ..backends.bounds_of_batch import Thresholds as Thresholds
from ..backends.given import Batch, batch_given
from ..backends.layouts import LogProbs
from ..backends.read import Given
from ..backends.search import Search
from ..metrics.collectives import all_reduce, check_group
from ..specs.bounds_of_batch import Place
from ..specs.checked import known_keywords
from ..specs.correction import Spec
from ..specs.validate import wrong_type
from .correct import read_request, spec_given

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False, repr=False)
class ThresholdStatistics:
    """Counts of one round of the search for bounds: tables of integers that merge by +, in any order to the same bits.

    Attributes:
        known: What was known before the round.
        searches: The searches under way, by the label of a criterion and the side.
        tables: Of each, [1 + amounts, groups, digits] int64 on the device.
    """

    known: Thresholds
    searches: dict[Place, Search]
    tables: dict[Place, Tensor]

    def __repr__(self) -> str:
        """The size; nothing is read from the device."""
        return f"ThresholdStatistics({sum(table.numel() for table in self.tables.values())} counts)"

    def merge(self, other: ThresholdStatistics) -> ThresholdStatistics:
        """Add the counts of another micro-batch."""
        if not isinstance(other, ThresholdStatistics):
            raise TypeError(f"other: expected ThresholdStatistics, got {type(other).__name__}")
        if other.known.spec != self.known.spec:
            raise ValueError(f"other: expected counts of the same Spec {self.known.spec!r}, got {other.known.spec!r}")
        rounds = [{place: (one.round, one.dtype) for place, one in x.searches.items()} for x in (self, other)]
        if rounds[0] != rounds[1]:
            raise ValueError(f"other: expected counts of the same round and dtype {rounds[0]}, got {rounds[1]}")
        for place, table in self.tables.items():
            if table.shape != other.tables[place].shape:
                raise ValueError(
                    "other: expected counts of as many groups, by the same groups.count, got tables "
                    f"{list(table.shape)} and {list(other.tables[place].shape)}"
                )
        return replace(self, tables={place: table + other.tables[place] for place, table in self.tables.items()})

    def __add__(self, other: ThresholdStatistics) -> ThresholdStatistics:
        return self.merge(other)

    @staticmethod
    def sum(parts: Iterable[ThresholdStatistics]) -> ThresholdStatistics:
        """Merge the statistics of all micro-batches."""
        parts = list(parts)
        if not parts:
            raise ValueError("parts: expected at least one ThresholdStatistics, got none")
        for place, part in enumerate(parts):
            if not isinstance(part, ThresholdStatistics):
                raise wrong_type(f"parts[{place}]", "ThresholdStatistics", part)
        total = parts[0]
        for part in parts[1:]:
            total = total.merge(part)
        return total

    def all_reduce(self, group: ProcessGroup | None = None) -> ThresholdStatistics:
        """Add up over the ranks of a process group, each with its own micro-batches: one collective.

        Args:
            group: A torch.distributed process group; None is the default group.
        """
        check_group("group", group)

        def add_up(totals: Tensor) -> Tensor:
            return all_reduce(totals.clone(), group, "ThresholdStatistics.all_reduce: the counts of a round")

        return replace(self, tables=added_up(self.tables, add_up))

    def thresholds(self) -> Thresholds:
        """Find what is known after the round, from the counts of all micro-batches and ranks."""
        return Thresholds(self.known.spec, self.known.progress.after(self.searches, self.tables))


@known_keywords
def threshold_statistics(
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    batch: Batch | None = None,
    *,
    mask: LogProbs | None = None,
    cu_seqlens: Tensor | None = None,
    spec: Spec | Thresholds,
    advantages: LogProbs | None = None,
) -> ThresholdStatistics:
    """Count the values of a micro-batch for bounds that all micro-batches decide together.

    A round counts every micro-batch, adds up and calls `thresholds()`. After three rounds for tokens and `KeepESS`, and
    six for turns and sequences, `Thresholds.complete` is True and `correct(..., spec=thresholds)` applies them.
    See docs/turns_groups_labels.md. The tensors and the batch as for `correct`.

    Args:
        train_logp: Log-probs under the trainer's policy, in any layout of `correct`.
        rollout_logp: Log-probs under the engine that sampled the tokens, same layout.
        batch: Everything else about the tokens. For bounds with within='group' its groups have an index and a count:
            the group of each sequence by a number that is the same in all micro-batches and on all ranks, and the
            number of these groups, those without a sequence in this micro-batch too.
        mask: Short for `Batch(mask=...)`: non-zero is valid.
        cu_seqlens: The offsets of packed sequences, short for `Batch(cu_seqlens=...)`: [S + 1] int32 or int64.
        spec: In the first round a Spec with bounds that the batch decides; then the `Thresholds` of the round before.
        advantages: As for `correct`.

    Raises:
        ValueError: A Spec without such bounds, or bounds that are known already.
        TypeError: An argument of the wrong type.
    """
    tokens = batch_given(batch, mask, cu_seqlens)
    of, known = spec_given(spec, tokens)
    groups = tokens.groups
    if of.asks_groups and (groups is None or groups.index is None or groups.count is None):
        raise ValueError(
            "groups: expected rc.Groups(index=..., count=...) for a bound with within='group', by numbers that name "
            f"groups in all micro-batches, got {groups!r}; groups that lie whole in one micro-batch need no other: "
            "give correct the bound"
        )
    if groups is not None and not of.asks_groups:
        tokens = replace(tokens, groups=None)
    opened, run = read_request(Given(train_logp, rollout_logp, tokens, _without_groups(of), advantages))
    if not of.asks_batch:
        raise ValueError(f"spec: expected a bound that the batch decides, got {of!r}")
    if known is None:
        known = Thresholds(of, Progress({}, {}))
    if known.complete:
        raise ValueError("spec: expected bounds that are not all known, got complete Thresholds; pass them to correct")
    known.check_groups(opened.groups)
    with torch.no_grad():
        recording = record(opened, run, known.progress)
        return ThresholdStatistics(known, recording.searches, recording.tables())


def _without_groups(spec: Spec) -> Spec:
    """The Spec without means of groups, which divide weights after what is counted here."""
    if spec.weight is None or not spec.normalizes_groups:
        return spec
    return replace(spec, weight=replace(spec.weight, normalize=None))

"""Bounds that several calls decide together: `threshold_statistics` of each micro-batch, added up round by round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rollout_corr.api.correct import Renormalized, Turns, given_by, mask_by_keyword, read_request
from rollout_corr.backends.bounds_of_batch import Progress, added_up, record
from rollout_corr.backends.bounds_of_batch import Thresholds as Thresholds
from rollout_corr.backends.layouts import LogProbs, described
from rollout_corr.backends.search import Search
from rollout_corr.metrics.collectives import all_reduce, check_group
from rollout_corr.specs.bounds_of_batch import Place
from rollout_corr.specs.correction import Spec
from rollout_corr.specs.validate import shown


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
                    "other: expected counts of as many groups, by the same group_count, got tables "
                    f"{list(table.shape)} and {list(other.tables[place].shape)}"
                )
        return replace(self, tables={place: table + other.tables[place] for place, table in self.tables.items()})

    def __add__(self, other: ThresholdStatistics) -> ThresholdStatistics:
        return self.merge(other)

    @staticmethod
    def sum(parts: Iterable[ThresholdStatistics]) -> ThresholdStatistics:
        """Merge those of all micro-batches."""
        parts = list(parts)
        if not parts:
            raise ValueError("parts: expected at least one ThresholdStatistics, got none")
        for place, part in enumerate(parts):
            if not isinstance(part, ThresholdStatistics):
                raise TypeError(
                    f"parts[{place}]: expected ThresholdStatistics, got {type(part).__name__} {shown(part)}"
                )
        total = parts[0]
        for part in parts[1:]:
            total = total.merge(part)
        return total

    def all_reduce(self, group: Any = None) -> ThresholdStatistics:
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


@mask_by_keyword
def threshold_statistics(
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    mask: LogProbs | None = None,
    *,
    spec: Spec,
    known: Thresholds | None = None,
    cu_seqlens: Tensor | None = None,
    advantages: LogProbs | None = None,
    external: Mapping[str, LogProbs] | None = None,
    log_mass: LogProbs | None = None,
    renormalized: Renormalized = "rollout",
    turns: Turns | None = None,
    max_turns: int | None = None,
    versions: LogProbs | None = None,
    current_version: int | None = None,
    entropy: LogProbs | None = None,
    group_index: Tensor | None = None,
    group_count: int | None = None,
    validate: bool = False,
) -> ThresholdStatistics:
    """Count the values of a micro-batch for bounds that all micro-batches decide together.

    A round counts every micro-batch, adds up and calls `thresholds()`. After three rounds for tokens and `KeepESS`, and
    six for turns and sequences, `Thresholds.complete` is True and `correct(..., thresholds=...)` applies them.
    See docs/batches.md. The tensors, `cu_seqlens` and the other arguments are those of `correct`.

    Args:
        spec: A Spec with bounds that the batch decides.
        known: What is known after the round before; None in the first.
        group_index: [S] int64 or int32, for bounds with within='group': the group of each sequence, by a number that is
            the same in all micro-batches and on all ranks.
        group_count: The number of these groups, those without a sequence in this micro-batch too.

    Raises:
        ValueError: A Spec without such bounds, or bounds that are known already.
        TypeError: An argument of the wrong type.
    """
    if known is not None and not isinstance(known, Thresholds):
        raise TypeError(f"known: expected Thresholds or None, got {type(known).__name__} {shown(known)}")
    of_groups = isinstance(spec, Spec) and spec.asks_groups
    if of_groups and (group_index is None or group_count is None):
        raise ValueError(
            "group_index: expected it with group_count for a bound with within='group', by numbers that name groups in "
            f"all micro-batches, got group_index={described(group_index)}, group_count={group_count!r}; groups that "
            "lie whole in one micro-batch need no other: give correct the bound"
        )
    given = given_by(
        train_logp,
        rollout_logp,
        mask,
        cu_seqlens=cu_seqlens,
        spec=_without_groups(spec),
        advantages=advantages,
        external=external,
        log_mass=log_mass,
        renormalized=renormalized,
        turns=turns,
        max_turns=max_turns,
        entropy=entropy,
        versions=versions,
        current_version=current_version,
        group_index=group_index if of_groups else None,
        group_count=group_count if of_groups else None,
        validate=validate,
    )
    batch, run = read_request(given)
    if not spec.asks_batch:
        raise ValueError(f"spec: expected a bound that the batch decides, got {spec!r}")
    if known is None:
        known = Thresholds(spec, Progress({}, {}))
    if known.spec != spec:
        raise ValueError(f"known: expected Thresholds of the same Spec {spec!r}, got those of {known.spec!r}")
    if known.complete:
        raise ValueError("known: expected bounds that are not all known, got complete Thresholds; pass them to correct")
    known.check_groups(batch.groups)
    with torch.no_grad():
        recording = record(batch, run, known.progress)
        return ThresholdStatistics(known, recording.searches, recording.tables())


def _without_groups(spec: Spec) -> Spec:
    """The Spec without means of groups, which divide weights after what is counted here."""
    if not isinstance(spec, Spec) or spec.weight is None or not spec.normalizes_groups:
        return spec
    return replace(spec, weight=replace(spec.weight, normalize=None))

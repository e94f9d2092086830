"""Labels, such as the environment of a sequence or the policy version of a token: their names, and those of statistics.

A label of sequences has the statistics that a call with its sequences alone would give. A label of tokens has those of
its tokens, no metric of sequences; the weight and the rejection of a token are those of its whole sequence.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rollout_corr.metrics.aggregates import aggregates_of
from rollout_corr.metrics.rows import Aggregate
from rollout_corr.spec.caches import cached
from rollout_corr.spec.correction import Spec

# Tokens up to which a batch is small.
SMALL = 65_536

Units = Literal["sequences", "tokens"]
SEQUENCES: Units = "sequences"
TOKENS: Units = "tokens"


class Labels(NamedTuple):
    """A property that sequences, or tokens, are told apart by, with a name for each of its values.

    Attributes:
        name: Such as "environment".
        values: The name of each label, in the order of the ids.
        units: Those that have a label of their own.
    """

    name: str
    values: tuple[str, ...]
    units: Units = SEQUENCES

    @property
    def every(self) -> tuple[str, ...]:
        """The labels, and behind them that of units whose id names none."""
        return (*self.values, "?")


class Labelled(NamedTuple):
    """Labels, and those of a batch.

    Attributes:
        labels: Their names.
        ids: Integers, [S], or those of tokens in the shape of the batch.
    """

    labels: Labels
    ids: Tensor


# --- names ---


class Columns(NamedTuple):
    """The statistics of a label, in order.

    Attributes:
        of_tokens: Rows that are taken over its tokens.
        of_sequences: Behind them, rows that are taken over its sequences.
        sums, maxima: Names of the former.
        all_sums, all_maxima: Names of all.
    """

    of_tokens: tuple[Aggregate, ...]
    of_sequences: tuple[Aggregate, ...]
    sums: tuple[str, ...]
    maxima: tuple[str, ...]
    all_sums: tuple[str, ...]
    all_maxima: tuple[str, ...]


@cached(maxsize=256)
def columns_of(spec: Spec, units: str) -> Columns:
    """The statistics of a label of sequences, or of tokens.

    A label of tokens may have a part of a sequence: it has what is defined over tokens alone.
    """
    rows, whole = aggregates_of(spec), ("sequences", "measured") if units == SEQUENCES else ()
    of_sequences = tuple(row for row in rows if row.at in whole)
    of_tokens = tuple(row for row in rows if row.of_tokens is not None and row.at not in whole)
    sums, more_sums = (tuple(name for row in part for name in row.sums) for part in (of_tokens, of_sequences))
    maxima, more_maxima = (tuple(name for row in part for name in row.maxima) for part in (of_tokens, of_sequences))
    return Columns(of_tokens, of_sequences, sums, maxima, sums + more_sums, maxima + more_maxima)


def sums_of(labels: Labels, spec: Spec) -> tuple[str, ...]:
    """Names of all sums, each of all labels before the next."""
    return _named(labels, columns_of(spec, labels.units).all_sums)


def maxima_of(labels: Labels, spec: Spec) -> tuple[str, ...]:
    """Names of all maxima, likewise."""
    return _named(labels, columns_of(spec, labels.units).all_maxima)


def count_outside(labels: Labels) -> str:
    """Name the sum of units whose id names no label."""
    return f"{labels.name}={labels.every[-1]}/{labels.units}"


def outside_of(labels: Labels) -> str:
    """The key of the count of units whose id names no label."""
    return f"{labels.name}/outside/{labels.units}"


def _named(labels: Labels, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{labels.name}={value}/{name}" for name in names for value in labels.every)


# --- places ---


def places_of(labelled: Labelled) -> Tensor:
    """int64 in the shape of the ids: the place of each label; an id that names none has the place behind all of them.

    An index out of range would end a process on a device.
    """
    ids, many = labelled.ids.long(), len(labelled.labels.values)
    return torch.where((ids >= 0) & (ids < many), ids, many)

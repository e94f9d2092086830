"""Labels, such as the environment of a sequence or the policy version of a token: their names, and those of statistics.

A label of sequences has the statistics that a call with its sequences alone would give. A label of tokens has those of
its tokens, no metric of sequences; the weight and the rejection of a token are those of its whole sequence.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

# Tokens up to which a batch is small.
SMALL = 65_536

Units = Literal["sequences", "tokens"]
SEQUENCES: Units = "sequences"
TOKENS: Units = "tokens"


class LabelSet(NamedTuple):
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


class Labeled(NamedTuple):
    """Labels, and those of a batch.

    Attributes:
        labels: Their names.
        ids: Integers, [S], or those of tokens in the shape of the batch.
    """

    labels: LabelSet
    ids: Tensor


def count_outside(labels: LabelSet) -> str:
    """The name of the sum of units whose id names no label."""
    return f"{labels.name}={labels.every[-1]}/{labels.units}"


def outside_of(labels: LabelSet) -> str:
    """The key of the count of units whose id names no label."""
    return f"{labels.name}/{labels.units}_outside"


def places_of(labeled: Labeled) -> Tensor:
    """int64 in the shape of the ids: the place of each label; an id that names none has the place behind all of them.

    An index out of range would end a process on a device.
    """
    ids, many = labeled.ids.long(), len(labeled.labels.values)
    return torch.where((ids >= 0) & (ids < many), ids, many)

"""Labels, such as the environment of a sequence or the policy version of a token: their names and statistics' names.

A label of sequences has the statistics that a call with only its sequences would give. A label of tokens has the
statistics of its tokens and no metric of sequences; each token keeps the weight and verdict of its whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Units = Literal["sequences", "tokens"]
SEQUENCES: Units = "sequences"
TOKENS: Units = "tokens"


@dataclass(frozen=True)
class LabelSet:
    """A property that distinguishes sequences or tokens, with a name for each of its values.

    Not a named tuple: torch 2.10 does not trace a property of one.
    """

    name: str  # such as "environment"
    values: tuple[str, ...]  # the name of each label, in the order of the ids
    units: Units = SEQUENCES

    @property
    def every(self) -> tuple[str, ...]:
        """The labels, then the label of units whose id names none."""
        return (*self.values, "?")


class Labeled(NamedTuple):
    """A set of labels and the ids of a batch."""

    labels: LabelSet
    ids: Tensor  # integers, [S] for sequences, or in the shape of the batch for tokens


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

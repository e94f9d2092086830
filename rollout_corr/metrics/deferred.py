"""Statistics of labels that wait on the CPU until somebody asks for them.

Most steps read the metrics of the batch alone, and on a small batch labels take as many operations as all else.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.metrics.labels import Labels

OfLabels = list[tuple[Tensor, Tensor]]


class Later:
    """A computation that runs at most once, when its result is asked for.

    Args:
        find: Computes from tensors that nobody else writes to.
    """

    def __init__(self, find: Callable[[], OfLabels]) -> None:
        self._find: Callable[[], OfLabels] | None = find
        self._found: OfLabels = []
        self._inference = torch.is_inference_mode_enabled()
        # Metrics may be read on a thread of their own.
        self._lock = Lock()

    def __reduce__(self) -> tuple[Callable[[OfLabels], Later], tuple[OfLabels]]:
        """Give a copy or another process the result: neither a lock nor a computation can be copied."""
        return _known, (self.found(),)

    def found(self) -> OfLabels:
        """Compute, and let go of what it takes."""
        with self._lock:
            if self._find is not None:
                # As in the call; tensors of inference mode cannot be written to outside of it.
                with torch.inference_mode() if self._inference else torch.no_grad():
                    self._found, self._find = self._find(), None
        return self._found


def _known(found: OfLabels) -> Later:
    return Later(lambda: found)


class Deferred(NamedTuple):
    """Statistics of labels that belong between two parts of a vector of sums, and of one of maxima.

    Attributes:
        labels: The labels, in order.
        outside: The sums by name that metrics of the batch read: units whose id names no label.
        sums, maxima: Places before which they belong.
        later: Gives the sums and maxima of each of the labels.
    """

    labels: tuple[Labels, ...]
    outside: dict[str, float]
    sums: int
    maxima: int
    later: Later

    def beside(self, sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
        """Put them where they belong."""
        found = self.later.found()
        return (
            torch.cat([sums[: self.sums], *(of_label for of_label, _ in found), sums[self.sums :]]),
            torch.cat([maxima[: self.maxima], *(of_label for _, of_label in found), maxima[self.maxima :]]),
        )

    def of(self, one: Labels) -> tuple[Tensor, Tensor]:
        """Give the sums and maxima of one of the labels."""
        return self.later.found()[self.labels.index(one)]

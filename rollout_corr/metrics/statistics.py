"""Statistics: two small device vectors that merge by + and max over chunks, micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rollout_corr.definition.histogram import HISTOGRAM
from rollout_corr.metrics import loss as loss_metrics
from rollout_corr.metrics import schema
from rollout_corr.spec.correction import Spec
from rollout_corr.spec.loss import Objective


@lru_cache(maxsize=256)
def layout(spec: Spec | None, objective: Objective | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the sums and of the maxima, in order: of a correction, then of a policy loss."""
    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()
    if spec is not None:
        sums, maxima = schema.sum_names(spec), schema.max_names(spec)
    if objective is not None:
        sums, maxima = sums + loss_metrics.sum_names(objective), maxima + loss_metrics.max_names()
    return sums, maxima


def assemble(spec: Spec, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> Statistics:
    """Put named scalars into the two vectors."""
    sum_names, max_names = layout(spec)
    if spec.detail == "full":
        sums = sums | dict(zip(HISTOGRAM, sums["histogram"].unbind(), strict=True))
    return Statistics(
        spec=spec,
        sums=torch.stack([sums[name].double() for name in sum_names]),
        maxima=torch.stack([maxima[name].double() for name in max_names]),
    )


@dataclass(frozen=True)
class Statistics:
    """What a batch adds to the metrics.

    Attributes:
        spec: The Spec under which they were taken; None for a policy loss without one. Only statistics of equal Specs
            and objectives merge.
        sums: [K] float64, additive.
        maxima: [M] float64, merged by maximum; minima are negated.
        objective: What a policy loss computed; None where there was none.
    """

    spec: Spec | None
    sums: Tensor
    maxima: Tensor
    objective: Objective | None = None

    def merge(self, other: Statistics) -> Statistics:
        """The statistics of both batches together."""
        if not isinstance(other, Statistics):
            raise TypeError(f"other: expected Statistics, got {type(other).__name__}")
        if other.spec != self.spec:
            raise ValueError(f"other: expected statistics of the same Spec {self.spec!r}, got {other.spec!r}")
        if other.objective != self.objective:
            raise ValueError(
                f"other: expected statistics of the same objective {self.objective!r}, got {other.objective!r}"
            )
        return replace(self, sums=self.sums + other.sums, maxima=torch.maximum(self.maxima, other.maxima))

    def join(self, loss: Statistics) -> Statistics:
        """A correction's statistics with those of the policy loss of the same tokens."""
        sums, maxima = torch.cat([self.sums, loss.sums]), torch.cat([self.maxima, loss.maxima])
        return Statistics(self.spec, sums, maxima, loss.objective)

    def __add__(self, other: Statistics) -> Statistics:
        return self.merge(other)

    @staticmethod
    def sum(parts: Iterable[Statistics]) -> Statistics:
        """Merge any number of statistics, for example one per micro-batch."""
        parts = list(parts)
        if not parts:
            raise ValueError("parts: expected at least one Statistics, got none")
        total = parts[0]
        for part in parts[1:]:
            total = total.merge(part)
        return total

    @staticmethod
    def nothing(
        spec: Spec | None, objective: Objective | None = None, device: torch.device | str = "cpu"
    ) -> Statistics:
        """The statistics of no batch at all: what a rank without a micro-batch merges with the others.

        Args:
            spec: The Spec of the other ranks.
            objective: `objective` of their statistics, where they have one.
            device: Where collectives are to run.
        """
        sums, maxima = (len(names) for names in layout(spec, objective))
        return Statistics(
            spec,
            torch.zeros(sums, dtype=torch.float64, device=device),
            torch.full((maxima,), -torch.inf, dtype=torch.float64, device=device),
            objective,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Statistics:
        """The same statistics on another device."""
        return replace(
            self,
            sums=self.sums.to(device, non_blocking=non_blocking),
            maxima=self.maxima.to(device, non_blocking=non_blocking),
        )

    def of_tokens(self) -> Statistics:
        """What a rank adds that is not the first of its sequence group: that one adds what whole sequences give."""
        if self.spec is None:
            raise ValueError("spec: expected statistics of a correction, got those of a policy loss alone")
        places = schema.places_of_sequences(self.spec)
        sums, maxima = self.sums.clone(), self.maxima.clone()
        for first, last in places.sums:
            sums[first:last] = 0.0
        for first, last in places.maxima:
            maxima[first:last] = -torch.inf
        return replace(self, sums=sums, maxima=maxima)

    def all_reduce(self, group: Any = None) -> Statistics:
        """Merge over the ranks of a process group: two collectives, whatever the number of metrics.

        Args:
            group: A torch.distributed process group; None is the default group. Every rank must call this with
                statistics of an equal Spec.
        """
        import torch.distributed as dist

        sums, maxima = self.sums.clone(), self.maxima.clone()
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        return replace(self, sums=sums, maxima=maxima)

    def metrics(self, names: str = "native") -> dict[str, float]:
        """Named floats, computed in float64 on the host from one device-to-host copy.

        Args:
            names: A naming scheme that `Spec.report` asked for.
        """
        return self.metrics_async().result(names)

    def warnings(self) -> list[str]:
        """What deserves a look, in plain words; read from the same copy as the metrics, never printed."""
        return self.metrics_async().warnings()

    def metrics_async(self) -> PendingMetrics:
        """Start the copy to the host and return at once; read the result when it is wanted."""
        return PendingMetrics(self)


class PendingMetrics:
    """Metrics on their way to the host."""

    def __init__(self, statistics: Statistics) -> None:
        self._spec, self._objective = statistics.spec, statistics.objective
        packed = torch.cat([statistics.sums, statistics.maxima])
        self._split = statistics.sums.shape[0]
        self._event: Any = None
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(packed.device))
        else:
            self._host = packed.cpu()

    def done(self) -> bool:
        """Whether `result` would return without waiting."""
        return self._event is None or bool(self._event.query())

    def values(self) -> dict[str, float]:
        """The raw statistics by name."""
        if self._event is not None:
            self._event.synchronize()
        sum_names, max_names = layout(self._spec, self._objective)
        return dict(zip((*sum_names, *max_names), self._host.tolist(), strict=True))

    def result(self, names: str = "native") -> dict[str, float]:
        """The metrics; waits for the copy if it is still under way."""
        from rollout_corr.metrics.native import finish

        return finish(self.values(), self._spec, self._objective, names)

    def warnings(self) -> list[str]:
        """What deserves a look, in plain words."""
        from rollout_corr.metrics.warnings import warnings_of

        return [] if self._spec is None else warnings_of(self.values(), self._spec)


class Measured:
    """What carries statistics, and what is read from them."""

    statistics: Statistics

    def metrics(self, names: str = "native") -> dict[str, float]:
        """Named floats from one device-to-host copy; see docs/metrics.md."""
        return self.statistics.metrics(names)

    def metrics_async(self) -> PendingMetrics:
        """Start the copy to pinned memory and return at once; `.result()` waits for it, `.done()` does not."""
        return self.statistics.metrics_async()

    def warnings(self) -> list[str]:
        """What deserves a look, in plain words."""
        return self.statistics.warnings()

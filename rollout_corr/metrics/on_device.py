"""Metrics as tensors: the formulas of the rows on 0-d tensors of the device, for a schedule that must not wait.

Labels have them on tensors of a number for each label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_corr.metrics import loss, native, schema
from rollout_corr.metrics.extra import Extra
from rollout_corr.metrics.rows import Metric
from rollout_corr.spec.correction import Spec
from rollout_corr.spec.loss import Objective


class OnDevice:
    """A float64 tensor in the place of a float in the formula of a metric.

    It adds, multiplies and divides, with 0 for 0 of 0. It is true, since formulas ask a count alone for its truth, to
    divide by it or not. It does not compare: a formula that decides by a value cannot run without reading it.
    """

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return True

    def __neg__(self) -> OnDevice:
        return OnDevice(-self.value)

    def __add__(self, other: OnDevice | float) -> OnDevice:
        return OnDevice(self.value + _bare(other))

    def __sub__(self, other: OnDevice | float) -> OnDevice:
        return OnDevice(self.value - _bare(other))

    def __rsub__(self, other: float) -> OnDevice:
        return OnDevice(other - self.value)

    def __mul__(self, other: OnDevice | float) -> OnDevice:
        return OnDevice(self.value * _bare(other))

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: OnDevice) -> OnDevice:
        count = other.value
        return OnDevice(torch.where(count == 0, 0.0, self.value / torch.where(count == 0, 1.0, count)))

    def within(self, low: float, high: float) -> OnDevice:
        """Clamp it; NaN stays."""
        return OnDevice(self.value.clamp(low, high))

    def or_larger(self, other: OnDevice) -> OnDevice:
        """Give the larger of two numbers."""
        return OnDevice(torch.where(other.value > self.value, other.value, self.value))


def _bare(x: OnDevice | float) -> Tensor | float:
    return x.value if isinstance(x, OnDevice) else x


class Measured(NamedTuple):
    """The settings that say which statistics there are; None: none of that kind."""

    spec: Spec | None
    objective: Objective | None
    extra: Extra | None

    def rows(self) -> list[Metric]:
        """List the rows of all native metrics."""
        rows = [] if self.spec is None else list(native.metrics_of(self.spec))
        if self.extra is not None:
            rows += self.extra.rows(self.spec)
        return rows + ([] if self.objective is None else loss.metrics_of(self.objective))


class Held(Mapping[str, Any]):
    """Statistics by name, each taken from its tensor when a formula asks for it.

    Args:
        table: The statistics along the first dimension.
        names: Their names.
    """

    def __init__(self, table: Tensor, names: Iterable[str]) -> None:
        self.table, self._places = table, {name: i for i, name in enumerate(names)}

    def __getitem__(self, name: str) -> OnDevice:
        return OnDevice(self.table[self._places[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def metric_on_device(key: str, measured: Measured, sums: Tensor, maxima: Tensor) -> Tensor:
    """Compute one metric as a 0-d float64 tensor; see `Statistics.on_device`."""
    rows = {row.key: row for row in measured.rows()}
    if key not in rows:
        raise ValueError(f"key: expected a native metric of these statistics, got {key!r}; they have {list(rows)}")
    row, held = rows[key], Held(torch.cat([sums, maxima]), chain(*schema.layout(*measured)))
    try:
        found = row.read(held)
    except TypeError as error:
        raise ValueError(
            f"key: expected a metric that is a sum, a mean or an ESS, got {key!r}, whose formula reads values; take it "
            "from metrics()"
        ) from error
    value = found.value if isinstance(found, OnDevice) else torch.full((), found, device=sums.device)
    if row.over.units is None:
        return value
    # All metrics of nothing are 0.
    return torch.where(held[row.over.units].value == 0, 0.0, value)

"""The formulas of metrics on tensors: on a device, for a schedule that must not wait, and of all labels at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from ..specs.caches import cached
from ..specs.correction import Spec
from ..specs.terms import Objective
from . import loss, native, schema
from .extra import Extra
from .labels import LabelSet, count_outside, outside_of
from .rows import Metric


class OnTensor:
    """A float64 tensor that replaces a float in the formula of a metric.

    It adds, multiplies and divides, with 0 for 0 of 0. It is true, since formulas ask a count alone for its truth, to
    divide by it or not. It does not compare: a formula that decides by a value cannot run without reading it.
    """

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return True

    def __neg__(self) -> OnTensor:
        return OnTensor(-self.value)

    def __add__(self, other: OnTensor | float) -> OnTensor:
        return OnTensor(self.value + _bare(other))

    def __sub__(self, other: OnTensor | float) -> OnTensor:
        return OnTensor(self.value - _bare(other))

    def __rsub__(self, other: float) -> OnTensor:
        return OnTensor(other - self.value)

    def __mul__(self, other: OnTensor | float) -> OnTensor:
        return OnTensor(self.value * _bare(other))

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: OnTensor) -> OnTensor:
        count = other.value
        return OnTensor(torch.where(count == 0, 0.0, self.value / torch.where(count == 0, 1.0, count)))

    def within(self, low: float, high: float) -> OnTensor:
        """Clamp it; NaN stays."""
        return OnTensor(self.value.clamp(low, high))

    def or_larger(self, other: OnTensor) -> OnTensor:
        """The larger of two numbers."""
        return OnTensor(torch.where(other.value > self.value, other.value, self.value))

    def chosen_below(self, bound: float, low: OnTensor, high: OnTensor) -> OnTensor:
        """One number where it is below a bound, another where it is not."""
        return OnTensor(torch.where(self.value < bound, low.value, high.value))

    def root(self) -> OnTensor:
        """The square root, 0 below 0."""
        return OnTensor(self.value.clamp(min=0.0).sqrt())


def _bare(x: OnTensor | float) -> Tensor | float:
    return x.value if isinstance(x, OnTensor) else x


class Held(Mapping[str, Any]):
    """Statistics by name, from a table that has them along its first dimension."""

    def __init__(self, table: Tensor, names: Iterable[str]) -> None:
        self.columns = dict(zip(names, table.unbind(), strict=True))

    def __getitem__(self, name: str) -> OnTensor:
        return OnTensor(self.columns[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def read(self, row: Metric) -> Tensor:
        """A metric, of the shape of a column; TypeError where its formula decides by values."""
        n = None if row.over.units is None else self.columns[row.over.units]
        found: Any = row.value(self, cast("float", 0.0 if n is None else OnTensor(n)))
        value = (
            found.value if isinstance(found, OnTensor) else torch.full_like(next(iter(self.columns.values())), found)
        )
        # All metrics of nothing are 0.
        return value if n is None else torch.where(n == 0, 0.0, value)


Settings = tuple[Spec | None, Objective | None, Extra | None]


def rows_of(spec: Spec | None, objective: Objective | None, extra: Extra | None) -> dict[str, Metric]:
    """The rows of all native metrics by key."""
    rows = [] if spec is None else list(native.metrics_of(spec))
    rows += [] if extra is None else extra.rows(spec)
    return {row.key: row for row in rows + ([] if objective is None else loss.metrics_of(objective))}


def metric_on_device(key: str, settings: Settings, vector: Tensor) -> Tensor:
    """Compute one metric as a 0-d float64 tensor; see `Statistics.on_device`."""
    rows = rows_of(*settings)
    if key not in rows:
        raise ValueError(f"key: expected a native metric of these statistics, got {key!r}; they have {list(rows)}")
    try:
        return Held(vector, chain(*schema.layout(*settings))).read(rows[key])
    except TypeError as error:
        raise ValueError(
            f"key: expected a metric that is a sum, a mean, a spread or an ESS, got {key!r}, whose formula reads "
            "values; take it from metrics()"
        ) from error


# --- the metrics of labels ---


def names_of(spec: Spec, units: str) -> tuple[str, ...]:
    """Names of the statistics of a label, sums and then maxima."""
    found = schema.of_label(spec, units)
    return found.sums + found.maxima


@cached(maxsize=256)
def metrics_of(spec: Spec, units: str = "sequences") -> tuple[Metric, ...]:
    """The rows of the native metrics that a label has: those whose statistics it has."""
    known = dict.fromkeys(names_of(spec, units), 1.0)

    def has(row: Metric) -> bool:
        try:
            row.read(known)
        except KeyError:
            return False
        return True

    return tuple(row for row in native.metrics_of(spec) if has(row))


@cached(maxsize=256)
def dashboard_of(spec: Spec, units: str) -> tuple[Metric, ...]:
    """Those of them that a dashboard shows."""
    return native.on_dashboard(metrics_of(spec, units))


@cached(maxsize=64)
def keys_of(labels: LabelSet, rows: tuple[Metric, ...]) -> tuple[str, ...]:
    """The keys of the metrics of the first label, then of the next: "environment/math/kl_rollout_train_k3"."""
    return tuple(f"{labels.name}/{value}/{row.key}" for value in labels.values for row in rows)


def read(labels: LabelSet, spec: Spec, table: Tensor, dashboard: bool = False) -> dict[str, float]:
    """Compute the metrics of every label.

    Args:
        labels: The labels.
        spec: The Spec under which the statistics were taken.
        table: [names, labels] float64 on the CPU, in the order of `names_of`.
        dashboard: Only those that a dashboard shows.
    """
    held, rows = (
        Held(table, names_of(spec, labels.units)),
        (dashboard_of if dashboard else metrics_of)(spec, labels.units),
    )
    found = torch.stack([_of_labels(row, held) for row in rows])
    # The last label is that of units without one.
    by_label = dict(zip(keys_of(labels, rows), found[:, :-1].T.reshape(-1).tolist(), strict=True))
    if dashboard:
        return by_label
    outside = held.columns[count_outside(labels).rpartition("/")[2]][-1].item()
    return {outside_of(labels): outside, **by_label}


def _of_labels(row: Metric, held: Held) -> Tensor:
    """[labels]: a metric."""
    try:
        return held.read(row)
    except TypeError:
        # It decides by values.
        columns = {name: column.tolist() for name, column in held.columns.items()}
        many = len(columns[str(row.over.units)])
        each = [row.read({name: column[i] for name, column in columns.items()}) for i in range(many)]
        return torch.tensor(each, dtype=torch.float64, device="cpu")

"""The formulas of metrics on tensors: on a device, for a schedule that must not wait, and of all labels at once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from ..specs.caches import cached
from ..specs.correction import Spec
from ..specs.terms import Objective
from . import loss, native, schema
from .by_label import of_label
from .extra import Extra
from .formulas import compiled
from .labels import LabelSet, count_outside, outside_of
from .rows import Metric


class Held:
    """Statistics by name, from a table that has them along its first dimension."""

    def __init__(self, table: Tensor, names: Iterable[str]) -> None:
        self.columns = dict(zip(names, table.unbind(), strict=True))

    def read(self, row: Metric) -> Tensor | None:
        """A metric, of the shape of a column; None where its formula decides by values."""
        of_tensors = compiled(row.formula).of_tensors
        if of_tensors is None:
            return None
        if row.over.units is None:
            return of_tensors(self.columns, None)
        n = self.columns[row.over.units]
        # All metrics of nothing are 0.
        return torch.where(n == 0, 0.0, of_tensors(self.columns, n))


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
    metric = Held(vector, chain(*schema.layout(*settings))).read(rows[key])
    if metric is None:
        raise ValueError(
            f"key: expected a metric that is a sum, a mean, a spread or an ESS, got {key!r}, whose formula reads "
            "values; take it from metrics()"
        )
    return metric


# --- the metrics of labels ---


def names_of(spec: Spec, units: str) -> tuple[str, ...]:
    """Names of the statistics of a label, sums and then maxima."""
    statistics = of_label(spec, units)
    return statistics.sums + statistics.maxima


@cached(maxsize=256)
def metrics_of(spec: Spec, units: str = "sequences") -> tuple[Metric, ...]:
    """The rows of the native metrics that a label has: those whose statistics it has."""
    ones = dict.fromkeys(names_of(spec, units), 1.0)

    def has(row: Metric) -> bool:
        try:
            row.read(ones)
        except KeyError:
            return False
        return True

    return tuple(row for row in native.metrics_of(spec) if has(row))


@cached(maxsize=256)
def dashboard_of(spec: Spec, units: str) -> tuple[Metric, ...]:
    """The ones that a dashboard shows."""
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
    metrics = torch.stack([_of_labels(row, held) for row in rows])
    # The last column is for units without a label.
    by_label = dict(zip(keys_of(labels, rows), metrics[:, :-1].T.reshape(-1).tolist(), strict=True))
    if dashboard:
        return by_label
    outside = held.columns[count_outside(labels).rpartition("/")[2]][-1].item()
    return {outside_of(labels): outside, **by_label}


def _of_labels(row: Metric, held: Held) -> Tensor:
    """[labels]: a metric."""
    metric = held.read(row)
    if metric is not None:
        return metric
    columns = {name: column.tolist() for name, column in held.columns.items()}
    many = len(columns[str(row.over.units)])
    each = [row.read({name: column[i] for name, column in columns.items()}) for i in range(many)]
    return torch.tensor(each, dtype=torch.float64, device="cpu")

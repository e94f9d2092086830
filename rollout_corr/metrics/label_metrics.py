"""Metrics of labels: the formulas of the rows, on all labels at once.

A number for each label and metric is thousands of them, and a call of Python for each takes longer than a small batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from rollout_corr.metrics import native
from rollout_corr.metrics.labels import Labels, columns_of, outside_of
from rollout_corr.metrics.on_device import Held
from rollout_corr.metrics.rows import End, Mean, MeanAround, Metric, Plain, Std
from rollout_corr.spec.caches import cached
from rollout_corr.spec.correction import Spec


@cached(maxsize=256)
def metrics_of(spec: Spec, units: str = "sequences") -> tuple[Metric, ...]:
    """The rows of the native metrics that a label has: those whose statistics it has."""
    columns = columns_of(spec, units)
    known = dict.fromkeys((*columns.all_sums, *columns.all_maxima), 1.0)

    def has(row: Metric) -> bool:
        try:
            row.read(known)
        except KeyError:
            return False
        return True

    return tuple(row for row in native.metrics_of(spec) if has(row))


def unit_of(row: Metric) -> str:
    """The units that a metric counts or is a mean over: "tokens" or "sequences"."""
    return "sequences" if "sequence" in (row.unit if row.over.units is None else row.over.words) else "tokens"


class Group(NamedTuple):
    """Metrics whose formulas are of one kind.

    Attributes:
        formula: Gives them, [k, labels], from the table of statistics, [columns, labels], and these places and numbers.
        names: [k] int64, the columns of what they are of.
        squares: [k] int64, the columns of its squares, for standard deviations.
        units: [k] int64, the columns that count their units.
        centres, signs: [k, 1], fields of the formulas.
    """

    formula: Callable[[Tensor, Group], Tensor]
    names: Tensor
    squares: Tensor
    units: Tensor
    centres: Tensor
    signs: Tensor


def _plain(table: Tensor, at: Group) -> Tensor:
    return table.index_select(0, at.names)


def _mean(table: Tensor, at: Group) -> Tensor:
    n = table.index_select(0, at.units)
    return _of_some(table.index_select(0, at.names).add_(at.centres * n).div_(n), n)


def _std(table: Tensor, at: Group) -> Tensor:
    n = table.index_select(0, at.units)
    average = table.index_select(0, at.names).div_(n)
    squares = table.index_select(0, at.squares).div_(n)
    return _of_some(squares.sub_(average.mul_(average)).clamp_(min=0.0).sqrt_(), n)


def _end(table: Tensor, at: Group) -> Tensor:
    n = table.index_select(0, at.units)
    return _of_some(table.index_select(0, at.names).mul_(at.signs).add_(at.centres), n)


def _of_some(x: Tensor, n: Tensor) -> Tensor:
    """Give 0 where there is nothing."""
    return x.masked_fill_(n == 0.0, 0.0)


def _other(row: Metric, held: Held) -> Tensor:
    """[labels]: a metric whose formula is of no kind."""
    n = held[row.over.units or ""]
    try:
        found: Any = row.value(held, cast("float", n))
    except TypeError:
        # It decides by values.
        columns = {name: column.tolist() for name, column in zip(held, held.table, strict=True)}
        every = ({name: of_labels[i] for name, of_labels in columns.items()} for i in range(held.table.shape[1]))
        return torch.tensor([row.read(values) for values in every], dtype=torch.float64, device="cpu")
    return _of_some(found.value, n.value)


KINDS = (((Plain,), _plain), ((Mean, MeanAround), _mean), ((Std,), _std), ((End,), _end))


class Reading(NamedTuple):
    """A way to read the metrics of labels from a table of statistics.

    Attributes:
        keys: That of the count of units outside, then of all metrics of the first label, then of the next.
        outside: The column of that count.
        names: The columns, in order.
        groups: Metrics of a kind.
        others: The rows of other formulas, which run on all labels too.
        order: [rows] int64, where the rows lie among these.
    """

    keys: tuple[str, ...]
    outside: int
    names: tuple[str, ...]
    groups: tuple[Group, ...]
    others: tuple[Metric, ...]
    order: Tensor


@cached(maxsize=64)
def _reading(labels: Labels, spec: Spec) -> Reading:
    """Sort the metrics of labels by kind and make their keys, once and not in every step."""
    rows, columns = metrics_of(spec, labels.units), columns_of(spec, labels.units)
    names = (*columns.all_sums, *columns.all_maxima)
    place = {name: i for i, name in enumerate(names)}
    groups, keys = [], list[str]()
    with torch.inference_mode(False):
        for kinds, formula in KINDS:
            of_kind = [row for row in rows if isinstance(row.value, kinds)]
            found: list[Any] = [row.value for row in of_kind]
            places = (
                [place[x.name] for x in found],
                [place.get(f"{x.name}2", 0) for x in found],
                [place.get(row.over.units or "", 0) for row in of_kind],
            )
            numbers = ([getattr(x, name, 0.0) for x in found] for name in ("centre", "sign"))
            groups.append(
                Group(
                    formula,
                    *(torch.tensor(one, dtype=torch.int64, device="cpu") for one in places),
                    *(torch.tensor(one, dtype=torch.float64, device="cpu")[:, None] for one in numbers),
                )
            )
            keys += [row.key for row in of_kind]
        others = tuple(row for row in rows if row.key not in keys)
        keys += [row.key for row in others]
        order = torch.tensor([keys.index(row.key) for row in rows], device="cpu")
    ends = [f"{unit_of(row)}/{row.key}" for row in rows]
    every = (outside_of(labels), *(f"{labels.name}/{value}/{end}" for value in labels.values for end in ends))
    return Reading(every, place[labels.units], names, tuple(groups), others, order)


def read(labels: Labels, spec: Spec, sums: Tensor, maxima: Tensor) -> dict[str, float]:
    """Compute the metrics of every label, under "environment/LABEL/tokens/kl_k3".

    Args:
        labels: The labels.
        spec: The Spec.
        sums: [columns * labels] float64 on the CPU, in the order of `sums_of`.
        maxima: Likewise, in the order of `maxima_of`.
    """
    reading, many = _reading(labels, spec), len(labels.every)
    table = torch.cat([sums.view(-1, many), maxima.view(-1, many)])
    held = Held(table, reading.names)
    found = [group.formula(table, group) for group in reading.groups]
    found.append(torch.stack([_other(row, held) for row in reading.others]))
    of_rows = torch.cat(found).index_select(0, reading.order)
    # The last label is that of units without one.
    numbers = torch.cat([table[reading.outside, -1:], of_rows[:, :-1].T.reshape(-1)])
    return dict(zip(reading.keys, numbers.tolist(), strict=True))

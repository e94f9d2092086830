"""Labels of the sequences of a batch, read: ids, and the name of each label."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout_corr.backends.layouts import shape_of
from rollout_corr.metrics.labels import Labelled, Labels
from rollout_corr.spec.validate import shown

if TYPE_CHECKING:
    from rollout_corr.backends.batch import Batch

ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def read_labels(batch: Batch, labels: object, names: object) -> tuple[Labelled, ...]:
    """Check the labels of a call and the names that go with them. An id that names none is no error: it is counted."""
    for argument, given in (("labels", labels), ("label_names", names)):
        if not isinstance(given, Mapping):
            wanted = "tensors" if argument == "labels" else "lists of names, or to counts"
            raise TypeError(f"{argument}: expected a mapping of names to {wanted}, got {type(given).__name__}")
    assert isinstance(labels, Mapping)
    assert isinstance(names, Mapping)
    if set(labels) != set(names):
        raise ValueError(f"label_names: expected the names of {sorted(labels)}, got those of {sorted(names)}")
    return tuple(Labelled(_named(name, names[name]), _ids(batch, name, ids)) for name, ids in labels.items())


def _ids(batch: Batch, name: str, ids: object) -> Tensor:
    argument = f"labels[{name!r}]"
    if not isinstance(ids, Tensor):
        raise TypeError(f"{argument}: expected a tensor, got {type(ids).__name__}")
    if ids.dtype not in ID_DTYPES:
        raise ValueError(f"{argument}: expected an integer dtype, got {str(ids.dtype).removeprefix('torch.')}")
    if tuple(ids.shape) not in ((batch.count,), (batch.count, 1)):
        wanted = f"[{batch.count}] or [{batch.count}, 1], a label for each whole sequence"
        raise ValueError(f"{argument}: expected shape {wanted}, got {shape_of(ids)}")
    if ids.device != batch.train.device:
        raise ValueError(f"{argument}: expected device {batch.train.device}, got {ids.device}")
    return ids.reshape(-1)


def _named(name: object, values: object) -> Labels:
    if not isinstance(name, str) or not name or "/" in name or "=" in name:
        raise ValueError(f"labels: expected names that are strings without '/' and '=', got {shown(name)}")
    if isinstance(values, int) and not isinstance(values, bool) and values > 0:
        return _counted(name, values)
    if isinstance(values, (str, int)) or not isinstance(values, (list, tuple)) or not values:
        raise ValueError(f"label_names[{name!r}]: expected a list of names or a count above 0, got {shown(values)}")
    for value in values:
        if not isinstance(value, str) or not value or "/" in value or value in ("?", "outside"):
            raise ValueError(f"label_names[{name!r}]: expected strings without '/', got {shown(value)}")
    if len(set(values)) < len(values):
        raise ValueError(f"label_names[{name!r}]: expected different names, got {list(values)}")
    return Labels(name, tuple(values))


@lru_cache(maxsize=64)
def _counted(name: str, count: int) -> Labels:
    return Labels(name, tuple(map(str, range(count))))

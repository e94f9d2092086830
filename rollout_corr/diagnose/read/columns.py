"""Descriptions of columns with unfamiliar names: shapes, and what their values could be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Columns that a message describes, and letters of their names.
MOST_DESCRIBED, LONGEST_NAME = 10, 40
# Values of a column that are looked at.
LOOKED_AT = 4096
LOG_PROBS, MASK = "log-probs?", "0/1, a mask?"


def described(fields: Mapping[str, Any]) -> str:
    """List columns with their shapes and what they look like; what may be log-probs or the mask comes first."""
    each = [(name, _numbers(values)) for name, values in fields.items()]
    said = [(name, "" if x is None else _shape(fields[name]), _kind(fields[name], x)) for name, x in each]
    # A mask has the shape of log-probs: a step, which is one number in all of a file, is none.
    like = [shape for _, shape, kind in said if kind == LOG_PROBS]
    said = [
        (name, shape, _flags(x) if kind == MASK and like and shape not in like and x is not None else kind)
        for (name, x), (_, shape, kind) in zip(each, said, strict=True)
    ]
    said.sort(key=lambda one: (one[2] != LOG_PROBS, one[2] != MASK, not one[1]))
    shown = []
    for name, shape, kind in said[:MOST_DESCRIBED]:
        cut = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
        shown.append(" ".join(filter(None, (cut, shape, kind and f"({kind})"))))
    return ", ".join(shown) + (f" and {len(said) - MOST_DESCRIBED} more" if len(said) > MOST_DESCRIBED else "")


def _numbers(values: Any, most: int = LOOKED_AT) -> Tensor | None:
    """Return the first numbers of a column, or None if it has none."""
    if isinstance(values, Tensor):
        if values.layout != torch.strided or values.is_complex():
            return None
        # Rows first: to flatten a tensor that is no view of its values would copy all of it.
        rows = values[: max(1, most // max(1, math.prod(values.shape[1:])))] if values.dim() else values
        return rows.reshape(-1)[:most]
    while isinstance(values, (list, tuple)) and values and isinstance(values[0], (list, tuple, Tensor)):
        values = values[0]
    if isinstance(values, Tensor):
        return _numbers(values, most)
    if not isinstance(values, (list, tuple)) or not values:
        return None
    try:
        return torch.tensor([math.nan if one is None else one for one in values[:most]])
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _shape(values: Any) -> str:
    """Write a shape; a list of lists counts its rows and the values of its first row."""
    sizes = list(values.shape) if isinstance(values, Tensor) else []
    while isinstance(values, (list, tuple)):
        sizes.append(len(values))
        values = values[0] if values else None
    return f"[{' x '.join(map(str, sizes))}]"


def _kind(values: Any, x: Tensor | None) -> str:
    """Say what the values of a column could be."""
    if x is None:
        return "text" if isinstance(values, str) else ""
    finite = x.double()
    finite = finite[finite.isfinite()]
    if not finite.numel():
        return "no numbers"
    low, high = float(finite.min()), float(finite.max())
    if low == high and finite.numel() > 1 and not isinstance(values, (list, tuple)):
        return f"always {low:g}"
    if bool(((finite == 0) | (finite == 1)).all()):
        return MASK
    if x.is_floating_point() and bool((finite != finite.round()).any()):
        return LOG_PROBS if high <= 0.0 else f"{low:.3g} to {high:.3g}, advantages or rewards?"
    if low == 0 and bool((finite.diff() >= 0).all()):
        return "0 and rising, offsets?"
    return f"{low:.0f} to {high:.0f}, ids or lengths?"


def _flags(x: Tensor) -> str:
    """Say which of 0 and 1 the values of a column are."""
    held = x[x.isfinite()].unique()
    return "0/1" if held.numel() > 1 else f"{int(held)} throughout this file"


def unused(fields: Mapping[str, Any], chosen: Mapping[str, str], shape: Sequence[int], limit: int) -> dict[str, str]:
    """Describe the columns of numbers that have no role: their shape, and whether they could be the mask.

    Args:
        fields: The fields of a file or of a record.
        chosen: The field of each role.
        shape: Of the train log-probs.
        limit: Look at so many values of a column.
    """
    found, own = {}, _shape(torch.empty(*shape, device="meta"))
    for name, values in fields.items():
        x = None if name in chosen.values() or name.endswith("/names") else _numbers(values, limit)
        if x is None:
            continue
        found[name] = _shape(values)[1:-1]
        if _shape(values) == own and _kind(values, x) == MASK and bool((x == 0).any()):
            maybe = "mask" not in chosen and "lengths" not in chosen
            found[name] += ", 0/1" + f": --field mask={name} if it is the mask" * maybe
    return found

"""Frozen types as arguments of a torch operator: a string for the structure, and a list of numbers."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from .batch_losses import OF_BATCH
from .caches import cached
from .checked import Checked
from .correction import Criterion, Spec, Weight
from .rules import RULES
from .surrogates import SURROGATES
from .terms import KL, Mean, Objective, SquaredLogRatio

_OF_CORRECTION = (Spec, Weight, Criterion)
_OF_LOSS = (Objective, Mean, KL, SquaredLogRatio, *SURROGATES, *OF_BATCH)
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (*_OF_CORRECTION, *RULES.values(), *_OF_LOSS)}
_FIELDS = {kind: tuple(f.name for f in fields(kind)) for kind in _KINDS.values()}


def encode(value: Checked) -> tuple[str, list[float]]:
    """The structure of a frozen type as JSON, with {"number": i} for the i-th of its numbers, and the numbers.

    Uses only operations that a compiler can trace, because a value made inside a compiled function exists only there
    and its numbers may be symbols.
    """
    numbers: list[float] = []
    return _json(value, numbers), numbers


def _json(value: object, numbers: list[float]) -> str:
    if isinstance(value, Checked):
        kind = type(value)
        items = [f'"{name}": ' + _json(getattr(value, name), numbers) for name in _FIELDS[kind]]
        return "{" + ", ".join([f'"is": "{kind.__name__}"', *items]) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join([_json(item, numbers) for item in value]) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        numbers.append(value)
        return f'{{"number": {len(numbers) - 1}}}'
    raise TypeError(f"value: expected plain fields, got {type(value).__name__}")


@cached(maxsize=512)
def encode_once(value: Checked) -> tuple[str, list[float]]:
    """`encode` with its answers kept, for a value that is made once and used many times."""
    return encode(value)


def decode(text: str, numbers: list[float]) -> Any:
    """The value that `encode` was given."""
    return _decoded(text, tuple(numbers))


@cached(maxsize=512)
def _decoded(text: str, numbers: tuple[float, ...]) -> Any:
    def made(item: dict[str, Any]) -> Any:
        return _KINDS[item.pop("is")](**item) if "is" in item else numbers[item["number"]]

    return json.loads(text, strict=False, object_hook=made)

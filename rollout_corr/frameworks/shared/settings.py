"""Reading a framework's configuration, whatever kind of object it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def fields_of(config: object, what: str = "config") -> dict[str, Any]:
    """The fields of a mapping, a pydantic model, a dataclass, or any object with attributes.

    Keys that begin with an underscore are left out: `_target_` and its kin are Hydra's.
    """
    found: Mapping[Any, Any] | None = None
    if isinstance(config, Mapping):
        found = config
    elif not isinstance(config, type):
        if callable(getattr(config, "model_dump", None)):
            found = config.model_dump()  # type: ignore[attr-defined]  # just looked for
        elif is_dataclass(config):
            found = {field.name: getattr(config, field.name) for field in fields(config)}
        elif hasattr(config, "__dict__"):
            found = vars(config)
    if found is None:
        got = "None" if config is None else f"{type(config).__name__} {config!r}"
        raise TypeError(f"{what}: expected a mapping or a config object, got {got}")
    return {key: found[key] for key in found if not (isinstance(key, str) and key.startswith("_"))}


def refuse_unknown(given: Iterable[Any], known: Iterable[str]) -> None:
    """Raise on the first key that the framework does not have."""
    known = list(known)
    for key in given:
        if key not in known:
            raise ValueError(f"unknown key {key!r}, expected some of {known}")


def boolean(key: str, value: object) -> bool:
    """True or False; null is False."""
    if value is None:
        return False
    if not isinstance(value, bool):
        raise TypeError(f"{key}: expected true or false, got {type(value).__name__} {value!r}")
    return value

"""Where a function is held: in modules by name, in registries, in classes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .imports import space_of

MISSING: Any = object()


class Place(NamedTuple):
    """A name of a module, an entry of a dict in a module (a registry), or an attribute of a class.

    Attributes:
        name: Its full name.
        holder: The dict or the class.
        key: The key, or the attribute's name.
    """

    name: str
    holder: Any
    key: Any

    def held(self) -> Any:
        """Return what stands there itself, not what is inherited or looked up; MISSING for nothing."""
        space = self.holder if isinstance(self.holder, dict) else vars(self.holder)
        return space.get(self.key, MISSING)

    def put(self, held: Any) -> None:
        """Set or, for MISSING, remove."""
        if isinstance(self.holder, dict):
            self.holder[self.key] = held
            if held is MISSING:
                del self.holder[self.key]
        elif held is MISSING:
            delattr(self.holder, self.key)
        else:
            setattr(self.holder, self.key, held)


def look_up(module: object, name: str) -> tuple[Place, Any]:
    """Find a function of a module, or the method "Class.method".

    Returns:
        The place to put another one, and what a caller finds there now: as it is defined, so a staticmethod is one;
        MISSING if there is none.
    """
    space = space_of(module)
    path = f"{space.get('__name__', '?')}.{name}"
    owner, _, last = name.rpartition(".")
    if not owner:
        return Place(path, space, last), _found(module, last)
    cls = _found(module, owner)
    if not inspect.isclass(cls):
        return Place(path, {}, last), MISSING
    return Place(path, cls, last), inspect.getattr_static(cls, last, MISSING)


def _found(module: object, name: str) -> Any:
    try:
        return getattr(module, name, MISSING)
    except Exception:  # noqa: BLE001  # a lazy module can fail with anything: what it cannot give is missing
        return MISSING


def places_of(wanted: Mapping[int, object], framework: str) -> Iterator[tuple[Place, Any]]:
    """Find what holds some objects: names of any module, and entries of the framework's module-level dicts.

    Args:
        wanted: The objects by their id.
        framework: The package whose module-level dicts are searched too.
    """
    # Copies: another thread's import adds a module meanwhile.
    for name, module in sys.modules.copy().items():
        space = space_of(module)
        theirs = name.partition(".")[0] == framework
        if not theirs and wanted.keys().isdisjoint(map(id, list(space.values()))):
            continue
        for key, held in space.copy().items():
            if id(held) in wanted:
                yield Place(f"{name}.{key}", space, key), held
            elif theirs and type(held) is dict and not key.startswith("__"):
                for inner, value in held.copy().items():
                    if id(value) in wanted:
                        yield Place(f"{name}.{key}[{inner!r}]", held, inner), value

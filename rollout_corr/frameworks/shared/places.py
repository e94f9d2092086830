"""Where a function is held: in modules by name, in registries, in classes; and changing many places or none."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from types import ModuleType
from typing import Any, NamedTuple

MISSING: Any = object()


class Place(NamedTuple):
    """An attribute of a module or class, or an entry of a mapping of a module (a registry).

    Attributes:
        name: Its full name.
        holder: The mapping, or the object that has the attribute.
        key: The key, or the attribute's name.
    """

    name: str
    holder: Any
    key: Any

    @property
    def mapping(self) -> bool:
        """True if the holder is a mapping."""
        return isinstance(self.holder, MutableMapping)

    def held(self) -> Any:
        """Return what stands there itself, not what is inherited or looked up; MISSING for nothing."""
        if self.mapping:
            return self.holder.get(self.key, MISSING)
        space = space_of(self.holder)
        return _found(self.holder, self.key) if space is None else space.get(self.key, MISSING)

    def put(self, held: Any) -> None:
        """Set or, for MISSING, remove."""
        if held is MISSING:
            if self.mapping:
                self.holder.pop(self.key, None)
            else:
                delattr(self.holder, self.key)
        elif self.mapping:
            self.holder[self.key] = held
        else:
            setattr(self.holder, self.key, held)


class Changes:
    """Changes of places that can be taken back together."""

    def __init__(self) -> None:
        self.made: list[tuple[Place, Any, Any]] = []

    def put(self, place: Place, held: Any) -> None:
        """Change a place; what stood there is remembered."""
        before = place.held()
        place.put(held)
        self.made.append((place, before, held))

    def take_back(self) -> list[str]:
        """Restore what stood in every place that still holds what was put there.

        Returns:
            The places that could not be restored, with the reason.
        """
        failed = []
        for place, before, ours in reversed(self.made):
            if place.held() is not ours:
                continue
            try:
                place.put(before)
            except Exception as error:  # noqa: BLE001  # a class can refuse with anything; the other places go on
                failed.append(f"{place.name} ({type(error).__name__}: {error})")
        self.made = []
        return failed


def space_of(holder: object) -> MutableMapping[str, Any] | None:
    """Return the namespace of a module or class to be read; None if it has none."""
    if isinstance(holder, ModuleType):
        # Not by getattr: a lazy module would load what it is asked for.
        space = _MODULE_SPACE.__get__(holder)
    else:
        space = getattr(holder, "__dict__", None) if inspect.isclass(holder) else _instance_space(holder)
    return space if isinstance(space, Mapping) else None  # type: ignore[return-value]  # a class has a read-only one


_MODULE_SPACE: Any = vars(ModuleType)["__dict__"]


def _instance_space(holder: object) -> Any:
    try:
        return object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return None


def look_up(module: object, name: str) -> tuple[Place, Any]:
    """Find a function of a module, or the method "Class.method".

    Returns:
        The place to put another one, and what a caller finds there now: as it is defined, so a staticmethod is one;
        MISSING if there is none.
    """
    *parents, last = name.split(".")
    called = getattr(module, "__name__", "?")
    owner: Any = module
    for parent in parents:
        owner = _found(owner, parent)
    if owner is MISSING or owner is None:
        return Place(f"{called}.{name}", {}, last), MISSING
    if inspect.isclass(owner):
        place = Place(f"{called}.{name}", owner, last)
        return place, inspect.getattr_static(owner, last, MISSING)
    space = space_of(owner)
    place = Place(f"{called}.{name}", space if type(space) is dict else owner, last)
    return place, _found(owner, last)


def _found(holder: object, name: str) -> Any:
    try:
        return getattr(holder, name, MISSING)
    except Exception:  # noqa: BLE001  # a lazy module can fail with anything: what it cannot give is missing
        return MISSING


def places_of(wanted: Mapping[int, object], framework: str) -> Iterator[tuple[Place, Any]]:
    """Find what holds some objects: attributes of any module, and entries of the framework's module-level dicts.

    Args:
        wanted: The objects by their id.
        framework: The package whose module-level dicts are searched too.
    """
    if not wanted:
        return
    # Copies: a list of pairs may collect garbage as it grows, and another thread's import adds a module meanwhile.
    for name, module in sys.modules.copy().items():
        space = space_of(module)
        if type(space) is not dict:
            continue
        theirs = name.partition(".")[0] == framework
        if not theirs and wanted.keys().isdisjoint(map(id, list(space.values()))):
            continue
        for key, held in space.copy().items():
            if id(held) in wanted:
                yield Place(f"{name}.{key}", space, key), held
            elif theirs and type(held) is dict and not (isinstance(key, str) and key.startswith("__")):
                for inner, value in held.copy().items():
                    if id(value) in wanted:
                        yield Place(f"{name}.{key}[{inner!r}]", held, inner), value

"""A framework's modules: which version lies where, what holds a function, and acting on an import.

Nothing is imported here. A worker of Ray runs its setup hook before it knows its GPUs; a framework that is imported
there asks the driver for devices too early, and then sees all of them. A checkout on the path hides an installed
distribution, and the distribution's metadata says nothing about it.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple
from urllib.parse import urlparse
from urllib.request import url2pathname

Act = Callable[[str], None]
State = Literal["absent", "partial", "whole"]

_waiting: list[tuple[str, Act]] = []


def once_imported(name: str, act: Act) -> None:
    """Call `act(name)` after the module called `name` is executed, before other code can import from it.

    An exception of `act` is one of the import.
    """
    _waiting.append((name, act))
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget(act: Act) -> None:
    """Cancel all that `once_imported` was told of an action."""
    _waiting[:] = [(name, waiting) for name, waiting in _waiting if waiting != act]
    if not _waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def state_of(name: str) -> State:
    """Return whether a module is imported to its end; "partial" if it is being imported, or lazy and not used yet."""
    module = sys.modules.get(name)
    if module is None:
        return "absent"
    lazy = type(module).__name__ == "_LazyModule" and type(module).__module__ == "importlib.util"
    return "partial" if lazy or getattr(space_of(module).get("__spec__"), "_initializing", False) else "whole"


def space_of(module: object) -> dict[str, Any]:
    """Return the namespace of a module; not by getattr, for which a lazy module would load."""
    try:
        space = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return space if isinstance(space, dict) else {}


def find(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
    """Ask the finders of this process, except for the one below, for a module; its parents are not imported."""
    for finder in list(sys.meta_path):
        # Not by importlib.util.find_spec: that asks this finder again, and imports the parents.
        ask = None if finder is _finder else getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if ask is None else ask(name, path, target)
        if spec is not None:
            return spec
    return None


# --- acting on imports ---


class _Finder(MetaPathFinder):
    """Find a module that is waited for with the other finders, and extend its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not any(name == fullname for name, _ in _waiting):
            return None
        spec = find(fullname, path, target)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """A loader that runs the waiting actions after its module."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        # Code that inspects the module afterwards finds the loader that it would have had.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for waiting in [waiting for waiting in _waiting if waiting[0] == name]:
            if waiting in _waiting:
                _waiting.remove(waiting)
            waiting[1](name)
        if not _waiting and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)


_finder = _Finder()


# --- which framework it is ---


class Origin(NamedTuple):
    """A framework as this process has it."""

    # The `__version__` of the imported module; before its import the version of the distribution that holds it; None
    # where neither says.
    version: str | None
    location: str | None
    # Version of an installed distribution of that name which does not hold the package; None without one.
    hidden: str | None


def origin_of(framework: str) -> Origin:
    """Look up where a top-level package lies and which version it is."""
    location = next(iter(_path(framework) or ()), None)
    said = getattr(sys.modules[framework], "__version__", None) if state_of(framework) == "whole" else None
    version = said if isinstance(said, str) else None
    try:
        distribution = metadata.distribution(framework)
    except metadata.PackageNotFoundError:
        return Origin(version, location, None)
    if location is None or _holds(distribution, framework, Path(location)):
        return Origin(version or distribution.version, location, None)
    return Origin(version, location, distribution.version)


def present(framework: str) -> bool:
    """Return whether a top-level package is imported or can be."""
    return sys.modules.get(framework) is not None or find(framework, None) is not None


def lacks(module: str) -> str | None:
    """Find the first part of a module's name that the framework does not have; None if it has all, or nobody knows."""
    called, *rest = module.split(".")
    path = _path(called)
    for part in rest:
        if not path:
            return None
        called = f"{called}.{part}"
        path = _path(called, path)
        if path is None:
            return called
    return None


def _path(name: str, within: list[str] | None = None) -> list[str] | None:
    """Where the submodules of a package are looked for; None if there is no such module."""
    module = sys.modules.get(name)
    given = space_of(module).get("__path__")
    if module is None:
        spec = find(name, within)
        if spec is None:
            return None
        given = spec.submodule_search_locations
    return list(given or ())


def _holds(distribution: metadata.Distribution, framework: str, location: Path) -> bool:
    """Return whether a package at a location is the distribution's: installed with its metadata, or as editable."""
    location = location.resolve()
    if location == Path(str(distribution.locate_file(framework))).resolve():
        return True
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not direct.get("dir_info", {}).get("editable"):
        return False
    return Path(url2pathname(urlparse(direct["url"]).path)).resolve() in location.parents


# --- where a function is held ---

MISSING: Any = object()


class Place(NamedTuple):
    """A name of a module, an entry of a dict in a module (a registry), or an attribute of a class."""

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
    """Find a function of a module, or the method "Class.method": the place to put another one, and what stands there.

    That is as it is defined, so a staticmethod is one; MISSING if there is none.
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
    """Find what holds some objects, given by id: names of any module, entries of the framework's module-level dicts."""
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

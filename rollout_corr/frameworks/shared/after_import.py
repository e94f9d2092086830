"""Act on a module whenever it is imported or reloaded, without importing it now.

A worker of Ray runs its setup hook before it knows its GPUs. A framework that is imported there asks the driver for
devices too early, and then sees all of them. So no module is imported in order to be replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Act = Callable[[str], None]

_waiting: dict[str, tuple[Act, ...]] = {}


def whenever_imported(name: str, act: Act) -> None:
    """Call `act(name)` after every execution of the module called `name`, before other code can import from it.

    An exception of `act` is one of the import: the module is not imported, and the next import tries again.
    """
    if act not in _waiting.get(name, ()):
        _waiting[name] = (*_waiting.get(name, ()), act)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    module = sys.modules.get(name)
    if module is not None and _unexecuted(module):
        # Somebody's importlib.util.LazyLoader has its loader already, and asks no finder again.
        spec = object.__getattribute__(module, "__spec__")
        if not isinstance(spec.loader, _Loader):
            spec.loader = _Loader(spec.loader, reloads=False)


def forget(name: str, act: Act) -> None:
    """Cancel `whenever_imported`; nothing happens if `act` is not waiting."""
    acts = tuple(other for other in _waiting.get(name, ()) if other != act)
    if acts:
        _waiting[name] = acts
    else:
        _waiting.pop(name, None)
    if not _waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def executed(name: str) -> bool:
    """Tell whether a module has been imported, to its end."""
    module = sys.modules.get(name)
    return module is not None and not _unexecuted(module) and not half_imported(name)


def half_imported(name: str) -> bool:
    """Tell whether a module is being imported at this moment, by any thread."""
    module = sys.modules.get(name)
    if module is None or _unexecuted(module):
        return False
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def find(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
    """Ask the finders of this process, but for the one below, for a module; its parents are not imported."""
    for finder in list(sys.meta_path):
        # Not by importlib.util.find_spec: that asks this finder again, and imports the parents.
        ask = None if finder is _finder else getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if ask is None else ask(name, path, target)
        if spec is not None:
            return spec
    return None


def _unexecuted(module: object) -> bool:
    """Tell whether a module waits for its first use, by importlib.util.LazyLoader."""
    return type(module).__name__ == "_LazyModule" and type(module).__module__ == "importlib.util"


class _Finder(MetaPathFinder):
    """Find a module that is waited for with the other finders, and extend its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting:
            return None
        spec = find(fullname, path, target)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, reloads=target is not None)
        return spec


class _Loader(Loader):
    """A loader that runs the waiting actions after its module."""

    def __init__(self, loader: Loader, reloads: bool) -> None:
        self._loader, self._reloads = loader, reloads

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__ if module.__spec__ is None else module.__spec__.name
        # Code that inspects the module afterwards finds the loader that it would have had.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException:
            # A module that fails to reload stays, with as many new functions as it got to.
            if self._reloads:
                _act(name)
            raise
        _act(name)


def _act(name: str) -> None:
    for act in _waiting.get(name, ()):
        act(name)


_finder = _Finder()

"""Act on a module when it is imported, without importing it now.

A worker of Ray runs its setup hook before it knows its GPUs. A framework that is imported there asks the driver for
devices too early, and then sees all of them. So no module is imported in order to be replaced.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Act = Callable[[ModuleType], None]

_waiting: dict[str, list[Act]] = {}


def when_imported(name: str, act: Act) -> None:
    """Call `act(module)` right after the module called `name` is executed, before other code can import from it."""
    _waiting.setdefault(name, []).append(act)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget(name: str, act: Act) -> None:
    """Cancel `when_imported`; nothing happens if `act` is not waiting."""
    acts = _waiting.get(name, [])
    if act in acts:
        acts.remove(act)
    if not acts:
        _waiting.pop(name, None)
    if not _waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


class _Finder(MetaPathFinder):
    """Find a module that is waited for with the other finders, and extend its loader."""

    def __init__(self) -> None:
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """A loader that runs the waiting actions after its module."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Code that inspects the module afterwards finds the loader that it would have had.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for act in _waiting.pop(module.__name__, []):
            act(module)


_finder = _Finder()

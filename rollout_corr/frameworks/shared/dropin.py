"""Replacement of a framework's functions: install, uninstall and report, the same way for every framework."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

from rollout_corr.frameworks.shared.after_import import forget, when_imported
from rollout_corr.spec.validate import one_of

LOGGER = logging.getLogger("rollout_corr")

Function = Callable[..., Any]


class Target(NamedTuple):
    """A function of the framework and its replacement.

    Attributes:
        module: Where the framework defines it.
        name: Its name there; "Class.method" for a method.
        ours: Takes the framework's arguments by the same names, and the drop-in's switches as keywords.
        takes_original: `ours` is a factory: it is given the framework's function and the switches, and returns the
            replacement.
    """

    module: str
    name: str
    ours: Function
    takes_original: bool = False

    @property
    def path(self) -> str:
        """Full name of the function."""
        return f"{self.module}.{self.name}"


class Installed(NamedTuple):
    """State of the replacement, as `installed()` returns it.

    Attributes:
        active: Whether every function of the framework that has been imported so far is replaced, and one is.
        why: The reason for `active`, in words.
        version: The framework's version; None where it is not known.
        replaced: Every place that holds a function of ours, as "module.name".
        waiting: Modules that have not been imported yet; their functions are replaced when they are.
        switches: What `install` was given.
    """

    active: bool
    why: str
    version: str | None
    replaced: tuple[str, ...]
    waiting: tuple[str, ...]
    switches: Mapping[str, object]


class DropIn:
    """The replaced functions of one framework.

    Args:
        framework: Name of its package, and of the distribution that has its version.
        checked: Versions against which its functions were compared.
        switches: The values that each switch of `install` may have, if it is a choice.
    """

    def __init__(self, framework: str, checked: tuple[str, ...], switches: Mapping[str, tuple[str, ...]] | None = None):
        self.framework, self.checked, self.choices = framework, checked, switches or {}
        self.targets: tuple[Target, ...] = ()
        self._lock = threading.RLock()
        self._switches: dict[str, object] | None = None
        self._originals: dict[str, Function] = {}
        self._replacements: dict[str, Function] = {}
        self._inherited: set[str] = set()
        self._said: set[tuple[object, ...]] = set()

    # --- what the framework is ---

    def version(self) -> str | None:
        """Look up the installed version; None if it is unknown."""
        try:
            return metadata.version(self.framework)
        except metadata.PackageNotFoundError:
            found = getattr(sys.modules.get(self.framework), "__version__", None)
            return found if isinstance(found, str) else None

    def _present(self) -> bool:
        return self.framework in sys.modules or importlib.util.find_spec(self.framework) is not None

    def _called(self) -> str:
        version = self.version()
        return self.framework if version is None else f"{self.framework} {version}"

    # --- installing ---

    def install(self, targets: tuple[Target, ...], **switches: object) -> Installed:
        """Replace functions of imported modules now, and of other modules when they are imported.

        Args:
            targets: The functions and their replacements.
            **switches: Keywords that every function of ours is called with.

        Raises:
            ImportError: The framework is not installed.
            RuntimeError: A function is missing or takes other arguments than ours; then nothing is replaced.
            ValueError: A switch has an unknown value.
        """
        self.check(switches)
        with self._lock:
            if switches == self._switches and targets == self.targets:
                return self.installed()
            if not self._present():
                raise ImportError(
                    f"rollout_corr.frameworks.{self.framework}: expected the package {self.framework!r} in this "
                    f"environment ({sys.prefix}), found none"
                )
            self.uninstall()
            for target in targets:
                if target.module in sys.modules:
                    self._check(sys.modules[target.module], target)
            self.targets, self._switches = targets, switches
            self._warn_unless_checked()
            for name in self._modules():
                if name in sys.modules:
                    self._replace(sys.modules[name])
                else:
                    when_imported(name, self._replace)
            status = self.installed()
            LOGGER.info("rollout-corr: %s", status.why)
            return status

    def check(self, switches: Mapping[str, object]) -> None:
        """Raise ValueError if a switch has an unknown value."""
        for name, value in switches.items():
            if name in self.choices:
                one_of(name, value, self.choices[name])

    def uninstall(self) -> None:
        """Restore the framework's own functions wherever they are imported by now; nothing if none is replaced."""
        with self._lock:
            for name in self._modules():
                forget(name, self._replace)
            back = {id(ours): self._originals[path] for path, ours in self._replacements.items()}
            for place in _places(back, self.framework):
                place.put(back[id(place.held)])
            for target in self.targets:
                if target.path in self._originals and "." in target.name:
                    self._restore_method(target)
            self._originals, self._replacements, self._inherited = {}, {}, set()
            self.targets, self._switches = (), None

    def installed(self) -> Installed:
        """Look up what is replaced in this process at this moment."""
        with self._lock:
            ours = {id(function): function for function in self._replacements.values()}
            replaced = [place.name for place in _places(ours, self.framework)]
            replaced += [t.path for t in self.targets if "." in t.name and self._holds_method(t)]
            waiting = tuple(name for name in self._modules() if self._switches is not None and name not in sys.modules)
            lost = [t.path for t in self.targets if t.path in self._replacements and t.path not in replaced]
            active = bool(replaced) and not lost
            why = self._why(replaced, waiting, lost)
            return Installed(active, why, self.version(), tuple(sorted(replaced)), waiting, self._switches or {})

    def _why(self, replaced: list[str], waiting: tuple[str, ...], lost: list[str]) -> str:
        called = self._called()
        if self._switches is None:
            return f"no function of {called} is replaced: install() was not called"
        if lost:
            return f"not all functions of {called} are replaced: other code has replaced {lost}"
        if not replaced:
            return f"no function of {called} is replaced yet: {', '.join(waiting)} has not been imported"
        later = f"; not imported yet: {', '.join(waiting)}" if waiting else ""
        return f"{called} uses the functions of rollout-corr in {len(replaced)} places{later}"

    def _modules(self) -> list[str]:
        return list(dict.fromkeys(target.module for target in self.targets))

    def _warn_unless_checked(self) -> None:
        version = self.version()
        if version in self.checked or ("version", version) in self._said:
            return
        self._said.add(("version", version))
        LOGGER.warning(
            "rollout-corr: %s was not checked, only %s for the same numbers, metrics and errors. Of this version the "
            "names and the arguments of the functions are compared: %s",
            self._called() if version is not None else f"{self.framework} of an unknown version",
            ", ".join(self.checked),
            ", ".join(target.path for target in self.targets),
        )

    def _check(self, module: ModuleType, target: Target) -> None:
        """Raise if replacing a function would break a call of it."""
        owner, name = _owner(module, target.name)
        original = getattr(owner, name, None)
        if original is None:
            raise RuntimeError(
                f"{self._called()} has no {target.path}; {', '.join(self.checked)} has. Nothing replaced"
            )
        if target.takes_original:
            return
        theirs, ours = _parameters(original), _parameters(target.ours)
        if unknown := [parameter for parameter in theirs if parameter not in ours]:
            raise RuntimeError(
                f"{target.path} of {self._called()} takes {unknown[0]!r}, which {', '.join(self.checked)} does not. "
                "Nothing replaced"
            )

    def _replace(self, module: ModuleType) -> None:
        """Replace the functions that a module defines, there and wherever they have been imported by name."""
        with self._lock:
            targets = [target for target in self.targets if target.module == module.__name__]
            for target in targets:
                self._check(module, target)
            swaps: dict[int, Function] = {}
            for target in targets:
                owner, name = _owner(module, target.name)
                original = inspect.getattr_static(owner, name) if inspect.isclass(owner) else getattr(owner, name)
                ours = _standing_in(original, target, self._switches or {})
                self._originals[target.path], self._replacements[target.path] = original, ours
                swaps[id(original)] = ours
                if inspect.isclass(owner):
                    if name not in vars(owner):
                        self._inherited.add(target.path)
                    setattr(owner, name, ours)
            for place in _places(swaps, self.framework):
                place.put(swaps[id(place.held)])

    def _holds_method(self, target: Target) -> bool:
        module, ours = sys.modules.get(target.module), self._replacements.get(target.path)
        if module is None or ours is None:
            return False
        owner, name = _owner(module, target.name)
        return vars(owner).get(name) is ours

    def _restore_method(self, target: Target) -> None:
        if not self._holds_method(target):
            return
        owner, name = _owner(sys.modules[target.module], target.name)
        if target.path in self._inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, self._originals[target.path])

    # --- what it does ---

    def say(self, active: bool, why: str) -> None:
        """Log once, at the first call, whether the framework's batches are corrected."""
        if (active, why) in self._said:
            return
        self._said.add((active, why))
        # A warning either way: below that nothing is shown in a process that has not set up logging, and a correction
        # that silently does not happen is what people lose weeks to.
        LOGGER.warning("rollout-corr in %s: correction active: %s, %s", self._called(), "yes" if active else "no", why)


def _parameters(function: Function) -> list[str]:
    return list(inspect.signature(function).parameters)


def _owner(module: ModuleType, name: str) -> tuple[Any, str]:
    """Return the module, or the class in it, that holds a function, and the function's name there."""
    parent, _, last = name.rpartition(".")
    return (getattr(module, parent) if parent else module), last


def _standing_in(original: Function, target: Target, switches: Mapping[str, object]) -> Function:
    """Make the replacement: a new function for each installation, so that every place that holds it can be found again.

    It has the name of the original, so a pickle of it refers to whatever function the other process has there.
    """
    if isinstance(original, staticmethod):
        return staticmethod(_standing_in(original.__func__, target, switches))
    if target.takes_original:
        made: Function = functools.wraps(original)(target.ours(original, **switches))
        return made

    @functools.wraps(original)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return target.ours(*args, **kwargs, **switches)

    return ours


class _Place(NamedTuple):
    """An attribute of a module, or an entry of a mapping of one (a registry)."""

    name: str
    holder: MutableMapping[Any, Any]
    key: Any
    held: Any

    def put(self, function: Function) -> None:
        self.holder[self.key] = function


def _places(wanted: Mapping[int, object], framework: str) -> Iterator[_Place]:
    """Find what holds some objects: attributes of any module, and entries of the framework's module-level dicts."""
    if not wanted:
        return
    for name, module in list(sys.modules.items()):
        # Not by getattr: a lazy module would load what it is asked for.
        space = getattr(module, "__dict__", None)
        if not isinstance(space, dict):
            continue
        theirs = name.partition(".")[0] == framework
        for key, held in list(space.items()):
            if id(held) in wanted:
                yield _Place(f"{name}.{key}", space, key, held)
            elif theirs and type(held) is dict and not key.startswith("__"):
                for inner, value in list(held.items()):
                    if id(value) in wanted:
                        yield _Place(f"{name}.{key}[{inner!r}]", held, inner, value)

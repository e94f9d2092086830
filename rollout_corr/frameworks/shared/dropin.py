"""Replacement of a framework's functions: install, uninstall and report, the same way for every framework."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Mapping

from rollout_corr.frameworks.shared.after_import import executed, forget, half_imported, whenever_imported
from rollout_corr.frameworks.shared.dumping import DumpPath, Dumps
from rollout_corr.frameworks.shared.installed import Installed, reason
from rollout_corr.frameworks.shared.origin import Origin, lacks, origin_of, present
from rollout_corr.frameworks.shared.places import Changes, look_up, places_of
from rollout_corr.frameworks.shared.swaps import Live, Swap, swap_of
from rollout_corr.frameworks.shared.swaps import Target as Target
from rollout_corr.specs.validate import one_of

LOGGER = logging.getLogger("rollout_corr")


class DropIn:
    """The replaced functions of one framework.

    Args:
        framework: Name of its package, and of the distribution that has its version.
        checked: Versions against which its functions were compared.
        switches: The values that each switch of `install` may have, if it is a choice.
        not_covered: What the framework corrects or trains with besides, in words; each with the module whose functions
            cover it where they are among the targets, or None.
        advice: What else a user can do with a version that does not fit.
    """

    def __init__(
        self,
        framework: str,
        checked: tuple[str, ...],
        switches: Mapping[str, tuple[str, ...]] | None = None,
        not_covered: Mapping[str, str | None] | None = None,
        advice: str = "",
    ):
        self.framework, self.checked, self.choices = framework, checked, switches or {}
        self.not_covered, self.advice = not_covered or {}, advice
        self.targets: tuple[Target, ...] = ()
        self.dumps = Dumps()
        self._lock = threading.RLock()
        self._switches: dict[str, object] | None = None
        self._live = Live()
        self._swaps: list[Swap] = []
        self._originals: dict[str, list[object]] = {}
        self._changes = Changes()
        self._refused: dict[str, str] = {}
        self._last_refusal: str | None = None
        self._said: set[tuple[object, ...]] = set()

    # --- what the framework is ---

    def origin(self) -> Origin:
        """Look up version and place of the framework."""
        return origin_of(self.framework)

    def version(self) -> str | None:
        """Look up the version of the framework that is imported or would be; None if it is unknown."""
        return self.origin().version

    def _is_checked(self, origin: Origin) -> bool:
        # A module that reads its version from the metadata of a distribution which does not hold it knows nothing.
        return origin.version in self.checked and not (origin.foreign and origin.version == origin.distribution)

    def _called(self) -> str:
        version = self.version()
        return self.framework if version is None else f"{self.framework} {version}"

    # --- installing ---

    def install(
        self, targets: tuple[Target, ...], dump: DumpPath = None, every: int = 100, **switches: object
    ) -> Installed:
        """Replace functions of imported modules now, and of other modules whenever they are imported.

        Args:
            targets: The functions and their replacements.
            dump: Where some sequences of every so many corrections are written; see `dumping`.
            every: How many.
            **switches: Keywords that every function of ours is called with.

        Raises:
            ImportError: The framework is not installed.
            RuntimeError: A module or a function is missing, or takes other arguments than ours; then this call has
                replaced nothing. An import raises it too, if the module is imported later.
            ValueError: A switch has an unknown value.
        """
        self.check(switches)
        Dumps().turn(dump, every)  # raises
        if not present(self.framework):
            raise ImportError(
                f"rollout_corr.frameworks.{self.framework}: expected the package {self.framework!r} in this "
                f"environment ({sys.prefix}), found none"
            )
        names = _modules(targets)
        try:
            # An import that begins from here on is seen by `_imported`; one that began before is waited for. Not under
            # the lock, which the importing thread may need.
            for name in names:
                whenever_imported(name, self._imported)
            while True:
                for name in names:
                    _wait_for(name)
                with self._lock:
                    if not any(half_imported(name) for name in names):
                        status = self._install(targets, switches)
                        self.dumps.turn(dump, every)
                        return status
        except RuntimeError as error:
            self._last_refusal = str(error)
            raise
        finally:
            with self._lock:
                for name in set(names) - set(_modules(self.targets)):
                    forget(name, self._imported)

    def _install(self, targets: tuple[Target, ...], switches: dict[str, object]) -> Installed:
        if switches == self._switches and targets == self.targets and not self._lost() and not self._refused:
            return self.installed()
        self._require(targets)
        live = Live()
        swaps = [swap for name in _modules(targets) for swap in self._swaps_of(name, targets, switches, live)]
        former, before, refused = self.targets, self._switches, self._refused
        self._clear()
        try:
            self._take_on(targets, switches, swaps, live)
        except RuntimeError:
            if refused:
                self.targets, self._switches, self._refused = former, before, refused
            elif before is not None:
                live = Live()
                swaps = [swap for name in _modules(former) for swap in self._swaps_of(name, former, before, live)]
                self._take_on(former, before, swaps, live)
            raise
        for name in set(_modules(former)) - set(_modules(targets)):
            forget(name, self._imported)
        self._warn_unless_checked()
        status = self.installed()
        LOGGER.info("rollout-corr: %s", status.why)
        return status

    def _take_on(self, targets: tuple[Target, ...], switches: dict[str, object], swaps: list[Swap], live: Live) -> None:
        self._live = live
        self._put(swaps)
        self.targets, self._switches = targets, switches

    def check(self, switches: Mapping[str, object]) -> None:
        """Raise ValueError if a switch has an unknown value."""
        for name, value in switches.items():
            if name in self.choices:
                one_of(name, value, self.choices[name])

    def uninstall(self) -> None:
        """Restore the framework's own functions wherever they are imported by now; nothing if none is replaced.

        A function of ours that other code keeps, in a closure for example, calls the framework's from now on.
        """
        with self._lock:
            for name in _modules(self.targets):
                forget(name, self._imported)
            self._clear()

    def _clear(self) -> None:
        """Forget the installation, after everything is as it was."""
        self._take_back()
        self._refused, self._last_refusal = {}, None
        self.targets, self._switches = (), None
        self.dumps.turn(None, 1)

    def installed(self) -> Installed:
        """Look up what is replaced in this process at this moment."""
        with self._lock:
            replaced = sorted({*self._places(), *(t.path for t in self.targets if "." in t.name and self._holds(t))})
            waiting = tuple(name for name in _modules(self.targets) if not executed(name))
            lost = self._lost()
            origin = self.origin()
            return Installed(
                active=bool(replaced) and not lost and not self._refused,
                why=reason(
                    self.framework if origin.version is None else f"{self.framework} {origin.version}",
                    replaced,
                    waiting,
                    lost,
                    self._not_covered(),
                    asked=self._switches is not None,
                    refused=tuple(self._refused.values()),
                    last_refusal=self._last_refusal,
                ),
                version=origin.version,
                replaced=tuple(replaced),
                waiting=waiting,
                switches=self._switches or {},
                location=origin.location,
                checked=self._is_checked(origin),
                covered=tuple(target.path for target in self.targets),
                not_covered=self._not_covered(),
            )

    def _not_covered(self) -> tuple[str, ...]:
        covered = _modules(self.targets)
        return tuple(words for words, module in self.not_covered.items() if module not in covered)

    # --- what is checked ---

    def _require(self, targets: tuple[Target, ...]) -> None:
        """Raise if the framework has not the modules that are replaced; none is imported to find out."""
        for name in _modules(targets):
            missing = None if sys.modules.get(name) is not None else lacks(name)
            if missing is not None:
                origin = self.origin()
                raise RuntimeError(
                    f"{self._called()} at {origin.location} has no module {missing}; {', '.join(self.checked)} has "
                    f"{name}. {self._advice()}"
                )

    def _swaps_of(
        self, name: str, targets: tuple[Target, ...], switches: Mapping[str, object], live: Live
    ) -> list[Swap]:
        """Make the replacements for a module if it is there; raise if one of its functions does not fit."""
        module = sys.modules.get(name)
        if module is None or not (executed(name) or half_imported(name)):
            return []
        found = []
        for target in targets:
            if target.module == name:
                place, held = look_up(module, target.name)
                original = next((swap.original for swap in self._swaps if swap.ours is held), held)
                swap = swap_of(target, place, original, switches, live)
                if isinstance(swap, str):
                    raise RuntimeError(f"{target.path} of {self._called()} {swap}. {self._advice()}")
                found.append(swap)
                # What a module had before it was reloaded others may still have by name.
                older = [known for known in self._originals.get(target.path, ()) if known is not original]
                swaps = [swap_of(target, None, known, switches, live) for known in older]
                found += [swap for swap in swaps if not isinstance(swap, str)]
        return found

    def _advice(self) -> str:
        return (
            f"Nothing of {self.framework} is replaced by this; install a version that was compared "
            f"({', '.join(self.checked)}){self.advice}, or do without rollout_corr.frameworks.{self.framework}"
        )

    def _warn_unless_checked(self) -> None:
        origin = self.origin()
        known = origin.version is not None or origin.foreign or executed(self.framework)
        if not known or self._is_checked(origin) or ("version", origin) in self._said:
            return
        self._said.add(("version", origin))
        beside = f" at {origin.location}" if origin.location else ""
        if origin.foreign:
            beside += f" (a checkout; the installed distribution {origin.distribution} lies elsewhere)"
        LOGGER.warning(
            "rollout-corr: %s%s was not checked, only %s for the same numbers, metrics and errors. Of this version the "
            "signatures of the functions are compared: %s",
            f"{self.framework} of an unknown version" if origin.version is None else self._called(),
            beside,
            ", ".join(self.checked),
            ", ".join(target.path for target in self.targets),
        )

    # --- what is replaced ---

    def _imported(self, name: str) -> None:
        """Replace the functions of a module that has just been executed, or give up everything and raise."""
        with self._lock:
            if self._switches is None or name not in _modules(self.targets):
                return
            ready = [name, *(other for other in _modules(self.targets) if other != name and executed(other))]
            try:
                self._refused.pop(name, None)
                swaps = [
                    swap
                    for module in ready
                    for swap in self._swaps_of(module, self.targets, self._switches, self._live)
                    if not any(swap.original is other.original for other in self._swaps)
                ]
                if not self._refused:
                    self._live.on = True
                    self._put(swaps)
            except RuntimeError as error:
                self._take_back()
                self._refused[name] = str(error)
                LOGGER.warning("rollout-corr: %s", self.installed().why)
                raise
            self._warn_unless_checked()

    def _put(self, swaps: list[Swap]) -> None:
        """Put all replacements where they are defined and wherever they have been imported by name, or none."""
        self._swaps += swaps
        place = None
        try:
            for swap in swaps:
                if swap.place is not None:
                    place = swap.place
                    self._changes.put(place, swap.ours)
            ours = {id(original): new for swap in reversed(swaps) for original, new in swap.pairs()}
            for place, held in places_of(ours, self.framework):
                self._changes.put(place, ours[id(held)])
            for swap in swaps:
                known = self._originals.setdefault(swap.target.path, [])
                known += [swap.original] * all(swap.original is not other for other in known)
        except Exception as error:  # the framework's class or module refuses an assignment with whatever it likes
            self._take_back()
            raise RuntimeError(
                f"{'' if place is None else place.name} of {self._called()} could not be replaced "
                f"({type(error).__name__}: {error}). {self._advice()}"
            ) from error

    def _take_back(self) -> None:
        """Restore every place; a function of ours that other code keeps calls the framework's from now on."""
        self._live.on = False
        failed = self._changes.take_back()
        back = {id(new): original for swap in self._swaps for original, new in swap.pairs()}
        for place, held in places_of(back, self.framework):
            place.put(back[id(held)])
        self._swaps = []
        if failed:
            LOGGER.warning(
                "rollout-corr: could not restore %s; what is there now still calls the function of %s",
                ", ".join(failed),
                self.framework,
            )

    def _places(self) -> list[str]:
        """Every place in a module that holds a function of ours."""
        ours = {id(new): new for swap in self._swaps for _, new in swap.pairs()}
        return [place.name for place, _ in places_of(ours, self.framework)]

    def _lost(self) -> list[str]:
        """The functions that are not ours, of modules that have been imported."""
        return [target.path for target in self.targets if executed(target.module) and not self._holds(target)]

    def _holds(self, target: Target) -> bool:
        held = look_up(sys.modules.get(target.module), target.name)[1]
        return any(swap.ours is held and swap.target == target for swap in self._swaps)

    # --- what it does ---

    def say(self, active: bool, why: str) -> None:
        """Log once, at the first call, whether the framework's batches are corrected."""
        if (active, why) in self._said:
            return
        self._said.add((active, why))
        # A warning either way: below that nothing is shown in a process that has not set up logging, and a correction
        # that silently does not happen is what people lose weeks to.
        LOGGER.warning("rollout-corr in %s: correction active: %s, %s", self._called(), "yes" if active else "no", why)


def _modules(targets: tuple[Target, ...]) -> list[str]:
    return list(dict.fromkeys(target.module for target in targets))


def _wait_for(name: str) -> None:
    """Let another thread's import of a module end; what is half imported has not all of its functions."""
    if not half_imported(name):
        return
    # Waits for the lock of that import, and returns at once if this very thread is in the middle of it.
    importlib.import_module(name)
    if half_imported(name):
        raise RuntimeError(
            f"{name} is being imported by the code that calls install(), and is not complete. Nothing is replaced; "
            "call install() before that import, or after it"
        )

"""Replacement of a framework's functions: install, uninstall and report, the same way for every framework."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, get_args

from torch import Tensor

from ...backends.choose import BACKENDS
from ...specs.correction import Spec, no_spec
from ...specs.validate import one_of, shown
from . import signatures
from .imports import (
    MISSING,
    Origin,
    Place,
    forget,
    lacks,
    look_up,
    once_imported,
    origin_of,
    places_of,
    present,
    state_of,
)
from .settings import boolean, nearest
from .watching import SILENCE, Dumps, Speaker

if TYPE_CHECKING:
    from ...metrics.statistics import PendingMetrics

DumpPath = str | os.PathLike[str] | None
Function = Callable[..., Any]
Arguments = ParamSpec("Arguments")
# The metrics of ours that a framework's log gets with a Spec.
Logged = Literal["dashboard", "native"]
LOGGED: tuple[Logged, ...] = get_args(Logged)

# What the docstring of an `install` says that has this switch.
OF_METRICS = """
    metrics: Which of our metrics are logged with `spec`: the ten of the "dashboard", or all, "native". The framework's
        own metrics are logged in either case."""
# What the docstring of every framework's `install` says, behind its switches.
OF_INSTALL = """
    backend: "auto" takes the Triton kernels for tensors on a GPU and plain torch elsewhere; or "torch" or "triton".
    warnings: Log what `warnings()` says of the corrections: each warning once, and again every hundredth correction
        while it holds.
    dump: A folder, or a name that ends in .jsonl: 64 sequences of every so many corrections are written there in the
        background, for `rollout-corr report` and `doctor`.
    every: How many corrections come to one that is written.

Returns:
    What is replaced now.

Raises:
    ImportError: {framework} is not installed.
    RuntimeError: This {framework} lacks a module or a function, or a function takes other arguments; a module is
        being imported by the code that calls this; or other code has replaced or reloaded what the last call replaced.
        Then this call replaces nothing. Of a module that is imported later its import raises it, and all is restored.
    TypeError: A switch has the wrong type, named.
    ValueError: A switch has a wrong value, named.
"""

LOGGER = logging.getLogger("rollout_corr")


class Target(NamedTuple):
    """A function of the framework, by its module and name there ("Class.method" for a method), and its replacement."""

    module: str
    name: str
    # Takes the framework's arguments: names, order, kinds and defaults are the same. The drop-in's switches are
    # keyword-only and have defaults.
    ours: Function
    # `ours` is a factory: it is given the framework's function and the switches, and returns the replacement.
    takes_original: bool = False
    # How many of the first parameters an older version takes; `ours` has defaults for the others.
    also: int | None = None

    @property
    def path(self) -> str:
        """Full name of the function."""
        return f"{self.module}.{self.name}"


class Installed(NamedTuple):
    """State of the replacement, as `installed()` returns it."""

    in_place: bool  # whether every function of the framework that has been imported so far is replaced, and one is
    why: str  # the reason for `in_place`, in words
    # Whether the last call of one of them corrected its batch; None: this process has seen no call since `install`.
    active: bool | None
    last: str  # how that batch was corrected, or why it was not; empty without a call
    # The framework's version, of the module that is imported or would be; None where it is not known.
    version: str | None
    replaced: tuple[str, ...]  # every place that holds a function of ours, as "module.name"
    waiting: tuple[str, ...]  # modules that have not been imported yet; their functions are replaced when they are
    switches: Mapping[str, object]  # what `install` was given
    location: str | None  # folder of the framework's package; None where it is not known
    checked: bool  # whether this version is one that was compared
    covered: tuple[str, ...]  # the functions that this installation is about, by their full names
    # What else the framework corrects or trains with, in words; empty where nothing is installed.
    not_covered: tuple[str, ...]

    def __repr__(self) -> str:
        """A table of a few lines, with all that is not covered; the other fields have the whole names."""
        at_last = "no call in this process yet"
        if self.active is not None:
            at_last = f"{'yes' if self.active else 'no'}, at the last call: {self.last}"
        more = f" and {len(self.waiting) - 1} more" if len(self.waiting) > 1 else ""
        later = f"{self.waiting[0]}{more}, replaced when imported" if self.waiting else "-"
        given = ", ".join(f"{name}={value!r}" for name, value in self.switches.items())
        rows = [
            ("replaced", f"{'yes' if self.in_place else 'no'}: {self.why.partition(';')[0]}"),
            ("active", at_last),
            ("waiting", later),
            ("switches", given or "-"),
            *zip(("not covered", *[""] * len(self.not_covered)), self.not_covered or ("-",), strict=False),
        ]
        return "\n".join(
            f"{name:12} {line}"
            for head, words in rows
            # The reason why nothing is corrected is worth two lines.
            for name, line in zip((head, ""), textwrap.wrap(words, 85, max_lines=1 + (head == "active")), strict=False)
        )


@dataclass(eq=False)
class Swap:
    """A replacement of one function, new for each installation, so that every place that holds it can be found again.

    `ours` has the name of the original, so a pickle of it refers to whatever function the other process has there. Code
    that keeps it after `uninstall` calls the original, since `on` is then False. `before` is what stood in the place:
    MISSING where a class inherits the function.
    """

    target: Target
    place: Place
    original: Function
    ours: Function = field(init=False)
    static: bool
    on: bool = True
    before: Any = MISSING

    def stand_in(self, ours: Function, switches: Mapping[str, object]) -> None:
        """Make the function that stands in for the original."""

        @functools.wraps(self.original)
        def standing_in(*args: Any, **kwargs: Any) -> Any:
            return ours(*args, **kwargs, **switches) if self.on else self.original(*args, **kwargs)

        self.ours = standing_in

    def put(self) -> None:
        """Put it where the framework defines the original."""
        self.before = self.place.held()
        self.place.put(staticmethod(self.ours) if self.static else self.ours)

    def stands(self, held: object) -> bool:
        """Return whether a place holds it."""
        return (held.__func__ if isinstance(held, staticmethod) else held) is self.ours

    def restore(self) -> None:
        """Put back what stood there, unless other code has replaced it since."""
        self.on = False
        if self.stands(self.place.held()):
            self.place.put(self.before)


class DropIn:
    """The replaced functions of one framework.

    Args:
        framework: Name of its package, and of the distribution that has its version.
        checked: Versions against which its functions were compared.
        switches: The values that each switch of `install` may have, if it is a choice.
        not_covered: What else the framework corrects or trains with, in words; each with the module whose functions
            cover it where they are among the targets, or None.
        advice: What else a user can do with a version that does not fit.
        brings: What its correction is handed wheres log-probs and mask, of NEEDS: a Spec that needs more is refused.
    """

    def __init__(
        self,
        framework: str,
        checked: tuple[str, ...],
        switches: Mapping[str, tuple[str, ...]] | None = None,
        not_covered: Mapping[str, str | None] | None = None,
        advice: str = "",
        brings: tuple[str, ...] = (),
    ):
        self.framework, self.checked = framework, checked
        self.choices: Mapping[str, tuple[str, ...]] = {"backend": BACKENDS, "metrics": LOGGED, **(switches or {})}
        self.not_covered, self.advice, self.brings = not_covered or {}, advice, brings
        self.targets: tuple[Target, ...] = ()
        self.speaker: Speaker | None = Speaker(self._called)
        self.dumps: Dumps | None = None
        self._lock = threading.RLock()
        self._switches: dict[str, object] | None = None
        self._swaps: list[Swap] = []
        self._last_refusal: str | None = None
        self._said: set[tuple[object, ...]] = set()
        # What was said of batches since the last `install`, and what holds for the last batch.
        self._told: set[tuple[bool, str]] = set()
        self._last: tuple[bool, str] | None = None
        self._compared = False

    # --- installing ---

    def documents(self, install: Callable[Arguments, Installed]) -> Callable[Arguments, Installed]:
        """Add to the docstring of the framework's `install`, which ends with its switches, what holds for all."""
        own = inspect.getdoc(install) or ""
        arguments = "" if "Args:" in own else "\n\nArgs:"
        metrics = OF_METRICS if "metrics" in inspect.signature(install).parameters else ""
        install.__doc__ = own + arguments + metrics + OF_INSTALL.format(framework=self.framework)
        return install

    def install(
        self,
        targets: tuple[Target, ...],
        dump: DumpPath = None,
        every: int = 100,
        warnings: bool = True,
        **switches: object,
    ) -> Installed:
        """Replace functions of imported modules now, and of other modules whenever they are imported.

        `dump`, `every` and `warnings` are those of OF_INSTALL; each function of ours is called with the other switches.

        Raises:
            ImportError: The framework is not installed.
            RuntimeError: A module is missing or half imported, a function is missing, takes other arguments than ours,
                or was replaced by other code since the last call. Then this call has replaced nothing. An import raises
                it too, if the module is imported later; then everything is uninstalled.
            TypeError: A switch has a value of the wrong type.
            ValueError: A switch has an unknown value.
        """
        self.check(switches)
        boolean("warnings", warnings)
        if dump is None and every != 100:
            raise ValueError(f"every: expected dump=... too, which says where to write, got every={every} alone")
        dumps = None if dump is None else Dumps(dump, every)
        if not present(self.framework):
            raise ImportError(
                f"rollout_corr.frameworks.{self.framework}: expected the package {self.framework!r} in this "
                f"environment ({sys.prefix}), found none"
            )
        with self._lock:
            if (targets, switches) != (self.targets, self._switches) or self._lost():
                self._install(targets, switches)
            self._watch(Speaker(self._called, SILENCE) if warnings else None, dumps)
            return self.installed()

    def _watch(self, speaker: Speaker | None, dumps: Dumps | None) -> None:
        if self.speaker is not None:
            self.speaker.finish()
        self.speaker, self.dumps = speaker, dumps
        self._told, self._last, self._compared = set(), None, False

    def _install(self, targets: tuple[Target, ...], switches: dict[str, object]) -> None:
        try:
            self._require(targets)
            swaps = self._swaps_of(targets, switches)
        except RuntimeError as error:
            self._last_refusal = str(error)
            raise
        self.uninstall()
        self.targets, self._switches = targets, switches
        self._put(swaps)
        for name in _modules(targets):
            if state_of(name) != "whole":
                once_imported(name, self._imported)
        self._warn_unless_checked()
        LOGGER.info("rollout-corr: %s", self.installed().why)

    def check(self, switches: Mapping[str, object]) -> None:
        """Raise ValueError or TypeError if a switch has a wrong value."""
        for name, value in switches.items():
            if name in self.choices:
                one_of(name, value, self.choices[name])
        spec = switches.get("spec")
        if spec is None:
            return
        if not isinstance(spec, Spec):
            raise no_spec(spec, "a Spec or None")
        for need, needed in NEEDS.items():
            if need not in self.brings and needed(spec):
                raise ValueError(
                    f"spec: expected one that needs no {need}, which {self.framework} does not pass to its correction, "
                    f"got {shown(spec)}"
                )

    def uninstall(self) -> None:
        """Restore the framework's own functions; one of ours that other code keeps calls these from then on."""
        with self._lock:
            forget(self._imported)
            for swap in reversed(self._swaps):
                swap.restore()
            originals = {id(swap.ours): swap.original for swap in self._swaps}
            for place, held in places_of(originals, self.framework):
                place.put(originals[id(held)])
            self.targets, self._switches, self._swaps, self._last_refusal = (), None, [], None
            self._watch(Speaker(self._called), None)

    # --- what is checked ---

    def _require(self, targets: tuple[Target, ...]) -> None:
        """Raise if modules cannot be replaced now; none is imported to find out."""
        if lost := self._lost():
            raise self._refusal(
                f"{lost[0]} was replaced or reloaded by other code since the last install(); call uninstall() first"
            )
        for name in _modules(targets):
            state = state_of(name)
            if state == "partial":
                raise self._refusal(
                    f"{name} is being imported; call rollout_corr.frameworks.{self.framework}.install() before that "
                    "import begins, or after it"
                )
            missing = lacks(name) if state == "absent" else None
            if missing is not None:
                raise self._refusal(f"{self._called()} at {origin_of(self.framework).location} has no module {missing}")

    def _refusal(self, words: str) -> RuntimeError:
        versions = ", ".join(self.checked)
        return RuntimeError(
            f"{words}. Nothing of {self.framework} is replaced by this: rollout_corr.frameworks.{self.framework} "
            f"serves {self.framework} {versions}{self.advice}"
        )

    def _swaps_of(self, targets: Iterable[Target], switches: Mapping[str, object]) -> list[Swap]:
        """Make the replacements for the modules that are there; raise if a function does not fit."""
        found = []
        for target in targets:
            module = sys.modules.get(target.module)
            if module is None:
                continue
            place, held = look_up(module, target.name)
            static = isinstance(held, staticmethod)
            plain = held.__func__ if static else held
            plain = next((swap.original for swap in self._swaps if swap.ours is plain), plain)
            path = f"{target.path} of {self._called()}"
            if plain is MISSING or plain is None:
                raise self._refusal(f"{path} is missing")
            ours = target.ours(plain, **switches) if target.takes_original and callable(plain) else target.ours
            problem = signatures.difference(plain, signatures.expected_of(ours, target.also))
            if problem is not None:
                raise self._refusal(f"{path} {problem}")
            swap = Swap(target, place, plain, static)
            swap.stand_in(ours, {} if target.takes_original else switches)
            found.append(swap)
        return found

    # --- what is replaced ---

    def _imported(self, name: str) -> None:
        """Replace the functions of a module that has just been executed, or uninstall everything and raise."""
        with self._lock:
            if self._switches is None:
                return
            try:
                self._put(self._swaps_of([t for t in self.targets if t.module == name], self._switches))
            except RuntimeError as error:
                self.uninstall()
                self._last_refusal = str(error)
                LOGGER.warning("rollout-corr: %s", self.installed().why)
                raise
            self._warn_unless_checked()

    def _put(self, swaps: list[Swap]) -> None:
        """Put replacements where the functions are defined and wherever they have been imported by name."""
        self._swaps += swaps
        for swap in swaps:
            swap.put()
        ours = {id(swap.original): swap.ours for swap in reversed(swaps)}
        for place, held in places_of(ours, self.framework):
            place.put(ours[id(held)])

    def _holds(self, target: Target) -> bool:
        held = look_up(sys.modules.get(target.module), target.name)[1]
        return any(swap.target == target and swap.stands(held) for swap in self._swaps)

    def _lost(self) -> list[str]:
        """The functions that are not ours, of modules that have been imported."""
        return [t.path for t in self.targets if state_of(t.module) == "whole" and not self._holds(t)]

    # --- what is reported ---

    def installed(self) -> Installed:
        """Look up what is replaced in this process at this moment."""
        with self._lock:
            ours = {id(swap.ours): swap for swap in self._swaps}
            found = {place.name for place, _ in places_of(ours, self.framework)}
            replaced = sorted(found | {t.path for t in self.targets if "." in t.name and self._holds(t)})
            waiting = [name for name in _modules(self.targets) if state_of(name) != "whole"]
            covered = _modules(self.targets)
            known = {} if self._switches is None else self.not_covered
            missing = tuple(words for words, module in known.items() if module not in covered)
            lost, origin = self._lost(), origin_of(self.framework)
            active, last = self._last or (None, "")
            return Installed(
                in_place=bool(replaced) and not lost,
                why=self._why(replaced, waiting, lost, missing),
                active=active,
                last=last,
                version=origin.version,
                replaced=tuple(replaced),
                waiting=tuple(waiting),
                switches=self._switches or {},
                location=origin.location,
                checked=self._is_checked(origin),
                covered=tuple(target.path for target in self.targets),
                not_covered=missing,
            )

    def _why(self, replaced: list[str], waiting: list[str], lost: list[str], missing: Iterable[str]) -> str:
        called = self._called()
        if self._switches is None:
            words = "install() was not called" if self._last_refusal is None else f"install(): {self._last_refusal}"
            return f"no function of {called} is replaced: {words}"
        if lost:
            return f"not all functions of {called} are replaced: other code has replaced or reloaded {lost}"
        if not replaced:
            return f"no function of {called} is replaced yet; waiting for the import of {', '.join(waiting)}"
        later = f"; waiting for the import of {', '.join(waiting)}" if waiting else ""
        later += "".join(f"; not covered: {', '.join(words)}" for words in [missing] if words)
        later += "" if self._last_refusal is None else f"; the last install() changed nothing: {self._last_refusal}"
        return f"{called} uses the functions of rollout-corr in {len(replaced)} places{later}"

    def _called(self) -> str:
        version = origin_of(self.framework).version
        return self.framework if version is None else f"{self.framework} {version}"

    def _is_checked(self, origin: Origin) -> bool:
        # A module that reads its version from the metadata of a distribution which does not hold it knows nothing.
        return origin.version in self.checked and origin.version != origin.hidden

    def _warn_unless_checked(self) -> None:
        origin = origin_of(self.framework)
        # A checkout without metadata says its version when it is imported, not before.
        known = origin.version is not None or state_of(self.framework) == "whole"
        if not known or self._is_checked(origin) or ("version", origin) in self._said:
            return
        self._said.add(("version", origin))
        where = f" at {origin.location}" if origin.location else ""
        if origin.hidden:
            where += f" (a checkout; the installed distribution {origin.hidden} lies elsewhere)"
        LOGGER.warning(
            "rollout-corr: %s%s was not checked, only %s for the same numbers, metrics and errors. Of this version the "
            "signatures of the functions are compared: %s",
            f"{self.framework} of an unknown version" if origin.version is None else self._called(),
            where,
            ", ".join(self.checked),
            ", ".join(target.path for target in self.targets),
        )

    @property
    def switches(self) -> Mapping[str, Any]:
        """The switches that `install` was given; empty before it."""
        return self._switches or {}

    def seen(
        self,
        found: PendingMetrics,
        train_logp: Any,
        rollout_logp: Any,
        mask: Any,
        cu_seqlens: Any = None,
        **columns: Any,
    ) -> None:
        """Log the warnings of a correction, and write some of its sequences if `install(dump=...)` asked for it.

        `found` are its metrics, on their way to the host or there; the tensors are those of `rollout_corr.dump`. A
        further column that is None or of another shape is left out.
        """
        if self.speaker is not None:
            self.speaker.hear(found)
        if self.dumps is not None:
            given = {name: x for name, x in columns.items() if x is not None and x.shape == train_logp.shape}
            self.dumps.seen(train_logp, rollout_logp, mask, cu_seqlens, **given)

    def name_unknown(self, config: object, known: Iterable[str], least: float | None = None) -> None:
        """Log once for each setting of a configuration, a mapping or an object, that is not known: it changes nothing.

        Of a configuration that holds much else, `least` says how similar to a known one a setting is that is named.
        """
        # No value is read, which could be missing.
        names = config if isinstance(config, Mapping) else getattr(config, "__dict__", ())
        for key in {n for n in names if isinstance(n, str) and not n.startswith("_")}.difference(known):
            if ("setting", key) in self._said:
                continue
            self._said.add(("setting", key))
            hint = nearest(key, known, least or 0.6)
            if hint or least is None:
                LOGGER.warning("rollout-corr in %s: unknown setting %r has no effect%s", self._called(), key, hint)

    def say(self, active: bool, why: str) -> None:
        """Note whether a batch is corrected; each answer is logged once after every `install`."""
        self._last, self._compared = (active, why), False
        if self._last in self._told:
            return
        self._told.add(self._last)
        # A correction that silently does not happen is what people lose weeks to.
        level = level_of_news() if active else logging.WARNING
        LOGGER.log(
            level, "rollout-corr in %s: correction active: %s, %s", self._called(), "yes" if active else "no", why
        )

    def say_spec(self, spec: Spec) -> None:
        """Note that a batch is corrected by the Spec of `install`, or that this Spec changes nothing."""
        if not spec.acts:
            self.say(False, f"{spec!r} measures only")
        else:
            self.say(spec.apply, repr(spec) if spec.apply else f"dry run of {spec!r}")

    def say_skipped(self, why: str) -> None:
        """Note that the framework does not correct a batch, whatever Spec `install` was given."""
        self.say(False, why if self.switches.get("spec") is None else f"your Spec is not used: {why}")

    def compared(self, why: str) -> None:
        """Note a call that comes once a step, next to the correction: two in a row are a step without one.

        `why` says what is then missing. Without a Spec nobody has asked for a correction.
        """
        if self._compared and self.switches.get("spec") is not None:
            self.say_skipped(why)
        self._compared = True


# What a Spec may need wheres log-probs and mask, and whether it does.
NEEDS: dict[str, Callable[[Spec], bool]] = {
    "advantages": lambda spec: any(criterion.when != "any" for criterion in spec.criteria),
    "log-probs of the policy being trained": lambda spec: any(c.of != "train/rollout" for c in spec.criteria),
    "external tensors": lambda spec: any(criterion.stat == "external" for criterion in spec.criteria),
    "turns": lambda spec: spec.measures_turns,
    "groups": lambda spec: spec.needs_groups,
    "entropy": lambda spec: spec.reads_entropy,
    "versions": lambda spec: spec.reads_versions,
}


def level_of_news() -> int:
    """Return the level at which it is logged that all is well: INFO where a handler takes that.

    Elsewhere it is WARNING, which is shown in a process that has not set up logging.
    """
    logger: logging.Logger | None = LOGGER if LOGGER.isEnabledFor(logging.INFO) else None
    while logger is not None:
        if any(handler.level <= logging.INFO for handler in logger.handlers):
            return logging.INFO
        logger = logger.parent if logger.propagate else None
    return logging.WARNING


def require_tensor(name: str, x: object, how: str) -> None:
    """Raise TypeError if an argument of the framework is no tensor; `how` says what makes the framework provide it."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {'None' if x is None else type(x).__name__}; {how}")


def _modules(targets: tuple[Target, ...]) -> list[str]:
    return list(dict.fromkeys(target.module for target in targets))

"""A framework's table of settings, and reading them from whatever object holds them.

A table has a row a setting: its name there, its default, and the kind of values that it takes. `given_in` finds the
values and gives a `Given`, which checks each when it is read. A plain default says the kind: True and False a switch, a
float a number, None a number or null; anything else is not checked, or is a `Setting` of its own.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any, NamedTuple

from ...specs.caches import cached
from ...specs.choices import Scheme
from ...specs.correction import Spec
from ...specs.validate import number, of_key, one_of, positive, wrong_type, wrong_value

Kind = Callable[[str, Any], Any]


# --- errors ---


class NoEquivalent(ValueError):
    """A setting that is valid in its framework and that no Spec expresses: not a mistake in the configuration."""


def refused(key: str, why: str, kind: Callable[[str], Exception] = ValueError) -> Exception:
    """Make the error that refuses a setting."""
    return of_key(kind(f"{key}: {why}"), key)


def same_kind(error: Exception, message: str) -> Exception:
    """Return a TypeError or a kind of ValueError, as the error is, with another message and what it carries."""
    kind = next((kind for kind in (TypeError, NoEquivalent) if isinstance(error, kind)), ValueError)
    made = kind(message)
    made.__dict__.update(error.__dict__)
    return made


# --- the table ---


class Setting(NamedTuple):
    """A row: the default of a setting, and its kind, which checks a value by name and returns it as it is used."""

    default: Any
    kind: Kind
    alone: bool = False  # no recipe has another value


class Block(NamedTuple):
    """A row that is a block of settings with a table of its own; absent or null, it has its defaults."""

    rows: Mapping[str, Any]
    # Keys whose presence shows that the block has many keys that the table lacks, or whether it has; see `given_in`.
    whole: Iterable[str] | bool = ()
    default: Any = None


def anything(name: str, value: Any) -> Any:
    """The kind of a setting that is checked where it is used."""
    return value


def boolean(name: str, value: object) -> bool:
    """The kind of a switch: True or False; null is False."""
    if value is None:
        return False
    if not isinstance(value, bool):
        raise wrong_type(name, "true or false", value)
    return value


def or_null(kind: Kind) -> Kind:
    """The kind of a setting that may be null, too."""
    return lambda name, value: None if value is None else kind(name, value)


def at_least(least: float) -> Kind:
    """The kind of a number with a lower end."""

    def kind(name: str, value: object) -> float:
        converted = number(name, value)
        if converted < least:
            raise wrong_value(name, f"a number >= {least:g}", converted)
        return converted

    return kind


def needed(key: str, by: str, value: object) -> float:
    """Return a number > 0 without which another setting does not work."""
    try:
        return positive(f"{key}, which {by} needs", value, finite=False)
    except (TypeError, ValueError) as error:
        raise of_key(error, key, value) from None


def maybe(default: float | None) -> Setting:
    """Make the row of a setting that is a number or null."""
    return Setting(default, or_null(number))


def word(default: str | None, options: Iterable[str]) -> Setting:
    """Make the row of a setting that is one of some words, or null where that is the default."""
    known = tuple(options)

    def kind(name: str, value: object) -> str | None:
        return None if value is None and default is None else one_of(name, value, known, or_null=default is None)

    return Setting(default, kind)


def only(default: Any, why: str, error: Callable[[str], Exception] = ValueError) -> Setting:
    """Make the row of a setting that has one value in all recipes; `why` is what an error says of another one."""
    plain = row_of(default)

    def kind(name: str, value: object) -> Any:
        checked = value if default is None or isinstance(plain, Block) else plain.kind(name, value)
        if checked != default:
            raise refused(name, why, error)
        return default

    return Setting(default, kind, alone=True)


def unchecked(default: object) -> Setting:
    """A setting that is checked where it is used."""
    return Setting(default, anything)


def row_of(row: Any) -> Setting | Block:
    """A row of a table in full."""
    if isinstance(row, (Setting, Block)):
        return row
    if isinstance(row, bool):
        return Setting(row, boolean)
    return maybe(None) if row is None else Setting(row, number if isinstance(row, float) else anything)


def rows_in(table: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Setting]]:
    """The settings of a table and of its blocks, by their names there."""
    for name, given in table.items():
        row = row_of(given)
        if isinstance(row, Block):
            yield from rows_in(row.rows, f"{within}{name}.")
        else:
            yield f"{within}{name}", row


def default_of(row: object) -> Any:
    """The default of a row."""
    return row_of(row).default


class Given(Mapping[str, Any]):
    """Settings with a framework's defaults for those left out; each is checked when it is read, and none before.

    Args:
        rows: The table.
        given: What was given of it.
        within: The name of the block around, with a dot.
        among: What is given in all, with the blocks around; `blamed` looks there.
    """

    def __init__(
        self, rows: Mapping[str, Any], given: Mapping[str, Any], within: str = "", among: dict[str, Any] | None = None
    ) -> None:
        self.rows, self.given, self.within = rows, given, within
        self._read: dict[str, Any] = {} if among is None else among

    def __getitem__(self, name: str) -> Any:
        row, key = row_of(self.rows[name]), f"{self.within}{name}"
        value = self.given.get(name, row.default)
        if isinstance(row, Block):
            return self.block(key, row.rows, value, row.whole)
        if name in self.given:
            self._read[key] = value
        return row.kind(key, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __len__(self) -> int:
        return len(self.rows)

    def block(self, name: str, rows: Mapping[str, Any], value: object, whole: Iterable[str] | bool = ()) -> Given:
        """The settings of a block within, none where it is null; for `whole` see `Block`."""
        found = given_in({} if value is None else fields_of(value, name), rows, whole=whole)
        return Given(rows, found.given, f"{name}.", self._read)

    def says(self, name: str) -> bool:
        """Return whether a setting is given, and not null."""
        return self.given.get(name) is not None

    def but(self, **values: Any) -> Given:
        """Return a copy in which some settings have other values."""
        return Given(self.rows, {**self.given, **values}, self.within, self._read)

    def without_null(self) -> Given:
        """Return a copy without the settings that are null."""
        return Given(self.rows, {name: x for name, x in self.given.items() if x is not None}, self.within, self._read)

    def refuse_others(self) -> None:
        """Refuse settings with a value that no recipe has."""
        for name in self.given:
            row = self.rows[name]
            if isinstance(row, Setting) and row.alone:
                _ = self[name]

    def blamed(self, error: Exception) -> Exception:
        """Name the settings whose value an error is about, if it names an argument of a Spec or a Loss instead."""
        wrong = _parts(getattr(error, "given", None))
        keys = [key for key, value in self._read.items() if any(_equal(x, y) for x in wrong for y in _parts(value))]
        if getattr(error, "key", "") in self._read or not keys:
            return error
        said = ", ".join(f"{key}={self._read[key]!r:.60}" for key in keys)
        made = of_key(same_kind(error, f"{said}: {error}"), keys[0], self._read[keys[0]])
        made.__dict__["why"] = str(error)
        return made


def _parts(value: object) -> Sequence[object]:
    """The values that a pair holds, or the value itself."""
    return value if isinstance(value, (tuple, list)) else () if value is None else (value,)


def _equal(x: object, y: object) -> bool:
    return isinstance(x, bool) == isinstance(y, bool) and (x is y or x == y or (x != x and y != y)) is True


# --- what holds the settings ---


def fields_of(config: object, what: str = "config") -> dict[str, Any]:
    """Return the fields of a mapping, a pydantic model, a dataclass, or any object with attributes.

    Keys that begin with an underscore, such as Hydra's `_target_`, are left out.
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
        raise of_key(TypeError(f"{what}: expected a mapping or a config object, got {got}"), what, config)
    return {key: found[key] for key in found if not (isinstance(key, str) and key.startswith("_"))}


def inner(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the fields of a block within others; none where it is absent or null."""
    return {} if given.get(key) is None else fields_of(given[key], key)


def setting_of(config: object, name: str, default: object) -> Any:
    """Read one setting of a mapping or of an object with attributes."""
    return config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)


def given_in(
    config: object, rows: Mapping[str, Any], *, blocks: Iterable[tuple[str, ...]] = (), whole: Iterable[str] | bool = ()
) -> Given:
    """Find the settings of a table.

    Args:
        config: A mapping, a dataclass, a pydantic model, a namespace of flags, any object with attributes.
        rows: The table.
        blocks: Paths to the block that holds them in larger configurations, such as `("actor", "policy_loss")`; those
            that are there are followed, and their keys are added up.
        whole: Keys whose presence shows that a larger block is given, with many keys that the table lacks; or whether
            one is given. There only keys that misspell one of the table are refused; elsewhere see `known_in`.
    """
    given = outer = fields_of(config)
    found: dict[str, Any] = {}
    for path in blocks:
        at: Any = outer
        for name in path:
            at = fields_of(at, name).get(name) if at is not None else None
        if at is not None:
            found |= fields_of(at, ".".join(path))
    given = found or given
    larger = whole if isinstance(whole, bool) else any(key in given for key in whole)
    if isinstance(config, Mapping) and not larger:
        return Given(rows, known_in(given, rows))
    for key in given:
        if key not in rows and (near := misspelt(key, rows, 0.9)):
            raise refused_key(key, near)
    return Given(rows, {key: given[key] for key in given if key in rows})


def flags_in(config: object, rows: Mapping[str, Any], others: Iterable[str] = ()) -> Given:
    """Find flags in blocks, such as `--actor.eps_clip`, in a namespace with dots in its names or in a nested one.

    `rows` has the flags by their whole names; `others` are further flags of these blocks, or beginnings of them:
    `actor.adam` for `actor.adam.lr`. A misspelled flag is an error.
    """
    outer = fields_of(config)
    every = [*rows, *others]
    tops = {name.partition(".")[0] for name in every}
    flags = {key: value for key, value in outer.items() if key.partition(".")[0] in tops and "." in key}
    for block in sorted({name.rpartition(".")[0] for name in rows}):
        at: Any = outer
        for name in block.split("."):
            at = None if at is None else fields_of(at, name).get(name)
        if at is not None:
            flags |= {f"{block}.{key}": value for key, value in fields_of(at, block).items()}
    for flag in flags:
        if not any(flag == name or flag.startswith(f"{name}.") for name in every):
            if near := misspelt(flag, every):
                raise refused_key(flag, near)
            _leave_out(flag, every)
    if not flags:
        known_in(outer, sorted(tops), exactly=True)
    return Given(rows, {name: flags[name] for name in rows if name in flags})


# --- names that are no setting ---


def known_in(given: Mapping[Any, Any], known: Iterable[str], *, exactly: bool = False) -> dict[str, Any]:
    """Return the fields that the framework is known to have.

    A misspelled key, a letter or two off, is an error, and so is a block of unknown keys alone; with `exactly` every
    unknown key is. Any other may be of a newer release: it warns, and is left out.
    """
    known = list(known)
    unknown = [key for key in given if key not in known]
    for key in unknown:
        if exactly or len(unknown) == len(given) or misspelt(key, known):
            raise refused_key(key, f"{nearest(key, known)}, expected some of {known}")
    for key in unknown:
        _leave_out(key, known)
    return {key: given[key] for key in given if key in known}


def refused_key(key: object, near: str) -> ValueError:
    """Make the error for a key that is none, with what it may have been meant to be."""
    return of_key(ValueError(f"unknown key {key!r}{near}"), str(key))


def _leave_out(key: object, known: list[str]) -> None:
    message = f"unknown key {key!r} is ignored; it may belong to a newer release{nearest(key, known, 0.75)}"
    warn_once(str(key), message, *known)


def nearest(key: object, known: Iterable[str], least: float = 0.6) -> str:
    """Name the known key that is most like another one, for the end of a message; nothing where none is."""
    close = difflib.get_close_matches(str(key), list(known), n=1, cutoff=least)
    return f" (did you mean {close[0]!r}?)" if close else ""


def misspelt(key: object, known: Iterable[str], least: float = 0.75) -> str:
    """Name the known key that another one misspells, by at most two letters; nothing where it misspells none."""
    close = difflib.get_close_matches(str(key), list(known), n=1, cutoff=least)
    steps = difflib.SequenceMatcher(None, str(key), close[0]).get_opcodes() if close else []
    changed = sum(
        max(end - start, end_there - there) for kind, start, end, there, end_there in steps if kind != "equal"
    )
    return nearest(key, close, least) if changed <= 2 else ""


def words(names: str) -> tuple[str, ...]:
    """Names, from the words of a text."""
    return tuple(names.split())


def under(block: str, names: str) -> list[str]:
    """Whole names of flags, from the words of a text."""
    return [f"{block}.{name}" for name in names.split()]


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's settings: its parameters with a default, and that default."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


# --- Specs of a drop-in, which come again in every step ---


def cached_spec(build: Callable[..., Spec]) -> Callable[..., Spec]:
    """Cache the Specs of the last 64 settings: every step of a training comes with the same. Lists count as tuples."""
    known = cached(maxsize=64, typed=True)(build)

    @wraps(build)
    def spec_of(*settings: Any) -> Spec:
        lists = [isinstance(x, Sequence) and not isinstance(x, (str, tuple)) for x in settings]
        return known(*[tuple(x) if is_list else x for x, is_list in zip(settings, lists, strict=True)])

    return spec_of


@cached(maxsize=16)
def reporting(spec: Spec, scheme: Scheme) -> Spec:
    """Return a Spec that reports a framework's metrics too."""
    return replace(spec, report=tuple(dict.fromkeys(("native", *spec.report, scheme))))


# --- notices, once in a process: a training loop may read its settings in every step ---

PACKAGE = __name__.partition(".")[0]


class Notice(NamedTuple):
    """A warning about a setting."""

    key: str
    text: str


_warned: set[tuple[str, ...]] = set()
_listener: ContextVar[list[Notice] | None] = ContextVar("listener", default=None)


def warn_once(key: str, message: str, *scope: str) -> None:
    """Warn of a setting once in a process for each key and scope, at the caller's line, which has to change."""
    listener = _listener.get()
    if listener is not None:
        listener.append(Notice(key, message))
        return
    if (key, *scope) in _warned:
        return
    _warned.add((key, *scope))
    # Python 3.12 has `skip_file_prefixes` for this.
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def warn_old(framework: str, names: Iterable[str], instead: str) -> None:
    """Warn once of old names of a framework, and say what to write."""
    first, *more = names
    are = "are old names" if more else "is an old name"
    warn_once(first.partition(":")[0], f"{framework}: {', '.join((first, *more))} {are}; {instead}", framework, *more)


@contextmanager
def heard() -> Iterator[list[Notice]]:
    """Collect all notices instead of warning, those that were given before too."""
    messages: list[Notice] = []
    token = _listener.set(messages)
    try:
        yield messages
    finally:
        _listener.reset(token)

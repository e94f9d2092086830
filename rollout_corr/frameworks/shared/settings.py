"""Reading of a framework's settings, whatever kind of object holds them."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

from ...specs.caches import cached
from ...specs.choices import Scheme
from ...specs.correction import Spec
from ...specs.validate import number


class NoEquivalent(ValueError):
    """A setting that is valid in its framework and that no Spec expresses: not a mistake in the configuration."""


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
        raise TypeError(f"{what}: expected a mapping or a config object, got {got}")
    return {key: found[key] for key in found if not (isinstance(key, str) and key.startswith("_"))}


def inner(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the fields of a block within others; none where it is absent or null."""
    return {} if given.get(key) is None else fields_of(given[key], key)


def setting_of(config: object, name: str, default: object) -> Any:
    """Read one setting of a mapping or of an object with attributes."""
    return config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)


def known_in(given: Mapping[Any, Any], known: Iterable[str], *, exactly: bool = False) -> dict[str, Any]:
    """Return the fields that the framework is known to have.

    A misspelled key, a letter or two off, is an error, and so is a block of unknown keys alone; with `exactly` every
    unknown key is. Any other may be of a newer release: it warns, and is left out.
    """
    known = list(known)
    unknown = [key for key in given if key not in known]
    for key in unknown:
        if exactly or len(unknown) == len(given) or misspelt(key, known):
            raise ValueError(f"unknown key {key!r}{nearest(key, known)}, expected some of {known}")
    for key in unknown:
        _leave_out(key, known)
    return {key: given[key] for key in given if key in known}


def _leave_out(key: object, known: list[str]) -> None:
    message = f"unknown key {key!r} is ignored; it may belong to a newer release{nearest(key, known, 0.75)}"
    warn_once(("unknown", str(key), *known), message)


def block_of(config: object, name: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a block, or of none, with defaults for those it leaves out; see `known_in`."""
    return {**known, **known_in({} if config is None else fields_of(config, name), known)}


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


def settings_of(
    config: object, known: Mapping[str, Any], *, blocks: Iterable[tuple[str, ...]] = (), whole: Iterable[str] = ()
) -> dict[str, Any]:
    """Read a framework's settings, with its defaults, which `known` gives, for those that the configuration leaves out.

    Args:
        config: A mapping, a dataclass, a pydantic model, a namespace of flags, any object with attributes.
        known: The settings that are read here, with the framework's defaults.
        blocks: Paths to the block that holds them in larger configurations, such as `("actor", "policy_loss")`; those
            that are there are followed, and their keys are added up.
        whole: Keys that show that a larger block is given, most of whose keys do not concern this package. There only
            keys that misspell one of `known` are refused; elsewhere see `known_in`.
    """
    given = fields_of(config)
    outer: dict[str, Any] = given
    found: dict[str, Any] = {}
    for path in blocks:
        at: Any = outer
        for name in path:
            at = fields_of(at, name).get(name) if at is not None else None
        if at is not None:
            found |= fields_of(at, ".".join(path))
    given = found or given
    larger = not isinstance(config, Mapping) or any(key in given for key in whole)
    if larger:
        for key in given:
            if key not in known and (near := misspelt(key, known, 0.9)):
                raise ValueError(f"unknown key {key!r}{near}")
    else:
        known_in(given, known)
    return {key: given.get(key, default) for key, default in known.items()}


def flags_of(config: object, known: Mapping[str, Any], others: Iterable[str] = ()) -> dict[str, Any]:
    """Read flags in blocks, such as `--actor.eps_clip`, from a namespace with dots in its names or from a nested one.

    `known` gives the flags that are read here, by their whole names, with the framework's defaults; `others` are
    further flags of these blocks, or beginnings of them: `actor.adam` for `actor.adam.lr`. A misspelled flag is an
    error.
    """
    outer = fields_of(config)
    every = [*known, *others]
    tops = {name.partition(".")[0] for name in every}
    flags = {key: value for key, value in outer.items() if key.partition(".")[0] in tops and "." in key}
    for block in sorted({name.rpartition(".")[0] for name in known}):
        at: Any = outer
        for name in block.split("."):
            at = None if at is None else fields_of(at, name).get(name)
        if at is not None:
            flags |= {f"{block}.{key}": value for key, value in fields_of(at, block).items()}
    for flag in flags:
        if not any(flag == name or flag.startswith(f"{name}.") for name in every):
            if near := misspelt(flag, every):
                raise ValueError(f"unknown key {flag!r}{near}")
            _leave_out(flag, every)
    if not flags:
        known_in(outer, sorted(tops), exactly=True)
    return {name: flags.get(name, default) for name, default in known.items()}


def words(names: str) -> tuple[str, ...]:
    """Names, from the words of a text."""
    return tuple(names.split())


def under(block: str, names: str) -> list[str]:
    """Whole names of flags, from the words of a text."""
    return [f"{block}.{name}" for name in names.split()]


def in_its_words(error: Exception, read: Callable[[Any], object], config: object) -> str:
    """Return the text of a reader's error, which begins with the configuration's own key where no key is in the text.

    A setting becomes an argument of a Spec or a surrogate, whose error has that argument's name. The key is found by
    reading again without it: then the error is gone, or another one.
    """
    root = _root(error)
    try:
        given = fields_of(config)
    except TypeError:  # the error says so already
        return str(error)
    blamed = _blamed(root, read, given, lambda fields: _like(config, fields), 0)
    words = set(re.findall(r"\w+", str(error)))
    if not blamed or any(key.rpartition(".")[2] in words for key in blamed):
        return str(error)
    return f"{', '.join(f'{key}={value!r:.60}' for key, value in blamed.items())}: {root}"


def _root(error: BaseException) -> BaseException:
    """The error that was first raised: those that name presets and recipes stand around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _like(config: object, given: dict[str, Any]) -> object:
    """Return the fields as a mapping if the configuration is one, or as an object with attributes."""
    return given if isinstance(config, Mapping) else SimpleNamespace(**given)


def _blamed(
    root: BaseException,
    read: Callable[[Any], object],
    given: dict[str, Any],
    whole: Callable[[dict[str, Any]], object],
    depth: int,
) -> dict[str, Any]:
    """Return the settings without which another error or none is raised; inside of blocks as "block.setting"."""

    def same(error: BaseException) -> bool:
        found, wanted = str(_root(error)), str(root)
        # A value that is no block is wrong without one of its parts too, and the error shows the parts.
        return found.partition(", got ")[0] == wanted.partition(", got ")[0] if depth else found == wanted

    blamed: dict[str, Any] = {}
    for key, value in given.items():
        try:
            read(whole({name: kept for name, kept in given.items() if name != key}))
        except (TypeError, ValueError) as error:
            if same(error):
                continue

        def around(fields: dict[str, Any], key: str = key, value: object = value) -> object:
            return whole({name: _like(value, fields) if name == key else kept for name, kept in given.items()})

        within: dict[str, Any] = {}
        # A configuration may hold itself.
        if depth < 4:
            with suppress(TypeError):
                within = _blamed(root, read, fields_of(value), around, depth + 1)
        blamed |= {f"{key}.{name}": setting for name, setting in within.items()} or {str(key): value}
    return blamed


def boolean(key: str, value: object) -> bool:
    """Return True or False; null is False."""
    if value is None:
        return False
    if not isinstance(value, bool):
        raise TypeError(f"{key}: expected true or false, got {type(value).__name__} {value!r}")
    return value


# --- a table of settings and their defaults ---


class _Default(NamedTuple):
    """A default whose type does not say what may be given: a number or None, or what the reader checks."""

    value: Any
    is_number: bool


def maybe(default: float) -> Any:
    """The default of a setting that is a number or None."""
    return _Default(default, is_number=True)


def anything(default: object) -> Any:
    """The default of a setting whose reader checks it."""
    return _Default(default, is_number=False)


def default_of(setting: object) -> Any:
    """The default itself."""
    return setting.value if isinstance(setting, _Default) else setting


def refuse_wrong_types(table: Mapping[str, Any], given: Mapping[str, object]) -> None:
    """Refuse a text or a tensor for a setting whose default is a number, None or a bool."""
    for name, setting in table.items():
        if name not in given:
            continue
        may_be_none = setting is None or (isinstance(setting, _Default) and setting.is_number)
        if isinstance(setting, bool):
            boolean(name, given[name])
        elif isinstance(setting, float) or (may_be_none and given[name] is not None):
            number(name, given[name])


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's settings: its parameters with a default, and that default."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


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


# --- warnings, once in a process: a training loop may read its settings in every step ---

PACKAGE = __name__.partition(".")[0]

_warned: set[tuple[str, ...]] = set()
_listener: ContextVar[list[str] | None] = ContextVar("listener", default=None)


def warn_once(key: tuple[str, ...], message: str) -> None:
    """Warn once in a process for each key, at the caller's line, which has to change."""
    listener = _listener.get()
    if listener is not None:
        listener.append(message)
        return
    if key in _warned:
        return
    _warned.add(key)
    # Python 3.12 has `skip_file_prefixes` for this.
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def warn_old(framework: str, names: Iterable[str], instead: str) -> None:
    """Warn once of old names of a framework, and say what to write."""
    names = list(names)
    are = "is an old name" if len(names) == 1 else "are old names"
    warn_once((framework, *names), f"{framework}: {', '.join(names)} {are}; {instead}")


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect all notices instead of warning, those that were given before too."""
    messages: list[str] = []
    token = _listener.set(messages)
    try:
        yield messages
    finally:
        _listener.reset(token)

"""The base of the frozen types: as plain data for JSON and YAML, and as the Python that builds them."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar, TypeVar, cast

from .validate import shown, wrong_type

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


class Checked:
    """Base of the frozen types: their fields as plain data, and as the Python that builds them."""

    # Every subclass is a dataclass.
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __repr__(self) -> str:
        """The Python that builds an equal value, defaults left out: `Spec()`, `Weight.token(upper=2.0)`."""
        return expression(self)

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _defaults(self) -> dict[str, object]:
        """The values that fields take when they are left out; MISSING for a field that has to be given."""
        return {field.name: _default_of(field) for field in fields(self)}

    def _call(self) -> tuple[str, dict[str, object]]:
        """The callable that builds it, and the defaults of its arguments, which are fields."""
        return type(self).__name__, self._defaults()

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain numbers, strings, lists and dicts (JSON, YAML)."""
        values = {name: (getattr(self, name), default) for name, default in self._defaults().items()}
        return {name: _plain(value) for name, (value, default) in values.items() if value != default}


def _default_of(field: Field[Any]) -> object:
    """The default of a field; MISSING where there is none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def hash_once(value: Checked) -> int:
    """The hash of the fields of a frozen type, kept with it."""
    kept: int | None = value.__dict__.get("_hash")
    if kept is None:
        kept = hash(tuple(getattr(value, field.name) for field in fields(value)))
        value._set(_hash=kept)
    return kept


def without_hash(value: Checked) -> dict[str, Any]:
    """The state of a frozen type without its hash, which another process may find otherwise."""
    return {name: x for name, x in value.__dict__.items() if name != "_hash"}


def _plain(value: object) -> object:
    if isinstance(value, Checked):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def expression(value: object) -> str:
    """The Python that builds a frozen type, or what its fields hold; defaults are left out."""
    if isinstance(value, tuple):
        return f"({', '.join(map(expression, value))}{',' if len(value) == 1 else ''})"
    if not isinstance(value, Checked):
        return f'"{value}"' if isinstance(value, str) else repr(value)
    words = []
    called, defaults = value._call()
    for position, (name, default) in enumerate(defaults.items()):
        current = getattr(value, name)
        if current != default:
            named = position > 0 or default is not MISSING
            words.append(f"{name}={expression(current)}" if named else expression(current))
    return f"{called}({', '.join(words)})"


def by_path(name: str, value: object) -> dict[str, str]:
    """The fields of a frozen type as text, by path: {"Spec.weight.upper": "2.0", ...}; equal for equal values."""
    if isinstance(value, Checked):
        texts = {name: type(value).__name__}
        for field in fields(value):
            texts |= by_path(f"{name}.{field.name}", getattr(value, field.name))
        return texts
    if isinstance(value, tuple) and any(isinstance(item, Checked) for item in value):
        texts = {name: f"({len(value)} of them)"}
        for i, item in enumerate(value):
            texts |= by_path(f"{name}[{i}]", item)
        return texts
    # -0.0 equals 0.0.
    return {name: expression(value + 0.0 if isinstance(value, float) else value)}


def arguments_of(cls: type, mapping: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The arguments of a dataclass from a mapping, in which `bounds: [lower, upper]` may stand for both.

    Errors call the mapping `owner`.
    """
    if not isinstance(mapping, Mapping):
        raise wrong_type(owner, "a mapping", mapping)
    names = [field.name for field in fields(cls)]
    with_pair = [*names, "bounds"] if "lower" in names else names
    unknown = [key for key in mapping if key not in with_pair]
    if unknown:
        raise ValueError(f"{owner}: unknown key {unknown[0]!r}, expected some of {with_pair}")
    arguments = dict(mapping)
    if "bounds" in arguments:
        if "lower" in arguments or "upper" in arguments:
            raise ValueError(f"{owner}.bounds: expected either bounds or lower and upper, got both")
        pair = arguments.pop("bounds")
        if isinstance(pair, Mapping):
            raise ValueError(
                f"{owner}.bounds: expected a pair [lower, upper], got the mapping {shown(pair)}; write a "
                "single bound as lower or upper"
            )
        if isinstance(pair, str) or not isinstance(pair, Iterable) or len(pair := list(pair)) != 2:
            raise ValueError(f"{owner}.bounds: expected a pair [lower, upper], got {shown(pair)}")
        arguments["lower"], arguments["upper"] = pair
    missing = [f.name for f in fields(cls) if _default_of(f) is MISSING and f.name not in arguments]
    if missing:
        raise ValueError(f"{owner}: expected the key {missing[0]!r}, got {sorted(arguments)}")
    return arguments


def keywords_meant(**meant: str) -> Callable[[type[T]], type[T]]:
    """Make a dataclass refuse an unknown keyword; the error lists the known ones and says what was `meant`."""

    def decorate(cls: type[T]) -> type[T]:
        init: Callable[..., None] = cls.__init__
        setattr(cls, "__init__", _checking(init, cls.__name__, meant, 1))  # noqa: B010 - an assignment is a type error
        return cls

    return decorate


def keywords_of_short_form(**meant: str) -> Callable[[Function], Function]:
    """Make a function that is to be a classmethod refuse an unknown keyword as `keywords_meant` does."""
    return lambda function: _checking(function, function.__qualname__, meant, 1)


def _checking(function: Function, owner: str, meant: Mapping[str, str], bound: int) -> Function:
    """Wrap a function whose first `bound` parameters no caller names."""
    parameters = [*inspect.signature(function).parameters.values()][bound:]
    names = tuple(parameter.name for parameter in parameters)
    by_keyword = all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if by_keyword and len(args) > bound:
            got = type(args[bound]).__name__
            raise TypeError(f"{owner}: expected keywords, such as {names[0]}=..., got {got} by position")
        # A loop, because torch 2.11's compiler cannot follow a bound method of a set.
        for name in kwargs:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                write = meant.get(name) or (f"{close[0]}=" if close else "")
                hint = f"; did you mean {write}?" if write else ""
                raise TypeError(f"{owner}: unknown argument {name!r}, expected some of {list(names)}{hint}")
        return function(*args, **kwargs)

    return cast(Function, checked)


# Arguments of a Batch, by which calls name what a keyword of theirs was meant to be.
OF_BATCH = (
    *("turns", "entropy", "labels", "external", "kept_mass", "versions", "groups", "sequence_ids", "scale", "total"),
    *("ranks", "validate"),
)
_MEANT_IN_CALLS = {name: f"batch=rc.Batch({name}=...)" for name in OF_BATCH} | {
    # Of `correct`, and of `policy_loss`.
    **dict.fromkeys(("old_logp", "new_logp", "logp", "policy_logp"), "train_logp="),
    "train_logp": "old_logp= (decoupled) or new_logp=",
    "attention_mask": "mask=",
    "response_mask": "mask=",
    "config": "spec=",
    "preset": "spec=",
    "weights": "correction=rc.Factors(weights=...)",
    "train_mask": "correction=rc.Factors(mask=...)",
    "surrogate": "loss=rc.Loss(surrogate)",
    "reduction": "loss=rc.Loss(mean=rc.Mean(...))",
    "kl": "loss=rc.Loss(kl=rc.KL(...))",
    "regularizer": "loss=rc.Loss(regularizer=...)",
    "entropy_bonus": "loss=rc.Loss(entropy_bonus=...)",
}


def known_keywords(call: Function) -> Function:
    """Make a function refuse an unknown keyword; the error lists the known ones and names the most likely one."""
    return _checking(call, call.__name__, _MEANT_IN_CALLS, 0)

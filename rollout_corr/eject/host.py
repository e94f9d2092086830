"""The formulas of metrics as source: each is run once on names in place of numbers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from types import ModuleType
from typing import Any

from .record import CannotEject

ATOM = 9


def _infix(sign: str, binds: int, swapped: bool = False) -> Callable[[Number, Any], Number]:
    """An operator of numbers that writes itself; swapped, the number is its right side."""

    def operate(number: Number, other: Any) -> Number:
        left, right = (other, number) if swapped else (number, other)
        return Number(f"{_text(left, binds)} {sign} {_text(right, binds + 1)}", binds, number.run)

    return operate


def _asks(sign: str) -> Callable[[Number, Any], bool]:
    """A comparison of numbers that the run decides."""
    return lambda number, other: number.run.decide(f"{_text(number, 1)} {sign} {_text(other, 1)}")


class Number:
    """A number that is known by its text alone.

    Its truth, and how it compares, are decided by the `Run` in which a formula asks, which then takes the other way.
    """

    __slots__ = ("binds", "run", "text")

    def __init__(self, text: str, binds: int, run: Run) -> None:
        self.text, self.binds, self.run = text, binds, run

    def __add__(self, other: Any) -> Number:
        return self if other == 0.0 and isinstance(other, (int, bool)) else _infix("+", 3)(self, other)

    def __mul__(self, other: Any) -> Number | float:
        return 0 if other is False else self if other is True else _infix("*", 4)(self, other)

    def __rmul__(self, other: Any) -> Number:
        return self if other == 1.0 else _infix("*", 4, swapped=True)(self, other)

    __radd__ = _infix("+", 3, swapped=True)
    __sub__, __rsub__ = _infix("-", 3), _infix("-", 3, swapped=True)
    __truediv__, __rtruediv__ = _infix("/", 4), _infix("/", 4, swapped=True)

    def __neg__(self) -> Number:
        if self.text.startswith("-") and self.binds == 5:
            return Number(self.text[1:], 5, self.run)
        return Number(f"-{_text(self, 5)}", 5, self.run)

    def __abs__(self) -> Number:
        return Number(f"abs({self.text})", ATOM, self.run)

    def __bool__(self) -> bool:
        return self.run.decide(self.text)

    __gt__, __lt__, __ge__, __le__ = (_asks(sign) for sign in (">", "<", ">=", "<="))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Number) and self.text == other.text)

    def __hash__(self) -> int:
        return hash(self.text)

    def __float__(self) -> float:
        raise CannotEject(f"a formula reads the number {self.text}")

    def within(self, low: float, high: float) -> Number:
        """Clamp as `fraction` does."""
        return Number(f"max(min({self.text}, {high}), {low})", ATOM, self.run)

    def or_larger(self, other: Any) -> Number:
        """The larger one."""
        return Number(f"max({self.text}, {_text(other, 0)})", ATOM, self.run)

    def root(self) -> Number:
        """The square root, 0 below 0."""
        return Number(f"math.sqrt(max({self.text}, 0.0))", ATOM, self.run)


def _text(x: Any, binds: int) -> str:
    if isinstance(x, Number):
        return x.text if x.binds >= binds else f"({x.text})"
    return repr(float(x)) if isinstance(x, (bool, int)) and not isinstance(x, float) else repr(x)


class Run:
    """One way through the formulas: which questions were asked, and what was answered.

    Args:
        answers: The answers that are not True.
    """

    def __init__(self, answers: Mapping[str, bool]) -> None:
        self.answers, self.asked = answers, {}  # type: Mapping[str, bool], dict[str, None]

    def decide(self, question: str) -> bool:
        """Answer a question."""
        self.asked[question] = None
        return self.answers.get(question, True)


class Values(dict[str, Number]):
    """Statistics by name, as numbers that remember that they were asked for."""

    def __init__(self, names: Mapping[str, str], run: Run) -> None:
        super().__init__({name: Number(text, ATOM, run) for name, text in names.items()})
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Number:
        self.used.add(name)
        return super().__getitem__(name)


class Written:
    """The formulas of metrics.

    Attributes:
        lines: The items of a dict display, one a metric.
        used: The names of the statistics that they read.
        helpers: The source of functions of numbers that they call.
        first: The lines that name what several of them share.
        nothing: What is 0 where all of them are 0; None: there is no such number.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.keys: list[str] = []
        self.used: set[str] = set()
        self.helpers: dict[str, str] = {}
        self.first: list[str] = []
        self.nothing: str | None = None


def written(formulas: Callable[[Any], dict[str, Any]], names: Mapping[str, str], modules: list[ModuleType]) -> Written:
    """Run formulas on names, and write them.

    Functions of numbers alone that live in `modules` are called by the formulas as written, others are taken apart.
    """
    found = Written()
    used: set[str] = set()

    def run(answers: Mapping[str, bool]) -> tuple[dict[str, Any], Run]:
        way = Run(answers)
        values = Values(names, way)
        with _helpers(modules, found, way):
            result = formulas(values)
        used.update(values.used)
        return result, way

    base, way = run({})
    text = {key: _text(x, 0) for key, x in base.items()}
    plain = dict(text)
    questions = list(way.asked)
    changed: dict[str, dict[str, str]] = {}
    for question in questions:
        other, more = run({question: False})
        text_there = {key: _text(x, 0) for key, x in other.items()}
        if all(x == "0.0" for x in text_there.values()) and len(text) > 3:
            found.nothing = question
            continue
        further = [asked for asked in more.asked if asked not in questions]
        if further:
            raise CannotEject(f"a formula asks {further} only if not {question}")
        changed[question] = {key: x for key, x in text_there.items() if x != plain[key]}
        for key, x in changed[question].items():
            text[key] = f"{text[key]} if {question} else {x}"
    # Each metric has one answer at most to depend on, whatever the others are.
    for asked in dict.fromkeys((*combinations(changed, 2), tuple(changed))):
        there, _ = run(dict.fromkeys(asked, False))
        expected = plain | {key: x for question in asked for key, x in changed[question].items()}
        several = [key for key, x in there.items() if _text(x, 0) != expected[key]]
        several += [key for key in plain if sum(key in changed[question] for question in asked) > 1]
        if several:
            raise CannotEject(f"{several[0]} depends on several of {list(asked)}")
    found.keys = list(text)
    found.lines = [f'"{key}": {value},' for key, value in text.items()]
    kept: dict[str, str] = {}
    waiting = "\n".join(found.lines)
    for name in reversed(found.helpers):
        if re.search(rf"\b{name}\(", waiting + "\n".join(kept.values())):
            kept[name] = found.helpers[name]
    found.helpers = dict(reversed(kept.items()))
    found.used = used
    return found


def _of_numbers(x: Any) -> bool:
    """A function of floats alone that treats them as floats."""
    if not inspect.isfunction(x) or not x.__annotations__ or x.__annotations__.get("return") != "float":
        return False
    return all(kind == "float" for kind in x.__annotations__.values()) and "isinstance" not in inspect.getsource(x)


def _of_values(x: Any) -> bool:
    """A function that makes one number of statistics."""
    return inspect.isfunction(x) and x.__annotations__ == {"v": "Values", "return": "float"}


@contextmanager
def _helpers(modules: list[ModuleType], found: Written, run: Run) -> Iterator[None]:
    """Let functions of numbers be called by name while formulas run."""
    before = []
    for module in modules:
        for name, function in list(vars(module).items()):
            if _of_numbers(function) or _of_values(function):
                before.append((module, name, function))

    def called(function: Any) -> Any:
        name = f"_{function.__name__.strip('_')}"

        def call(*args: Any) -> Any:
            if not any(isinstance(x, Number) for x in args):
                return function(*args)
            _add(
                function,
                name,
                found.helpers,
                {old.__name__: f"_{old.__name__.strip('_')}" for _, _, old in before if _of_numbers(old)},
            )
            return Number(f"{name}({', '.join(_text(x, 0) for x in args)})", ATOM, run)

        return call

    def shared(function: Any) -> Any:
        name = function.__name__.strip("_")

        def call(values: Any) -> Any:
            result = function(values)
            line = f"{name} = {_text(result, 0)}"
            if line not in found.first:
                found.first.append(line)
            return Number(name, ATOM, run)

        return call

    def joined(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not any(isinstance(x, Number) for x in args):
                return plain(*args)
            return Number(f"{name}({', '.join(_text(x, 0) for x in args)})", ATOM, run)

        return call

    try:
        for module, name, function in before:
            setattr(module, name, called(function) if _of_numbers(function) else shared(function))
        for module in modules:
            vars(module).update(max=joined("max", max), min=joined("min", min))
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
        for module in modules:
            del vars(module)["max"], vars(module)["min"]


def _add(function: Any, name: str, helpers: dict[str, str], renamed: Mapping[str, str]) -> None:
    """Add the source of a function, and of the functions of numbers that it calls."""
    if name in helpers:
        return
    source = inspect.getsource(function)
    helpers[name] = ""
    for called in function.__code__.co_names:
        other = function.__globals__.get(called)
        if inspect.isfunction(other) and called in renamed:
            _add(other, renamed[called], helpers, renamed)
    for old, new in renamed.items():
        source = re.sub(rf"(?<![\w.]){old}\(", f"{new}(", source)
    helpers.pop(name)
    helpers[name] = source.rstrip()

"""`--fail-if`: comparisons of metrics with numbers, joined by and, or, not. Nothing in them is run as code."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping

from rollout_corr.diagnose.read.problems import DumpError

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<name>[A-Za-z_][\w./]*)|(?P<sign>[<>=!]=|[<>()]))"
)


class Condition:
    """A condition such as `abs_logp_p99 > 0.5 or (kl_k3 > 0.01 and not sequences < 100)`.

    `not` binds tighter than `and`, `and` tighter than `or`.

    Args:
        text: The condition.
        values: The metrics that it may name.

    Raises:
        DumpError: It is not such a condition, or names a metric that there is not.
    """

    def __init__(self, text: str, values: Mapping[str, float]) -> None:
        self.text, self.values = text, values
        self.words = self._words()
        self.at = 0
        self.true = self._either()
        if self.at < len(self.words):
            raise self._error("the end, 'and' or 'or'")

    def _words(self) -> list[str]:
        words, place = [], 0
        while self.text[place:].strip():
            found = _TOKEN.match(self.text, place)
            if found is None:
                rest = self.text[place:].strip()
                raise DumpError(f"--fail-if {self.text!r}: expected a metric, a number or a comparison, got {rest!r}")
            words.append(found[0].strip())
            place = found.end()
        return words

    def _error(self, wanted: str) -> DumpError:
        got = repr(self.words[self.at]) if self.at < len(self.words) else "its end"
        return DumpError(f"--fail-if {self.text!r}: expected {wanted}, got {got}")

    def _next(self, *words: str) -> str | None:
        """The next word if it is one of these."""
        if self.at < len(self.words) and self.words[self.at] in words:
            self.at += 1
            return self.words[self.at - 1]
        return None

    def _either(self) -> bool:
        found = self._both()
        while self._next("or"):
            # Both sides are read, so that a wrong name is found whatever the other side says.
            other = self._both()
            found = found or other
        return found

    def _both(self) -> bool:
        found = self._one()
        while self._next("and"):
            other = self._one()
            found = found and other
        return found

    def _one(self) -> bool:
        if self._next("not"):
            return not self._one()
        if self._next("("):
            found = self._either()
            if not self._next(")"):
                raise self._error("')'")
            return found
        left = self._value()
        sign = self._next(*COMPARISONS)
        if sign is None:
            raise self._error(f"one of {', '.join(COMPARISONS)}")
        return COMPARISONS[sign](left, self._value())

    def _value(self) -> float:
        if self.at == len(self.words) or self.words[self.at] in ("and", "or", "not", "(", ")", *COMPARISONS):
            raise self._error("a metric or a number")
        word = self.words[self.at]
        self.at += 1
        if word[0].isalpha() or word[0] == "_":
            if word not in self.values:
                close = difflib.get_close_matches(word, self.values, n=3)
                hint = f", did you mean {' or '.join(map(repr, close))}?" if close else ""
                raise DumpError(f"--fail-if {self.text!r}: there is no metric {word!r}{hint}")
            return self.values[word]
        return float(word)

"""The conditions of `--fail-if`: comparisons of metrics with numbers, joined by and, or, not and parentheses."""

from __future__ import annotations

import ast
import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping

from ..read.problems import DumpError

COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_NUMBER = r"(?:[-+]|(?<![\w./]))(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_NAME = r"(?<![\w./])(?!(?:and|or|not)\b)[A-Za-z_][\w./]*"
_VALUE = f"(?:{_NUMBER}|{_NAME})"
_COMPARISON = re.compile(rf"({_VALUE})\s*({'|'.join(COMPARE)})\s*({_VALUE})")
_JOINED = re.compile(r"(?:\s|\(|\)|\b(?:and|or|not|True|False)\b)*")


# Longer or deeper conditions are refused: the parser of Python overflows its stack somewhere beyond.
MOST_CHARACTERS, MOST_NESTED = 2000, 100


def is_true(text: str, values: Mapping[str, float]) -> bool:
    """Decide a condition such as `logratio_abs_p99 > 0.5 or (kl_rollout_train_k3 > 0.01 and not sequences < 100)`.

    `not` binds tighter than `and`, and `and` tighter than `or`. The text is parsed and never run as code.

    Args:
        text: The condition.
        values: The metrics that it may name.

    Raises:
        DumpError: The text is no condition, or it names an unknown metric.
    """

    def value(name: str) -> float:
        if name not in values:
            close = difflib.get_close_matches(name[:100], values, n=3)
            hint = f", did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise DumpError(f"--fail-if {text!r}: there is no metric {name!r}{hint}")
        return values[name]

    return _decided(text, value)


def check(text: str) -> None:
    """Refuse a text that is no condition, before there are metrics.

    Raises:
        DumpError: The text is no condition.
    """
    _decided(text, lambda name: 0.0)


def _decided(text: str, metric: Callable[[str], float]) -> bool:
    if len(text) > MOST_CHARACTERS:
        raise DumpError(f"--fail-if {text[:40]!r}...: expected at most {MOST_CHARACTERS} characters, got {len(text)}")
    if len(re.findall(r"\(|\bnot\b", text)) > MOST_NESTED:
        raise DumpError(f"--fail-if {text[:40]!r}...: expected at most {MOST_NESTED} parentheses and nots")

    def value(word: str) -> float:
        if word[0].isalpha() or word[0] == "_":
            return metric(word)
        number = float(word)
        if not math.isfinite(number):
            raise DumpError(f"--fail-if {text!r}: {word} is larger than any float")
        return number

    def decided(node: ast.expr) -> bool:
        if isinstance(node, ast.Constant):
            return bool(node.value)
        if isinstance(node, ast.UnaryOp):
            return not decided(node.operand)
        if isinstance(node, ast.BoolOp):
            return (all if isinstance(node.op, ast.And) else any)([decided(value) for value in node.values])
        raise SyntaxError

    # All comparisons are made before they are joined, so an unknown name is found whatever the others say.
    joined = _COMPARISON.sub(lambda found: f" {COMPARE[found[2]](value(found[1]), value(found[3]))} ", text)
    rest = _JOINED.sub("", joined, count=1).strip()
    try:
        if rest or re.search(r"True|False", text):
            raise SyntaxError
        return decided(ast.parse(" ".join(joined.split()), mode="eval").body)
    except SyntaxError:
        got = f"; cannot read {rest!r}" if rest else ""
        wanted = "comparisons such as 'kl_rollout_train_k3 > 0.01', joined by and, or, not and parentheses"
        raise DumpError(f"--fail-if {text!r}: expected {wanted}{got}") from None

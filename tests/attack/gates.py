"""Conditions of `--fail-if`: right by a parser of our own, or one line that refuses. From a grammar, then damaged."""

from __future__ import annotations

import ast
import math
import operator
import random
import re

from attack.campaign import Area, Outcome
from rollout_corr.diagnose.doctor.conditions import is_true
from rollout_corr.diagnose.read.problems import DumpError

VALUES = {
    "kl_rollout_train_k3": 0.01,
    "logratio_p99.99": -2.5,
    "findings": 3.0,
    "wrong_temperature": 0.0,
    "verl/rollout_corr_kl": float("nan"),
    "sequence_logratio_abs_mean": float("inf"),
    "note": 1e-300,
    "order": 2.0,
}
OPERATORS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
NUMBERS = ("0", "1", "-2.5", ".01", "+3.", "1e-300", "1E308", "-0", "2.5e+3", "00012")
# What damage puts in.
PIECES = (*OPERATORS, *NUMBERS, *VALUES)
PIECES += ("and", "or", "not", "(", ")", "=", "True", "nan", "kl", "'", "\\", "#", ",", " ")
PIECES += ("\n", "\x00", "\ud800", "\u202e", "\x1b[2J", "\u0661", "\ufb01", "1e400", "__import__('os')", "lambda: 1")
PIECES += ("not " * 3000, "(" * 3000)

TOKEN = re.compile(
    r"\s*(?:(?P<sign>>=|<=|==|!=|>|<|\(|\))|(?P<word>(?:and|or|not)(?![\w./]))"
    r"|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\d_.])|(?P<name>[A-Za-z_][\w./]*))"
)
# More than a person writes.
DEEPEST, LONGEST = 100, 2000

CONDITIONS = (ast.Expression, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.Compare, ast.cmpop, ast.Name, ast.Load)


def judged(text: str) -> bool | None:
    """The worth of a condition by Python's own parser, with a name for each number; None for what is no condition."""
    words, values, body, at = [], {}, text.rstrip(), 0
    while at < len(body):
        found = TOKEN.match(body, at)
        if found is None:
            return None
        kind, word, at = found.lastgroup, found[found.lastgroup], found.end()
        if kind in ("number", "name"):
            value = float(word) if kind == "number" else VALUES.get(word)
            if value is None or (kind == "number" and not math.isfinite(value)):
                return None
            word = f"value{len(values)}"
            values[word] = value
        words.append(word)
    # Parentheses are for conditions, and not for a value.
    lone = any(words[i] == "(" and words[i + 1] in values and words[i + 2] == ")" for i in range(len(words) - 2))
    if lone or len(text) > LONGEST or sum(word in ("(", "not") for word in words) > DEEPEST:
        return None
    try:
        tree = ast.parse(" ".join(words), mode="eval")
    except SyntaxError:
        return None
    comparisons = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    compared = {id(x) for node in comparisons for x in (node.left, *node.comparators)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    if not all(isinstance(node, CONDITIONS) for node in ast.walk(tree)) or len(compared) != 2 * len(comparisons):
        return None
    return eval(compile(tree, "condition", "eval"), values) if compared == {id(node) for node in names} else None


def written(rng: random.Random, depth: int) -> tuple[str, bool]:
    """Write a condition by the grammar, and say what it is worth."""
    kind = rng.choice(("compare", "compare", "and", "or", "not", "parentheses")) if depth else "compare"
    if kind == "compare":
        sign = rng.choice(list(OPERATORS))
        words = [rng.choice((rng.choice(NUMBERS), rng.choice(list(VALUES)))) for _ in range(2)]
        space = rng.choice((" ", "  ", "\t"))
        left, right = (VALUES[word] if word in VALUES else float(word) for word in words)
        return f"{words[0]}{space}{sign}{space}{words[1]}", OPERATORS[sign](left, right)
    text, value = written(rng, depth - 1)
    if kind == "parentheses":
        return f"({text})", value
    if kind == "not":
        return f"not ({text})", not value
    other, second = written(rng, depth - 1)
    return f"({text}) {kind} ({other})", (value and second) if kind == "and" else (value or second)


def damaged(rng: random.Random, text: str) -> str:
    """Cut, double, swap and put in some pieces."""
    for _ in range(rng.randint(1, 4)):
        at, to = sorted(rng.randint(0, len(text)) for _ in range(2))
        kind = rng.choice(("cut", "double", "put", "put", "tail"))
        if kind == "cut":
            text = text[:at] + text[to:]
        elif kind == "double":
            text = text[:to] + text[at:]
        elif kind == "tail":
            text = text[:at]
        else:
            text = text[:at] + rng.choice(PIECES) + text[at:]
    return text


def attempt(seed: int) -> Outcome:
    """Decide a condition, damaged in two of three attempts."""
    rng = random.Random(seed)
    text, expected = written(rng, rng.randint(0, 5))
    if rng.random() < 2 / 3:
        text = damaged(rng, text)
        expected = judged(text)
    try:
        answer = is_true(text, VALUES)
    except DumpError as error:
        line = str(error)
        if expected is not None:
            return Outcome("wrong", f"{text!r} is {expected}, and was refused: {line}")
        return Outcome("refused", line) if line.isprintable() else Outcome("wrong", f"more than a line: {line!r}")
    if answer is expected:
        return Outcome("right")
    return Outcome("wrong", f"{text!r} gave {answer}, expected {'a refusal' if expected is None else expected}")


AREA = Area("gates", "conditions", attempt, count=20_000, few=300)

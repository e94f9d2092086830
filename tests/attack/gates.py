"""Conditions of `--fail-if`: right by a parser of our own, or one line that refuses. From a grammar, then damaged."""

from __future__ import annotations

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
PIECES = (
    *OPERATORS,
    *NUMBERS,
    *VALUES,
    "and",
    "or",
    "not",
    "(",
    ")",
    " ",
    "\n",
    "\x00",
    "=",
    "True",
    "nan",
    "kl",
    "'",
    "\\",
)
PIECES += (
    "1e400",
    "\ud800",
    "\u202e",
    "\x1b[2J",
    "\u0661",
    "\ufb01",
    "#",
    ",",
    "__import__('os')",
    "lambda: 1",
    "not " * 3000,
    "(" * 3000,
)

TOKEN = re.compile(
    r"\s*(?:(?P<sign>>=|<=|==|!=|>|<|\(|\))|(?P<word>(?:and|or|not)(?![\w./]))"
    r"|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\d_.])|(?P<name>[A-Za-z_][\w./]*))"
)
# More than a person writes.
DEEPEST, LONGEST = 100, 2000


class Refused(Exception):
    """The text is no condition."""


class Reader:
    """A condition, read from left to right; shares no line with what it judges."""

    def __init__(self, text: str):
        whole, self.tokens, at, text = text, [], 0, text.rstrip()
        while at < len(text):
            found = TOKEN.match(text, at)
            if found is None:
                raise Refused(text[at:])
            self.tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()
        self.tokens.append(("end", ""))
        self.at = 0
        if len(whole) > LONGEST or sum(token in ("(", "not") for _, token in self.tokens) > DEEPEST:
            raise Refused("too long")

    def next_is(self, token: str) -> bool:
        found = self.tokens[self.at][1] == token
        self.at += found
        return found

    def whole(self) -> bool:
        value = self.either()
        if self.tokens[self.at][0] != "end":
            raise Refused(self.tokens[self.at][1])
        return value

    def either(self) -> bool:
        value = self.both()
        while self.next_is("or"):
            value |= self.both()
        return value

    def both(self) -> bool:
        value = self.single()
        while self.next_is("and"):
            value &= self.single()
        return value

    def single(self) -> bool:
        if self.next_is("not"):
            return not self.single()
        if self.next_is("("):
            value = self.either()
            if not self.next_is(")"):
                raise Refused(self.tokens[self.at][1])
            return value
        left = self.value()
        sign = self.tokens[self.at][1]
        if sign not in OPERATORS:
            raise Refused(sign)
        self.at += 1
        return OPERATORS[sign](left, self.value())

    def value(self) -> float:
        kind, token = self.tokens[self.at]
        self.at += 1
        if kind == "number" and math.isfinite(float(token)):
            return float(token)
        if kind != "name" or token not in VALUES:
            raise Refused(token)
        return VALUES[token]


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
        try:
            expected = Reader(text).whole()
        except Refused:
            expected = None
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


AREA = Area("gates", "conditions", attempt, count=20_000, few=800)

"""Settings in shell scripts and command lines: overrides as Hydra takes them, and flags.

A script is read and never run. A variable that is assigned twice, in two branches say, is UNKNOWN; so is all that comes
from its arguments, its environment without a default, or a command.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal


class Unknown:
    """The value of a setting that only running the script would tell."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = Unknown()
# Stands for an unknown part of a word while it is read.
HOLE = "\0"

OVERRIDE = re.compile(r"(?:\+{0,2})([A-Za-z_]\w*(?:\.[\w@/-]+)+)=(.*)", re.DOTALL)
ANY_OVERRIDE = re.compile(r"(?:\+{0,2})([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
ASSIGNED = re.compile(r"^[ \t]*(?:(?:export|local|readonly|declare)[ \t]+)?([A-Za-z_]\w*)=(?!\()", re.MULTILINE)
NUMBER = re.compile(r"[-+]?\d|[-+]?\.\d")

Found = tuple[str, Any, int]


def parsed(text: str, mode: Literal["exec", "eval"] = "exec") -> Any:
    """Parse Python, without its warnings of style."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse(text, mode=mode)


def scalar(text: str) -> Any:
    """Read a value as Hydra and argparse do: 0.5_2 is the number 0.52."""
    stripped = text.strip()
    if HOLE in text:
        return UNKNOWN
    if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        return stripped[1:-1]
    if stripped.startswith("[") and stripped.endswith("]"):
        inner = stripped[1:-1].strip()
        return [scalar(part) for part in inner.split(",")] if inner else []
    word = stripped.lower()
    if word in ("null", "none", "~"):
        return None
    if word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        try:
            return kind(stripped) if NUMBER.match(stripped) else stripped
        except ValueError:
            continue
    return stripped


def command_settings(words: Iterable[str | tuple[str, int]], flags_only: bool = False) -> Iterator[Found]:
    """Yield key, value and line of each override and each flag among the words of a command line."""
    flag: tuple[str, int] | None = None
    values: list[str] = []

    def done() -> Iterator[Found]:
        if flag is not None:
            read = [scalar(value) for value in values]
            yield flag[0], True if not read else read[0] if len(read) == 1 else read, flag[1]

    for each in words:
        word, line = each if isinstance(each, tuple) else (each, 0)
        if found := FLAG.fullmatch(word):
            yield from done()
            flag, values = (found[1].replace("-", "_"), line), [] if found[2] is None else [found[2]]
            continue
        override = None if flags_only else (OVERRIDE if line else ANY_OVERRIDE).fullmatch(word)
        if override or (word.startswith("-") and not NUMBER.match(word)) or word in (";", "&", "|", ")", "}", "\n"):
            yield from done()
            flag, values = None, []
        if override:
            yield override[1], scalar(override[2]), line
        elif flag is not None:
            values.append(word)
    yield from done()


def script_settings(text: str) -> Iterator[Found]:
    """Yield what `command_settings` finds in a shell script."""
    return command_settings(_words(text, _variables(text)))


def _variables(text: str) -> dict[str, str]:
    """Return the variables that have one value in the whole script."""
    known: dict[str, str] = {}
    seen: dict[str, set[str]] = {}
    for found in ASSIGNED.finditer(text):
        word, _ = _word(text, found.end(), known)
        values = seen.setdefault(found[1], set())
        values.add(word)
        known[found[1]] = word if len(values) == 1 else HOLE
    return known


# An array, or all arguments: flags with their values, and no value of the flag before.
ARRAY = re.compile(r'"?\$(\{\w+\[[@*]\]\}|[@*])"?(?=[\s;&|)]|$)')
HERE = re.compile(r"""<<-?[ \t]*(["']?)([A-Za-z_]\w*)\1""")


def _words(text: str, known: Mapping[str, str], line: int = 1) -> Iterator[tuple[str, int]]:
    at, delimiters = 0, list[str]()
    while at < len(text):
        char = text[at]
        if char == "\\" and text[at + 1 : at + 2] == "\n":
            at, line = at + 2, line + 1
        elif char == "\n":
            yield "\n", line
            at, line = at + 1, line + 1
            while delimiters:
                # A document is read alone (it may be a job's script), so that its quotes end with it.
                closing = re.compile(rf"^\t*{delimiters.pop(0)}[ \t\r]*$", re.MULTILINE).search(text, at)
                if closing is not None:
                    yield from _words(text[at : closing.start()], known, line)
                    line += text.count("\n", at, closing.end())
                    at = closing.end()
        elif text.startswith("<<<", at):
            at += 3
        elif found := HERE.match(text, at):
            delimiters.append(found[2])
            at = found.end()
        elif char in " \t\r":
            at += 1
        elif found := ARRAY.match(text, at):
            yield "\n", line
            at = found.end()
        elif char == "#":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif char in "();&|<>{}":
            if char in ")};&|":
                yield char, line
            at += 1
        else:
            word, end = _word(text, at, known)
            yield word, line
            line += text.count("\n", at, end)
            at = max(end, at + 1)


def _word(text: str, at: int, known: Mapping[str, str], quoted: bool = False) -> tuple[str, int]:
    """Read one word from a position, or up to the next double quote, with its variables; return it and its end."""
    made: list[str] = []
    while at < len(text) and text[at] not in ('"' if quoted else " \t\r\n;&|<>()"):
        char = text[at]
        if char == "'" and not quoted:
            end = _find(text, "'", at + 1)
            made.append(text[at + 1 : end])
            at = end + 1
        elif char == '"':
            inner, at = _word(text, at + 1, known, quoted=True)
            made.append(inner)
            at += 1
        elif char == "\\":
            if text[at + 1 : at + 2] == "\n" and not quoted:
                break
            made.append(text[at + 1 : at + 2])
            at += 2
        elif char == "$":
            value, at = _expanded(text, at, known)
            made.append(value)
        elif char == "`" and not quoted:
            at = _find(text, "`", at + 1) + 1
            made.append(HOLE)
        else:
            made.append(char)
            at += 1
    return "".join(made), at


def _find(text: str, char: str, at: int) -> int:
    end = text.find(char, at)
    return len(text) if end < 0 else end


def _closed(text: str, at: int) -> int:
    """Return where the bracket at a position is closed."""
    pairs = {"(": ")", "{": "}"}
    close, depth = pairs[text[at]], 0
    for end in range(at, len(text)):
        depth += (text[end] == text[at]) - (text[end] == close)
        if depth == 0:
            return end
    return len(text)


def _expanded(text: str, at: int, known: Mapping[str, str]) -> tuple[str, int]:
    """Put in the value of the `$...` at a position."""
    following = text[at + 1 : at + 2]
    if text.startswith("$((", at):
        end = _closed(text, at + 1)
        return _computed(text[at + 3 : end - 1], known), end + 1
    if following == "(":
        return HOLE, _closed(text, at + 1) + 1
    if following == "{":
        end = _closed(text, at + 1)
        name, operator, default = _split(text[at + 2 : end])
        if operator not in ("", ":-", "-", ":=", "="):
            return HOLE, end + 1
        if name in known and known[name] is not HOLE:
            return known[name], end + 1
        return (_word(default, 0, known, quoted=True)[0].strip("\"'") if operator else HOLE), end + 1
    if found := re.compile(r"[A-Za-z_]\w*").match(text, at + 1):
        return known.get(found[0], HOLE), found.end()
    if following in ("", " ", "\n", '"'):
        return "$", at + 1
    return HOLE, at + 2


def _split(inner: str) -> tuple[str, str, str]:
    found = re.fullmatch(r"(\w*)(:?[-=+?]|)(.*)", inner, re.DOTALL)
    return (found[1], found[2], found[3]) if found and (found[2] or not found[3]) else ("", "?", "")


ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}


def _computed(text: str, known: Mapping[str, str]) -> str:
    """Compute `$((1024 * 8))`, also with variables."""
    put_in = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: known.get(name[1], HOLE), text).replace("/", "//")
    if HOLE in put_in or len(put_in) > 200:
        return HOLE

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            return ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError(text)

    try:
        return str(value(parsed(put_in.strip(), "eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return HOLE

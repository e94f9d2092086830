"""Settings in shell scripts and command lines: overrides as Hydra takes them, and flags.

A script is read and never run. A variable that is assigned twice, in two branches say, is UNKNOWN; so is all that comes
from its arguments, its environment without a default, or a command.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal


class Unknown:
    """The value of a setting that only running the script would tell."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = Unknown()
# Stands for an unknown part of a word while it is read.
HOLE = "\0"
# Characters that the variables of a script may stand for, in all places together.
MOST_TEXT = 1 << 20
# Lists inside of one another in one value.
MOST_LISTS = 8

OVERRIDE = re.compile(r"(?:\+{0,2})([A-Za-z_]\w*(?:\.[\w@/-]+)+)=(.*)", re.DOTALL)
ANY_OVERRIDE = re.compile(r"(?:\+{0,2})([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
ASSIGNED = re.compile(r"^[ \t]*(?:(?:export|local|readonly|declare)[ \t]+)?([A-Za-z_]\w*)=(?!\()", re.MULTILINE)
NUMBER = re.compile(r"[-+]?\d|[-+]?\.\d")

Found = tuple[str, Any, int]


def parsed(text: str, mode: Literal["exec", "eval"] = "exec") -> Any:
    """Parse Python, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode=mode)


def scalar(text: str, within: int = 0) -> Any:
    """Read a value as Hydra and argparse do: 0.5_2 is the number 0.52; `within` counts the lists around it."""
    stripped = text.strip()
    if HOLE in text:
        return UNKNOWN
    if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        return stripped[1:-1]
    if stripped.startswith("[") and stripped.endswith("]") and within < MOST_LISTS:
        inner = stripped[1:-1].strip()
        return [scalar(part, within + 1) for part in inner.split(",")] if inner else []
    word = stripped.lower()
    if word in ("null", "none", "~"):
        return None
    if word in ("true", "false"):
        return word == "true"
    # A longer integer is one that no float holds.
    for kind in (int, float) if len(stripped) < 300 else (float,):
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
    script = Script(text)
    return command_settings(_words(script, _variables(script), 0, len(text), 1))


class Script:
    """The text of a script, and where each bracket in it is closed; what is never closed is not in `closing`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.closing: dict[int, int] = {}
        begun: dict[str, list[int]] = {"(": [], "{": []}
        for found in re.finditer(r"[(){}]", text):
            if found[0] in begun:
                begun[found[0]].append(found.start())
            elif opened := begun["(" if found[0] == ")" else "{"]:
                self.closing[opened.pop()] = found.start()


class Variables(dict[str, str]):
    """The variables with one value in the whole script, and HOLE for the others; what they stand for is counted."""

    left = MOST_TEXT

    def put_in(self, name: str) -> str:
        """Return what a variable stands for."""
        value = self.get(name, HOLE)
        self.left -= len(value)
        if self.left < 0:
            raise ValueError(f"its variables expand to more than {MOST_TEXT >> 20} MiB of text")
        return value


def _variables(script: Script) -> Variables:
    known, seen, end = Variables(), dict[str, set[str]](), 0
    for found in ASSIGNED.finditer(script.text):
        word = HOLE
        # What stands inside of a value, such as the commands of $(...), is not read again.
        if found.end() >= end:
            word, end = _word(script, known, found.end(), len(script.text))
        values = seen.setdefault(found[1], set())
        values.add(word)
        known[found[1]] = word if len(values) == 1 else HOLE
    return known


# An array, or all arguments: flags with their values, and no value of the flag before.
ARRAY = re.compile(r'"?\$(\{\w+\[[@*]\]\}|[@*])"?(?=[\s;&|)]|$)')
HERE = re.compile(r"""<<-?[ \t]*(["']?)([A-Za-z_]\w*)\1""")
# Documents that are read inside of one another.
MOST_DOCUMENTS = 4


def _words(
    script: Script, known: Variables, at: int, stop: int, line: int, within: int = 0
) -> Iterator[tuple[str, int]]:
    """Yield the words between two positions, with their lines."""
    text, delimiters = script.text, list[str]()
    while at < stop:
        char = text[at]
        if char == "\\" and text[at + 1 : at + 2] == "\n":
            at, line = at + 2, line + 1
        elif char == "\n":
            yield "\n", line
            at, line = at + 1, line + 1
            for delimiter in delimiters:
                # A document is read alone (it may be a job's script), so that its quotes end with it.
                closing, after = _document(text, at, stop, delimiter)
                if within < MOST_DOCUMENTS:
                    yield from _words(script, known, at, closing, line, within + 1)
                line += text.count("\n", at, after)
                at = after
            delimiters.clear()
        elif text.startswith("<<<", at):
            at += 3
        elif found := HERE.match(text, at, stop):
            delimiters.append(found[2])
            at = found.end()
        elif char in " \t\r":
            at += 1
        elif found := ARRAY.match(text, at, stop):
            yield "\n", line
            at = found.end()
        elif char == "#":
            at = _find(text, "\n", at, stop)
        elif char in "();&|<>{}":
            if char in ")};&|":
                yield char, line
            at += 1
        else:
            word, end = _word(script, known, at, stop)
            yield word, line
            line += text.count("\n", at, end)
            at = max(end, at + 1)


def _document(text: str, at: int, stop: int, delimiter: str) -> tuple[int, int]:
    """Return where a document ends, and where the line that closes it does; unclosed it goes to the end."""
    while at < stop:
        end = _find(text, "\n", at, stop)
        if text[at:end].lstrip("\t").rstrip(" \t\r") == delimiter:
            return at, end
        at = end + 1
    return stop, stop


def _word(script: Script, known: Variables, at: int, stop: int, quoted: bool = False) -> tuple[str, int]:
    """Read one word from a position, or up to the next double quote, with its variables; return it and its end."""
    text, made = script.text, list[str]()
    while at < stop and text[at] not in ('"' if quoted else " \t\r\n;&|<>()"):
        char = text[at]
        if char == "'" and not quoted:
            end = _find(text, "'", at + 1, stop)
            made.append(text[at + 1 : end])
            at = end + 1
        elif char == '"':
            inner, at = _word(script, known, at + 1, stop, quoted=True)
            made.append(inner)
            at += 1
        elif char == "\\":
            if text[at + 1 : at + 2] == "\n" and not quoted:
                break
            made.append(text[at + 1 : at + 2])
            at += 2
        elif char == "$":
            value, at = _expanded(script, known, at, stop)
            made.append(value)
        elif char == "`" and not quoted:
            at = _find(text, "`", at + 1, stop) + 1
            made.append(HOLE)
        else:
            made.append(char)
            at += 1
    return "".join(made), min(at, stop)


def _find(text: str, char: str, at: int, stop: int) -> int:
    end = text.find(char, at, stop)
    return stop if end < 0 else end


def _expanded(script: Script, known: Variables, at: int, stop: int) -> tuple[str, int]:
    """Put in the value of the `$...` at a position."""
    text = script.text
    following = text[at + 1 : at + 2]
    # Of $( and ${, where they are closed.
    end = min(script.closing.get(at + 1, stop), stop)
    if text.startswith("$((", at):
        return _computed(text[at + 3 : end - 1], known), end + 1
    if following == "(":
        return HOLE, end + 1
    if following == "{":
        found = NAMED.match(text, at + 2, end)
        if found is None or not (found[2] or found.end() == end) or found[2] not in DEFAULTS:
            return HOLE, end + 1
        if known.get(found[1], HOLE) != HOLE:
            return known.put_in(found[1]), end + 1
        default = _word(script, known, found.end(), end, quoted=True)[0].strip("\"'")
        return default if found[2] else HOLE, end + 1
    if found := NAME.match(text, at + 1, stop):
        return known.put_in(found[0]), found.end()
    if following in ("", " ", "\n", '"'):
        return "$", at + 1
    return HOLE, at + 2


NAME = re.compile(r"[A-Za-z_]\w*")
# In ${...}: a name, and the beginning of what is done with it.
NAMED = re.compile(r"(\w*)(:?[-=+?]|)")
DEFAULTS = ("", ":-", "-", ":=", "=")

ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}
LONGEST_SUM = 200


def _computed(text: str, known: Variables) -> str:
    """Compute `$((1024 * 8))`, also with variables."""
    if len(text) > LONGEST_SUM:
        return HOLE
    put_in = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: known.put_in(name[1]), text).replace("/", "//")
    if HOLE in put_in or len(put_in) > LONGEST_SUM:
        return HOLE

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            return ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError(text)

    try:
        return str(value(parsed(put_in.strip(), "eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, MemoryError, RecursionError):
        return HOLE

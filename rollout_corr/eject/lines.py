"""Source on lines that fit."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

WIDTH = 100


def fitted(text: str, width: int = WIDTH - 4) -> list[str]:
    """An expression or a statement on lines that fit: broken inside of its longest brackets, as formatters do."""
    if len(text) <= width:
        return [text]
    groups: list[tuple[int, int]] = []
    depth = start = 0
    for place, sign in enumerate(text):
        if sign in "([{":
            start = place + 1 if depth == 0 else start
            depth += 1
        elif sign in ")]}":
            depth -= 1
            if depth == 0:
                groups.append((start, place))
    if not groups:
        return [text]
    start, end = max(groups, key=lambda group: group[1] - group[0])
    inner = _arguments(text[start:end])
    together = ", ".join(inner)
    if len(together) <= width - 4 and len(text) - end <= width and start <= width:
        return [text[:start], "    " + together, text[end:]]
    lines = [text[:start]]
    for argument in inner:
        wrapped = fitted(argument, width - 4)
        wrapped[-1] += "," if len(inner) > 1 or not _is_group(text, start) else ""
        lines += ["    " + line for line in wrapped]
    rest = fitted(text[end + 1 :], width - 1) if len(text) - end > width else [text[end + 1 :]]
    return [*lines, text[end] + rest[0], *rest[1:]]


def filled(text: str, width: int) -> list[str]:
    """A head or a call with many arguments on few lines, which formatters have to leave alone."""
    if len(text) <= width:
        return [text]
    start, end = text.index("(", text.find(")](") + 1) + 1, text.rindex(")")
    arguments = ", ".join(one.replace(" ", "\0") for one in _arguments(text[start:end]))
    lines = ["    " + line.replace("\0", " ") for line in textwrap.wrap(arguments + ",", width - 4)]
    return [text[:start], *lines, text[end:] + "  # fmt: skip"]


def _is_group(text: str, start: int) -> bool:
    """A bracket that groups, rather than calls or indexes."""
    return start < 2 or not (text[start - 2].isalnum() or text[start - 2] in "_)]")


def _arguments(text: str) -> list[str]:
    """The arguments between brackets."""
    found, depth, first = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            found.append(text[first:place].strip())
            first = place + 1
    return [one for one in (*found, text[first:].strip()) if one]


def reflowed(source: str, width: int) -> str:
    """A function whose head fits."""
    if max(map(len, source.splitlines())) <= width:
        return source
    head = re.search(r"^def \w+\([^)]*\) -> [^\n]*:  # fmt: skip$", source, re.MULTILINE)
    if head is None:
        return source
    text = re.sub(r"\(\s+|,?\s+(?=\))", lambda found: found[0][:1].strip(", "), head[0].removesuffix("  # fmt: skip"))
    return source.replace(head[0], "\n".join(filled(" ".join(text.split()), width)))


def split_names(label: str, names: Iterable[str], width: int) -> str:
    """A list of names as a constant."""
    lines = textwrap.wrap(" ".join(names), width - 8)
    if len(lines) == 1 and len(label) + len(lines[0]) + 13 <= width:
        return f'{label} = "{lines[0]}".split()'
    return "\n".join([f"{label} = (", *(f'    "{line} "' for line in lines), ").split()"])


def joined(lines: Iterable[str], indent: str = "    ") -> str:
    """Lines as a block."""
    return "\n".join(indent + line if line else "" for line in lines)

"""Texts of others, made visible: nothing in them acts on what shows them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

# Characters of a text that are shown, and of the text of a token.
MOST, MOST_OF_TOKEN = 4000, 80
# Combining marks on one character: no script needs more, and a pile of them covers the lines above. A text begins
# with none, for the first one would land on what stands before it.
MOST_MARKS = 4


def visible(text: str, most: int = MOST) -> str:
    r"""Return a text on one line in which every character is printable.

    What is not printable is written as Python writes it: `\n`, `\x1b`, `\u202e`, `\udc80`. That is control characters,
    escape sequences, line breaks, marks that change the direction of a text, lone surrogates, spaces of other widths.

    Args:
        text: Any text.
        most: Characters of the result; a longer text is cut, and its length added.
    """
    shown = text[:most]
    if not (shown.isascii() and shown.isprintable()):
        shown = "".join(_characters(shown))
    if len(text) > most or len(shown) > most:
        cut = f"... ({len(text):,} characters)"
        shown = shown[: most - len(cut)] + cut
    return shown


def _characters(text: str) -> Iterator[str]:
    marks = MOST_MARKS
    for c in text:
        marks = marks + 1 if unicodedata.category(c).startswith("M") else 0
        yield c if c.isprintable() and marks <= MOST_MARKS else c.encode("unicode_escape").decode("ascii")

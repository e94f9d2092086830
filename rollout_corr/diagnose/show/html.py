"""HTML and SVG in which a string is a text: markup is made here alone, of tags that load and run nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Union

from .visible import visible

# Elements whose end is also the end of a line of the file.
BLOCKS = frozenset(("div", "details", "figure", "h1", "h2", "li", "p", "table", "tr", "ul"))
TAGS = BLOCKS | frozenset(
    (
        *("b", "code", "figcaption", "span", "summary", "tbody", "td", "th", "thead"),
        *("circle", "g", "line", "polyline", "rect", "svg", "text", "title"),
    )
)
# No style, address or handler of an event: their values are languages of their own, which escape() does not know.
ATTRIBUTES = frozenset(
    (
        *("aria-label", "class", "cx", "cy", "data-head", "data-says", "fill-opacity", "height", "open", "points", "r"),
        *("role", "rx", "tabindex", "text-anchor", "title", "transform", "viewBox", "width"),
        *("x", "x1", "x2", "y", "y1", "y2"),
    )
)


@dataclass(frozen=True)
class Html:
    """Finished markup. It is no string, so that it cannot be joined with a text that was not escaped."""

    source: str


Child = Union[str, Html, Iterable["Child"]]  # noqa: UP007 - Python 3.10 cannot join a string with |


def text(content: str) -> str:
    """Return any text as source: the door through which every text of a page passes, in elements and in attributes."""
    return escape(visible(content), quote=True)


def element(tag: str, *children: Child, **attributes: str | float | None) -> Html:
    """Make an element.

    Args:
        tag: One of `TAGS`.
        children: Texts, which are escaped, elements, and iterables of both.
        attributes: Those of `ATTRIBUTES`, with `_` for `-`, and `class_`. Floats get one digit; None is left out.
    """
    if tag not in TAGS:
        raise ValueError(f"tag: expected one of {', '.join(sorted(TAGS))}; got {tag!r}")
    shown = []
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        if name not in ATTRIBUTES:
            raise ValueError(f"attributes: expected some of {', '.join(sorted(ATTRIBUTES))}; got {name!r}")
        if value is not None and value != "":
            shown.append(f' {name}="{text(f"{value:.1f}" if isinstance(value, float) else str(value))}"')
    return Html(f"<{tag}{''.join(shown)}>{_source(children)}</{tag}>" + ("\n" if tag in BLOCKS else ""))


def preformatted(lines: Iterable[str]) -> Html:
    """Make a block of lines as they are."""
    shown = "\n".join(map(text, lines))
    return Html(f"<pre>{shown}</pre>\n")


def document(title: str, style: str, *body: Child) -> str:
    """Return the source of a page; `style` is a style sheet of this package."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{_source(body)}</body>\n</html>\n"
    )


def framed(page: str, title: str, height: int) -> Html:
    """Make a frame that shows a whole page of `document`, apart from what is around it; nothing in it can run."""
    return Html(
        f'<iframe title="{text(title)}" sandbox="" width="100%" height="{height}" srcdoc="{escape(page)}"></iframe>\n'
    )


def _source(child: Child) -> str:
    if isinstance(child, Html):
        return child.source
    return text(child) if isinstance(child, str) else "".join(map(_source, child))

"""A page by Python's own parser, against a list of the tags and attributes that this package writes."""

from __future__ import annotations

import re
from html.parser import HTMLParser

TAGS = frozenset(
    (
        *("a", "b", "body", "circle", "code", "details", "div", "figcaption", "figure", "g", "h1", "h2", "head"),
        *("html", "li", "line", "meta", "p", "polyline", "pre", "rect", "section", "span", "style", "summary", "svg"),
        *("table", "tbody", "td", "text", "th", "thead", "title", "tr", "ul"),
    )
)
ATTRIBUTES = frozenset(
    (
        *("aria-label", "charset", "class", "content", "cx", "cy", "data-head", "data-says", "fill-opacity", "height"),
        *("href", "id", "lang", "name", "open", "points", "r", "role", "rx", "tabindex", "text-anchor", "title"),
        *("transform", "viewbox", "width", "x", "x1", "x2", "y", "y1", "y2"),
    )
)
# The only addresses: places of the same page.
PLACES = {"href": re.compile("#[a-z0-9-]+"), "id": re.compile("[a-z0-9-]+")}


class Page(HTMLParser):
    """Keeps the elements and texts of a page, and notes everything in it that this package never writes."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.elements: list[tuple[str, dict[str, str], tuple[str, ...]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        if self.open:
            self.wrong.append(f"never closed: {self.open}")

    def handle_starttag(self, tag, attributes):
        if tag not in TAGS:
            self.wrong.append(f"<{tag}>")
        for name, value in attributes:
            known = name in ATTRIBUTES and value is not None
            if known and name in PLACES:
                known = bool(PLACES[name].fullmatch(value))
            if not known:
                self.wrong.append(f"<{tag} {name}={value!r}>")
        if len(dict(attributes)) != len(attributes):
            self.wrong.append(f"<{tag}> has an attribute twice")
        self.elements.append((tag, dict(attributes), tuple(self.open)))
        if tag != "meta":
            self.open.append(tag)

    def handle_data(self, data):
        self.texts.append((data, self.open[-1] if self.open else ""))

    def said(self, *tags):
        return [text for text, tag in self.texts if tag in tags]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> out of place")

    def handle_comment(self, data):
        self.wrong.append(f"<!--{data[:40]}")

    def handle_decl(self, declaration):
        if declaration != "DOCTYPE html":
            self.wrong.append(f"<!{declaration[:40]}")

    def handle_pi(self, data):
        self.wrong.append(f"<?{data[:40]}")

    def unknown_decl(self, data):
        self.wrong.append(f"<![{data[:40]}")

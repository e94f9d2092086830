"""Parts of HTML pages that load nothing: no script, no font, no picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..doctor.cause import Finding
from ..doctor.diagnosis import is_healthy
from ..read.dump import Source
from .content import HEALTHY, WORDS, Table, Tile, problems_title
from .html import Child, Html, document, element
from .style import STYLE


def page(title: str, of: str, parts: Sequence[Child]) -> str:
    """Return a whole page: a title, a line that says what it is about, and its parts."""
    return document(title, STYLE, element("h1", title), element("p", of, class_="of"), parts)


def section(title: str, *parts: Child) -> Html:
    """Return a heading and its content."""
    return element("section", element("h2", title), parts)


def drawn(figures: Sequence[Html]) -> Html:
    """Return charts, side by side where there is room."""
    return element("div", figures, class_="charts")


def table(content: Table, best: frozenset[int] = frozenset()) -> Html:
    """Return a table; `best` are the indices of rows to emphasize."""

    def cells(kind: Literal["th", "td"], row: Sequence[str]) -> list[Html]:
        return [element(kind, x, class_="text" if i < content.text else None) for i, x in enumerate(row)]

    rows = [element("tr", cells("td", row), class_="best" if i in best else None) for i, row in enumerate(content.rows)]
    return wide(cells("th", content.heads), rows)


def wide(heads: Sequence[Html], rows: Sequence[Html]) -> Html:
    """Return a table that scrolls sideways where the page is narrow."""
    return element(
        "div", element("table", element("thead", element("tr", heads)), element("tbody", rows)), class_="wide"
    )


def problem_cards(source: Source) -> Child:
    """Return a card that lists what could not be read, if there is anything."""
    if not source.problems.count:
        return ()
    items = [element("li", str(problem)) for problem in source.problems.shown]
    return element("div", element("b", problems_title(source)), element("ul", items), class_="card error")


def finding_cards(findings: Sequence[Finding]) -> list[Html]:
    """Return a card for every finding of the doctor."""
    cards = []
    if is_healthy(findings):
        cards.append(element("div", element("b", "healthy"), f": {HEALTHY}", class_="card good"))
    for finding in findings:
        cards.append(
            element(
                "div",
                *(element("b", f"{finding.severity}: {finding.title}"), " ", element("code", finding.name)),
                *(element("ul", [element("li", line) for line in finding.evidence]), finding.advice),
                class_=f"card {finding.severity}",
            )
        )
    return cards


def card(text: str, kind: str = "warning") -> Html:
    """Return a card with one text."""
    return element("div", text, class_=f"card {kind}")


def folded(summary: str, *parts: Child) -> Html:
    """Return parts that the reader unfolds."""
    return element("details", element("summary", summary), parts)


def tile_row(tiles: Sequence[Tile]) -> Html:
    """Return numbers beside their healthy ranges, in the color of where they lie."""
    return element(
        "div",
        [
            element(
                "div",
                element("span", tile.name, class_="name"),
                element("b", tile.value),
                element(
                    "span",
                    element("span", WORDS[tile.state], class_="state"),
                    element("span", tile.range),
                    class_="range",
                ),
                class_=f"tile {tile.state}",
                title=tile.key,
            )
            for tile in tiles
        ],
        class_="tiles",
    )

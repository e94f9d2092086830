"""Parts of HTML pages that load nothing: no script, no font, no picture."""

from __future__ import annotations

from collections.abc import Sequence

from ..doctor.cause import Finding
from ..read.dump import Source
from .content import HEALTHY, UNSEEN, WORDS, Table, Tile, problems_title
from .html import Child, Html, document, element
from .style import STYLE

# Columns of a table that fits a phone.
NARROW = 4


def page(title: str, of: Child, parts: Sequence[Child]) -> str:
    """Return a whole page: a title, what it is about, and its parts."""
    return document(title, STYLE, element("h1", title), element("div", of, class_="of"), parts)


def drawn(figures: Sequence[Html]) -> Html:
    """Return charts, side by side where there is room."""
    return element("div", figures, class_="charts")


def table(content: Table) -> Html:
    """Return a table; on a phone a wide one has a block for each row."""

    def cell(i: int, shown: Child) -> Html:
        return element("td", shown, class_="text" if i < content.text else None, data_head=content.heads[i])

    heads = [element("th", x, class_="text" if i < content.text else None) for i, x in enumerate(content.heads)]
    rows = [element("tr", [cell(i, x) for i, x in enumerate(row)]) for row in content.rows]
    made = element("table", element("thead", element("tr", heads)), element("tbody", rows))
    return element("div", made, class_="wide stacked" if len(heads) > NARROW else "wide")


def problem_cards(source: Source) -> Child:
    """Return a card that lists what could not be read, if there is anything."""
    if not source.problems.count:
        return ()
    items = [element("li", str(problem)) for problem in source.problems.shown]
    return element("div", element("b", problems_title(source)), element("ul", items), class_="card error")


def healthy_card(source: Source) -> Html:
    """Return a card that says that nothing was found, and what could not be."""
    unseen = () if "entropy" in source.fields else element("p", UNSEEN, class_="soft")
    return element("div", element("b", "healthy"), f": {HEALTHY}", unseen, class_="card good")


def finding_card(finding: Finding, picture: Child) -> Html:
    """Return a card for a finding of the doctor, with the picture that shows it."""
    says = element(
        "div",
        *(element("b", f"{finding.severity}: {finding.title}"), " ", element("code", finding.name)),
        element("ul", [element("li", line) for line in finding.evidence]),
        element("p", finding.advice),
    )
    return element("div", says, picture, class_=f"card {finding.severity}{' found' if picture else ''}")


def card(text: str) -> Html:
    """Return a card with one warning."""
    return element("div", text, class_="card warning")


def folded(summary: Child, *parts: Child, opened: bool = False) -> Html:
    """Return parts that the reader folds and unfolds."""
    return element("details", element("summary", summary), parts, open="open" if opened else None)


def strip(said: Sequence[tuple[str, str]]) -> Html:
    """Return terms and what they are; on a phone each is a line, and whole when it is touched."""
    items = [element("span", element("b", term), text, tabindex="-1") for term, text in said]
    return element("div", items, class_="strip")


def tile_row(*dumps: Sequence[Tile]) -> Html:
    """Return numbers with their healthy ranges, in the color of where they lie; of two dumps, before and after."""
    found = []
    for same in zip(*dumps, strict=True):
        values: list[Child] = [element("b", tile.shown, class_=tile.state) for tile in same]
        if len(same) > 1:
            values.insert(1, " \u2192 ")
        last = same[-1]
        state = element("span", WORDS[last.state], class_="state")
        found.append(
            element(
                "div",
                element("span", last.name, class_="name"),
                element("span", values, class_="values"),
                element("span", state, element("span", f"healthy: {last.healthy}"), class_="range"),
                element("code", last.key),
                class_=f"tile {last.state}",
            )
        )
    return element("div", found, class_="tiles")

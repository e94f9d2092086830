"""Results in a notebook: the findings as a table, and the page of a report in a frame of its own."""

from __future__ import annotations

from collections.abc import Sequence

from ..doctor.diagnosis import Diagnosed, is_healthy
from .content import HEALTHY, problems_title, summary
from .html import Child, Html, element, framed

# Pixels of the frame; the page scrolls in it.
HEIGHT = 720


def findings(diagnosis: Diagnosed) -> str:
    """Return what was found as a table. It has no style: the notebook's own tables have one."""
    return element("div", _findings(diagnosis)).source


def _findings(diagnosis: Diagnosed) -> list[Child]:
    source = diagnosis.source
    parts: list[Child] = [element("p", f"{source.name}: {summary(diagnosis)}")]
    if source.problems.count:
        parts += [element("p", element("b", problems_title(source)))]
        parts += [element("ul", [element("li", str(problem)) for problem in source.problems.shown])]
    if is_healthy(diagnosis.findings):
        parts.append(element("p", element("b", "healthy"), f": {HEALTHY}"))
    if diagnosis.findings:
        heads = ("", "cause", "found", "evidence", "advice")
        rows = [
            element(
                "tr",
                element("td", element("b", each.severity)),
                element("td", element("code", each.name)),
                element("td", each.title),
                element("td", element("ul", [element("li", line) for line in each.evidence])),
                element("td", each.advice),
            )
            for each in diagnosis.findings
        ]
        head = element("thead", element("tr", [element("th", head) for head in heads]))
        parts.append(element("table", head, element("tbody", rows)))
    if diagnosis.mistakes:
        parts.append(element("p", element("b", "in the configuration:")))
        parts.append(element("ul", [element("li", str(mistake)) for mistake in diagnosis.mistakes]))
    return parts


def report(diagnoses: Sequence[Diagnosed], page: str) -> str:
    """Return what was found, and below it the page.

    A notebook that is not trusted shows no frame; the table stays.
    """
    frame: Html = framed(page, "report", HEIGHT)
    return element("div", [_findings(each) for each in diagnoses], frame).source

"""Charts as inline SVG: lines, bars, dots and densities on linear or logarithmic axes, in the colors of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .html import Child, Html, element
from .visible import visible

# Units of the view box. A phone shows a chart at about this width, so that texts keep their size there.
WIDTH, HEIGHT = 380, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 16, 48
# Below the frame where labels are turned.
TURNED = 84
# Most letters of a line in a box of values, and the width of one.
LONGEST, LETTER = 56, 6.0
# And of a label that is turned.
SHORT = 24
# Half the width of the widest place that says its values, and how many of them a density has in a row.
WIDEST, SQUARES = 20.0, 32


@dataclass(frozen=True)
class Axis:
    """One axis of a chart."""

    label: str  # its name
    low: float  # its first value
    high: float  # its last value; above `low`
    log: bool = False  # logarithmic; needs `low` above 0
    ticks: Sequence[tuple[float, str]] | None = None  # places and their labels; None: round numbers

    def at(self, value: float) -> float:
        """Return the place of a value, 0 to 1; values beyond an end are placed at that end."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def marks(self) -> Sequence[tuple[float, str]]:
        """Return the ticks within the axis and their labels."""
        if self.ticks is not None:
            return self.ticks
        return _decades(self.low, self.high) if self.log else _round(self.low, self.high)


def spanning(label: str, values: Sequence[float], *, log: bool = False, zero: bool = False) -> Axis:
    """Make an axis on which all finite values fit.

    Args:
        label: Its name.
        values: Values that have to fit.
        log: Make it logarithmic, and leave out values that are not above 0.
        zero: Include 0.
    """
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if log:
        low, high = (min(known), max(known)) if known else (0.1, 1.0)
        return Axis(label, low / 1.15, high * 1.15, log=True)
    if zero:
        known = [*known, 0.0]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    room = 0.05 * (high - low) or 0.5 * abs(high) or 0.5
    # An end at 0 stays there; if both are at 0, the axis still needs some length.
    stays = zero and low != high
    return Axis(label, low if stays and low == 0 else low - room, high if stays and high == 0 else high + room)


def _round(low: float, high: float) -> list[tuple[float, str]]:
    step = 10.0 ** math.floor(math.log10((high - low) / 3.0))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= 6)
    first = math.ceil(low / step - 1e-9)
    count = int((high - first * step) / step + 1e-9) + 1
    return [((first + i) * step, f"{(first + i) * step:.6g}") for i in range(count)]


def _decades(low: float, high: float) -> list[tuple[float, str]]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 1:
        inside = [m * 10.0**e for e in range(first - 1, last + 2) for m in (1, 2, 5)]
        found = [(value, f"{value:.3g}") for value in inside if low <= value <= high]
        return found or _round(low, high)
    step = max(1, -(-(last - first) // 6))
    return [(10.0**e, f"{10.0**e:g}") for e in range(first, last + 1, step)]


@dataclass
class Chart:
    """A chart; its methods draw on it.

    Places that say their values to a pointer or a finger lie above everything else, so that no line covers a box.
    """

    title: str
    x: Axis
    y: Axis
    height: int = HEIGHT  # in units of the view box
    bottom: int = BOTTOM  # units below the frame, for the labels of the horizontal axis
    parts: list[Html] = field(default_factory=list)  # SVG elements drawn so far
    says: list[Html] = field(default_factory=list)  # places with values drawn so far
    legend: list[tuple[str, str]] = field(default_factory=list)  # CSS class and name of each entry

    def px(self, value: float) -> float:
        return LEFT + self.x.at(value) * (WIDTH - LEFT - RIGHT)

    def py(self, value: float) -> float:
        return self.height - self.bottom - self.y.at(value) * (self.height - TOP - self.bottom)

    def line(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in points if math.isfinite(x + y))
        self.parts += [element("polyline", class_=f"line {kind}", points=path)] if path else []

    def segment(self, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
        """Draw the part of a straight line that is within the frame."""
        (x, y), (dx, dy) = start, (end[0] - start[0], end[1] - start[1])
        # Where it enters and leaves, as shares of its length: of each axis by the range of that axis.
        first, last = 0.0, 1.0
        for at, by, axis in ((x, dx, self.x), (y, dy, self.y)):
            if by:
                edges = sorted(((axis.low - at) / by, (axis.high - at) / by))
                first, last = max(first, edges[0]), min(last, edges[1])
        if first < last:
            self.line([(x + share * dx, y + share * dy) for share in (first, last)], kind)

    def vertical(self, value: float, says: str) -> None:
        """Draw a dashed vertical line at a value, with its name on top."""
        if self.x.low <= value <= self.x.high:
            self.line([(value, self.y.low), (value, self.y.high)], "mark")
            self.parts.append(element("text", says, class_="small", x=self.px(value), y=TOP - 3, text_anchor="middle"))

    def points(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        """Draw a dot at each point that is within the frame."""
        for x, y in points:
            if self.y.low <= y <= self.y.high:
                self.parts.append(element("circle", class_=f"dot {kind}", cx=self.px(x), cy=self.py(y), r=2.6))

    def bars(self, edges: Iterable[tuple[float, float, float]], kind: str) -> None:
        """Draw bars that stand on 0: (from, to, height)."""
        floor = self.py(0.0)
        for low, high, value in edges:
            left, end = self.px(low), self.py(value)
            size = {"width": max(self.px(high) - left - 0.4, 0.4), "height": abs(floor - end)}
            self.parts.append(element("rect", class_=f"bar {kind}", x=left, y=min(end, floor), **size))

    def band(self, low: float, high: float, says: Sequence[str]) -> None:
        """Let the part of the frame above an interval of the horizontal axis say something."""
        self._band(self.px(low), self.px(high), says)

    def bands(self, said: Mapping[float, Sequence[str]]) -> None:
        """Let the parts of the frame nearest to places on the horizontal axis say something."""
        places = sorted((self.px(x), says) for x, says in said.items())
        edges = [LEFT, *(0.5 * (a + b) for (a, _), (b, _) in pairwise(places)), WIDTH - RIGHT]
        for (left, right), (x, says) in zip(pairwise(edges), places, strict=False):
            self._band(max(left, x - WIDEST), min(right, x + WIDEST), says)

    def _band(self, left: float, right: float, says: Sequence[str]) -> None:
        size = {"width": max(right - left, 0.4), "height": float(self.height - TOP - self.bottom)}
        self._say(element("rect", x=left, y=float(TOP), **size), 0.5 * (left + right), TOP + 0.2 * size["height"], says)

    def _say(self, area: Html, x: float, y: float, says: Sequence[str]) -> None:
        """Give an area a box of lines, which the style sheet shows where a pointer or a finger is on it."""
        lines = [visible(line, LONGEST) for line in says]
        width, height = 14.0 + LETTER * max(map(len, lines)), 7.0 + 13.0 * len(lines)
        left = x + 10.0 if x + width + 12.0 < WIDTH else x - width - 10.0
        left = min(max(left, 1.0), WIDTH - width - 1.0)
        top = min(max(y - 0.5 * height, 1.0), self.height - height - 1.0)
        texts = [element("text", line, x=7, y=13 * i + 13) for i, line in enumerate(lines)]
        box = element("rect", width=width, height=height, rx=3)
        tip = element("g", box, texts, class_="tip", transform=f"translate({left:.1f} {top:.1f})")
        # With -1 a finger can choose it, and the keyboard does not stop at hundreds of places.
        self.says.append(element("g", area, tip, class_="says", tabindex="-1"))

    def cells(self, counts: Sequence[Sequence[int]], says: Callable[[int, int, int, int], Sequence[str]]) -> None:
        """Draw a density: counts[row][column] over equal parts of both axes, row 0 below, shaded by log(count).

        Args:
            counts: As many rows as columns.
            says: Returns what a square of cells says, from its first row and column, its side and its count.
        """
        most, size = max((max(row) for row in counts), default=0), len(counts)
        w, h = (WIDTH - LEFT - RIGHT) / size, (self.height - TOP - self.bottom) / size
        bottom = self.height - self.bottom

        def place(i: int, j: int, side: int) -> dict[str, float]:
            return {"x": LEFT + j * w, "y": bottom - (i + side) * h, "width": side * w, "height": side * h}

        for i, row in enumerate(counts):
            for j, count in enumerate(row):
                if count:
                    shade = 0.12 + 0.88 * math.log1p(count) / math.log1p(most)
                    self.parts.append(element("rect", class_="cell", **place(i, j, 1), fill_opacity=f"{shade:.2f}"))
        # A finger is wider than a cell.
        side = max(1, size // SQUARES)
        for i in range(0, size, side):
            for j in range(0, size, side):
                count = sum(sum(row[j : j + side]) for row in counts[i : i + side])
                if count:
                    at = place(i, j, min(side, size - i, size - j))
                    self._say(element("rect", **at), at["x"] + at["width"], at["y"], says(i, j, side, count))

    def svg(self) -> Html:
        """Return the chart as an HTML figure."""
        right, bottom = WIDTH - RIGHT, self.height - self.bottom
        drawn: list[Child] = []
        for value, text in self.x.marks():
            x = self.px(value)
            drawn.append(element("line", class_="grid", x1=x, x2=x, y1=TOP, y2=bottom))
            if self.bottom > BOTTOM:
                turned = f"translate({x + 3.0:.1f} {bottom + 12:.0f}) rotate(-40)"
                label = element("text", visible(text, SHORT), class_="small", transform=turned, text_anchor="end")
            else:
                label = element("text", text, x=x, y=bottom + 18, text_anchor="middle")
            drawn.append(label)
        for value, text in self.y.marks():
            y = self.py(value)
            drawn.append(element("line", class_="grid", x1=LEFT, x2=right, y1=y, y2=y))
            drawn.append(element("text", text, x=LEFT - 5, y=y + 3.5, text_anchor="end"))
        if self.y.low < 0.0 < self.y.high:
            drawn.append(element("line", class_="zero", x1=LEFT, x2=right, y1=self.py(0.0), y2=self.py(0.0)))
        turned = f"translate(12 {(TOP + bottom) / 2:.0f}) rotate(-90)"
        drawn += [
            self.parts,
            element("rect", class_="frame", x=LEFT, y=TOP, width=right - LEFT, height=bottom - TOP),
            element("text", self.x.label, x=(LEFT + right) / 2, y=self.height - 8, text_anchor="middle"),
            element("text", self.y.label, transform=turned, text_anchor="middle"),
            self.says,
        ]
        keys = [element("span", name, class_=f"key {kind}") for kind, name in dict.fromkeys(self.legend)]
        return element(
            "figure",
            element("figcaption", self.title, keys),
            element("svg", *drawn, viewBox=f"0 0 {WIDTH} {self.height}", role="img", aria_label=self.title),
        )

"""Charts as inline SVG: lines, bars, dots and densities on linear or logarithmic axes, in the colors of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .html import Html, element

# Units of the view box. A phone shows a chart at about this width, so that texts keep their size there.
WIDTH, HEIGHT = 380, 240
# Numbers of places that are nearer than this to one another would touch.
NEAR = 26.0
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 16, 48


@dataclass(frozen=True)
class Axis:
    """One axis of a chart.

    Attributes:
        label: Its name.
        low: Its first value.
        high: Its last value; above `low`.
        log: A logarithmic axis; needs `low` above 0.
        ticks: Places and their labels; None: round numbers.
    """

    label: str
    low: float
    high: float
    log: bool = False
    ticks: Sequence[tuple[float, str]] | None = None

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

    Args:
        title: Its caption.
        x: The horizontal axis.
        y: The vertical axis.
        width: In units of the view box.
        height: In units of the view box.
        parts: SVG elements drawn so far.
        legend: CSS class and name of each entry.
    """

    title: str
    x: Axis
    y: Axis
    width: int = WIDTH
    height: int = HEIGHT
    parts: list[Html] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)

    def px(self, value: float) -> float:
        return LEFT + self.x.at(value) * (self.width - LEFT - RIGHT)

    def py(self, value: float) -> float:
        return self.height - BOTTOM - self.y.at(value) * (self.height - TOP - BOTTOM)

    def line(self, points: Sequence[tuple[float, float]], kind: str, name: str = "", dots: bool = True) -> None:
        """Draw a line through points; up to 100 points get a dot with a tooltip."""
        points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        if not points:
            return
        path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in points)
        self.parts.append(element("polyline", class_=f"line {kind}", points=path))
        if dots and len(points) <= 100:
            for x, y in points:
                self.dot(x, y, kind, f"{self.x.label} {x:.4g}: {y:.4g}")
        if name:
            self.legend.append((kind, name))

    def dot(self, x: float, y: float, kind: str, says: str, radius: float = 2.6) -> None:
        """Draw a dot with a tooltip."""
        place = {"cx": self.px(x), "cy": self.py(y), "r": radius}
        self.parts.append(element("circle", element("title", says), class_=f"dot {kind}", **place))

    def numbers(self, places: Sequence[tuple[float, float]]) -> None:
        """Number places from 1; those that lie close together have one label, such as 2-4."""
        groups: list[list[int]] = []
        at = [(self.px(x), self.py(y)) for x, y in places]
        for i, (x, y) in enumerate(at):
            if groups and abs(x - at[groups[-1][0]][0]) < NEAR and abs(y - at[groups[-1][0]][1]) < NEAR:
                groups[-1].append(i)
            else:
                groups.append([i])
        for group in groups:
            x, y = at[group[0]]
            says = f"{group[0] + 1}-{group[-1] + 1}" if len(group) > 1 else str(group[0] + 1)
            # Inside the frame, below a dot at its top.
            x = min(max(x, LEFT + 10.0), self.width - RIGHT - 10.0)
            y = y - 8.0 if y > TOP + 20.0 else y + 16.0
            self.parts.append(element("text", says, class_="number", x=x, y=y, text_anchor="middle"))

    def bars(self, edges: Sequence[tuple[float, float, float, str]], kind: str, name: str = "") -> None:
        """Draw bars that stand on the horizontal axis: (from, to, height, tooltip)."""
        floor = self.py(self.y.low if self.y.log else 0.0)
        for low, high, value, says in edges:
            a, b, top = self.px(low), self.px(high), self.py(value)
            place = {"x": min(a, b), "y": min(top, floor)}
            size = {"width": max(abs(b - a) - 0.4, 0.4), "height": abs(floor - top)}
            self.parts.append(element("rect", element("title", says), class_=f"bar {kind}", **place, **size))
        if name:
            self.legend.append((kind, name))

    def vertical(self, value: float, says: str) -> None:
        """Draw a dashed vertical line at a value, with its name on top."""
        if self.x.low <= value <= self.x.high:
            x = self.px(value)
            self.parts.append(element("line", class_="mark", x1=x, x2=x, y1=TOP, y2=self.height - BOTTOM))
            self.parts.append(element("text", says, class_="small", x=x, y=TOP - 3, text_anchor="middle"))

    def diagonal(self) -> None:
        """Draw the line on which both axes have the same value."""
        low, high = max(self.x.low, self.y.low), min(self.x.high, self.y.high)
        ends = {"x1": self.px(low), "y1": self.py(low), "x2": self.px(high), "y2": self.py(high)}
        self.parts.append(element("line", class_="mark", **ends))

    def cells(self, counts: Sequence[Sequence[int]], says: Callable[[int, int, int], str]) -> None:
        """Draw a density: counts[row][column] over equal parts of both axes, row 0 below, shaded by log(count)."""
        most = max((max(row) for row in counts), default=0)
        rows, columns = len(counts), len(counts[0])
        w, h = (self.width - LEFT - RIGHT) / columns, (self.height - TOP - BOTTOM) / rows
        for i, row in enumerate(counts):
            for j, count in enumerate(row):
                if not count:
                    continue
                shade = 0.12 + 0.88 * math.log1p(count) / math.log1p(most)
                place = {
                    "x": LEFT + j * w,
                    "y": self.height - BOTTOM - (i + 1) * h,
                    "width": w + 0.2,
                    "height": h + 0.2,
                }
                title = element("title", says(i, j, count))
                self.parts.append(element("rect", title, class_="cell", **place, fill_opacity=f"{shade:.2f}"))

    def svg(self) -> Html:
        """Return the chart as an HTML figure."""
        right, bottom = self.width - RIGHT, self.height - BOTTOM
        frame = []
        for value, text in self.x.marks():
            x = self.px(value)
            frame.append(element("line", class_="grid", x1=x, x2=x, y1=TOP, y2=bottom))
            frame.append(element("text", text, x=x, y=bottom + 18, text_anchor="middle"))
        for value, text in self.y.marks():
            y = self.py(value)
            frame.append(element("line", class_="grid", x1=LEFT, x2=right, y1=y, y2=y))
            frame.append(element("text", text, x=LEFT - 5, y=y + 3.5, text_anchor="end"))
        middle = (LEFT + right) / 2
        turned = f"translate(12 {(TOP + bottom) / 2:.0f}) rotate(-90)"
        labels = [
            element("text", self.x.label, x=middle, y=self.height - 8, text_anchor="middle"),
            element("text", self.y.label, transform=turned, text_anchor="middle"),
        ]
        box = element("rect", class_="frame", x=LEFT, y=TOP, width=right - LEFT, height=bottom - TOP)
        keys = [element("span", name, class_=f"key {kind}") for kind, name in dict.fromkeys(self.legend)]
        drawn = (frame, self.parts, box, labels)
        view = f"0 0 {self.width} {self.height}"
        return element(
            "figure",
            element("figcaption", self.title, keys),
            element("svg", *drawn, viewBox=view, role="img", aria_label=self.title),
            class_="wide" if self.width > WIDTH else None,
        )

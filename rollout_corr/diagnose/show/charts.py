"""The charts of the pages. A report's charts show one dump, or two: before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from ...metrics.histogram import HISTOGRAM, HISTOGRAM_BINS, bin_edges
from ..doctor.cause import counted
from ..measure.measurement import CELLS, LOWEST_LOGP, Measurement
from ..measure.profiles import Row, joined
from ..measure.sharpness import UNLIKELY
from .content import Named
from .html import Html
from .svg import BOTTOM, HEIGHT, LEFT, LETTER, RIGHT, TURNED, WIDTH, Axis, Chart, spanning

HALF = HISTOGRAM_BINS // 2
# The least |D| at which a linear axis ends.
SMALLEST = 2.0**-16
# The ratio that the histograms mark, up and down.
RATIO = 2.0
# Most bars of a linear histogram. Its axis has the first share of the values, or ends at so many times the |D| that has
# the second one, so that a few values far out do not make one bar of all others.
MOST_BARS, SHOWN, MOST, TIMES = 61, 0.999, 0.9, 8.0
# Bins that say their values; neighbors of more are joined.
MOST_SAYING = 64
# Height of a density, whose frame is nearly a square, and its cells per nat.
SQUARE, NAT = 330, round(-CELLS / LOWEST_LOGP)

Unit = Literal["tokens", "sequences"]
# The mean of a bin of fewer is chance.
FEWEST: dict[Unit, int] = {"tokens": 50, "sequences": 5}

# CSS classes of the first and of the second dump.
KINDS = ("a", "b")


def distributions(dumps: Named) -> list[Html]:
    """Draw the distributions of D of tokens, and of mean D of sequences, on linear axes."""
    tokens = [(name, _histogram_of(measured)) for name, measured in dumps]
    sequences = [(name, measured.sequence_means.tolist()) for name, measured in dumps]
    return [_linear_chart("D", "tokens", tokens), _linear_chart("mean D", "sequences", sequences)]


def _linear_chart(what: str, unit: Unit, series: Sequence[tuple[str, Sequence[float]]]) -> Html:
    """Draw the middle of distributions, from counts by the bins of the histogram; say how much lies further out."""
    reach = max(_reach(counts) for _, counts in series)
    totals = [sum(counts) or 1.0 for _, counts in series]
    # With few values, narrow bars would show chance. An odd number has one in the middle.
    bars = min(MOST_BARS, 2 * round(math.sqrt(min(totals))) + 1)
    found = [(name, _linear_bars(counts, reach, bars)) for name, counts in series]
    outside = max(1.0 - sum(some.values()) / total for (_, some), total in zip(found, totals, strict=True))
    label = "D, nats" + (f" ({100 * outside:.2g} % of the {unit} lie further out)" if outside > 5e-7 else "")
    heights = [100.0 * n / total for (_, some), total in zip(found, totals, strict=True) for n in some.values()]
    y = spanning(f"% of the {unit}, per bar", heights, zero=True)
    chart = Chart(f"{what} of {unit}", Axis(label, -reach, reach), y)
    if math.log(RATIO) > 0.1 * reach:
        # Nearer to one another the two labels would touch.
        chart.vertical(math.log(RATIO), f"x{RATIO:g}")
        chart.vertical(-math.log(RATIO), f"/{RATIO:g}")
    several = len(series) > 1
    says: dict[tuple[float, float], list[str]] = {}
    for kind, (name, some), total in zip(("a", "b hollow"), found, totals, strict=False):
        chart.bars([(*edge, 100.0 * n / total) for edge, n in some.items()], kind)
        chart.legend += [(kind, name)] if several else []
        for edge, n in some.items():
            said = says.setdefault(edge, [f"{what} {edge[0]:.3g} to {edge[1]:.3g}"])
            said.append(f"{name + ': ' if several else ''}{100.0 * n / total:.3g} %, {counted(n, unit[:-1])}")
    for edge, lines in says.items():
        chart.band(*edge, lines)
    return chart.svg()


def _reach(counts: Sequence[float]) -> float:
    """Return the |D| at which a linear axis ends: the edge of a bin of the histogram."""
    total, seen, most = sum(counts), 0.0, 0.0
    for i in range(HALF - 1):
        seen += counts[i] + counts[i + HALF]
        upper = max(bin_edges(i)[1], SMALLEST)
        if total and seen >= MOST * total:
            most = most or upper
            if seen >= SHOWN * total or upper >= TIMES * most:
                return upper
    return bin_edges(HALF - 1)[0] if total else 1.0


def _linear_bars(counts: Sequence[float], reach: float, bars: int) -> dict[tuple[float, float], float]:
    """Return the counts of bars (from, to) of equal widths within the reach.

    A bin of the histogram is spread evenly over the bars that it touches.
    """
    width = 2.0 * reach / bars
    inside = [0.0] * bars
    for i, count in enumerate(counts):
        low, high = bin_edges(i % HALF)
        if not count or high > reach * (1.0 + 1e-9):
            continue
        if i >= HALF:
            low, high = -high, -low
        first = int((low + reach) / width)
        for bar in range(first, min(bars, int((high + reach) / width) + 1)):
            left = bar * width - reach
            inside[bar] += count * max(0.0, min(high, left + width) - max(low, left)) / (high - low)
    edges = [i * width - reach for i in range(bars + 1)]
    return {pair: count for pair, count in zip(pairwise(edges), inside, strict=True) if count}


def _histogram_of(measured: Measurement) -> list[float]:
    """Return the histogram of D of tokens."""
    raw = measured.raw()
    return [raw[key] for key in HISTOGRAM]


def densities(dumps: Named, fitted: Sequence[bool]) -> list[Html]:
    """Draw the densities of train against rollout, as log-probs and then as probabilities.

    Args:
        dumps: One dump, or two.
        fitted: Whether a temperature was found in each, whose line is drawn.
    """
    several = len(dumps) > 1
    return [
        _density(f"{title}{f' of {name}' if several else ', train against rollout'}", title, measured, line)
        for title in ("log-probs", "probabilities")
        for (name, measured), line in zip(dumps, fitted, strict=True)
    ]


def _density(title: str, of: str, measured: Measurement, fitted: bool) -> Html:
    """Draw the density of train against rollout, over the part of the axes that has tokens."""
    logs = of == "log-probs"
    counts = (measured.density if logs else measured.probability_density).view(CELLS, CELLS)
    low, high = (LOWEST_LOGP, 0.0) if logs else (0.0, 1.0)
    step = (high - low) / CELLS
    if logs and counts.any():
        # Whole nats, so that ticks are round.
        first = min(int(each.nonzero()[0]) for each in (counts.sum(0), counts.sum(1)))
        first = min(first // NAT * NAT, CELLS - 2 * NAT)
        counts, low = counts[first:, first:], low + first * step
    chart = Chart(title, Axis("rollout", low, high), Axis("train", low, high), height=SQUARE)

    def says(row: int, column: int, side: int, count: int) -> list[str]:
        x, y = (low + i * step for i in (column, row))
        wide = side * step
        return [f"rollout {x:.3g} to {x + wide:.3g}", f"train {y:.3g} to {y + wide:.3g}", counted(count, "token")]

    chart.cells(counts.tolist(), says)
    chart.segment((low, low), (high, high), "mark")
    chart.legend.append(("thin", "equal"))
    if fitted and logs:
        intercept, slope = measured.evidence.sharpness.line()
        start, end = ((x, x + intercept + slope * x) for x in (low, UNLIKELY))
        chart.segment(start, end, "over")
        chart.legend.append(("over", f"fitted below a probability of 0.1: slope {1.0 + slope:.2f}"))
    return chart.svg()


def _said(label: str, rows: Sequence[tuple[str, Row]], unit: Unit) -> list[str]:
    """Say what lies in a bin: the bin, and D and count of each dump."""
    says = [f"{label} {rows[0][1].label}"]
    for name, row in rows:
        count = counted(row.count, unit[:-1])
        says += [f"{name}, {count}:"] if name else []
        says.append(f"mean D {row.logratio_mean:+.4g}, mean |D| {row.logratio_abs_mean:.4g}")
        says += [] if name else [f"{count}, largest |D| {row.logratio_abs_max:.4g}"]
    return says


def enough(rows: Sequence[Row], unit: Unit) -> Sequence[Row]:
    """Return the bins that have enough tokens or sequences for a mean; all, if none has enough."""
    return [row for row in rows if row.count >= FEWEST[unit]] or rows


def axis_chart(
    title: str,
    label: str,
    series: Sequence[tuple[str, Sequence[Row]]],
    unit: Unit,
    *,
    log: bool = False,
    named: bool = False,
    mark: tuple[float, str] | None = None,
) -> Html:
    """Draw mean |D| and mean D along an axis; a bin of few tokens is a thin outline, and stretches no axis.

    Args:
        title: Of the chart.
        label: Of the axis.
        series: Bins of each dump.
        unit: What they count.
        log: Make the axis logarithmic.
        named: The bins have names: mean D is a bar, and each bin has its label.
        mark: A place on the axis to mark, with its name.
    """
    rows = [row for _, some in series for row in some]
    index = {at: float(i) for i, at in enumerate(sorted({row.at for row in rows}))}
    # On a logarithmic axis the first position is 1.
    shift = 1.0 if log and min(row.at for row in rows) < 1.0 else 0.0

    def place(row: Row) -> float:
        return index[row.at] if named else row.at + shift

    means = [x for _, some in series for row in enough(some, unit) for x in (row.logratio_mean, row.logratio_abs_mean)]
    x, size = spanning(label, [row.at + shift for row in rows], log=log), (HEIGHT, BOTTOM)
    if named:
        labels = sorted({(index[row.at], row.label) for row in rows})
        x = Axis(label, -0.6, len(index) - 0.4, ticks=labels)
        if max(len(text) for _, text in labels) * LETTER > (WIDTH - LEFT - RIGHT) / len(labels):
            size = HEIGHT + TURNED - BOTTOM, TURNED
    chart = Chart(title, x, spanning("nats", means, zero=True), *size)
    if mark is not None:
        chart.vertical(mark[0] + shift, mark[1])
    several, width = len(series) > 1, 0.8 / len(series)
    over = " over" if named and not several else " thin" if named else ""
    said: dict[float, list[tuple[str, Row]]] = {}
    for i, (kind, (name, some)) in enumerate(zip(KINDS, series, strict=False)):
        many = enough(some, unit)
        few = [row for row in some if row not in many]
        if named:
            for part, painted in ((many, kind), (few, "few")):
                lefts = [(place(row) - 0.4 + i * width, row.logratio_mean) for row in part]
                chart.bars([(left, left + width, mean) for left, mean in lefts], painted)
        else:
            chart.line([(place(row), row.logratio_mean) for row in many], f"{kind} thin")
        chart.line([(place(row), row.logratio_abs_mean) for row in many], kind + over)
        for shown, painted in ((joined(many, MOST_SAYING), kind + over), (few, "few")):
            chart.points([(place(row), row.logratio_abs_mean) for row in shown], painted)
        # Of two dumps a color is the name, and the kind of a line what it shows.
        chart.legend.append((kind, name if several else "mean D" if named else "mean |D|"))
        for row in joined(some, MOST_SAYING):
            said.setdefault(place(row), []).append((name if several else "", row))
    thin = "thin" if several else "over" if named else "a thin"
    chart.legend.append((thin, "mean |D|" if named else "mean D"))
    if any(len(enough(some, unit)) < len(some) for _, some in series):
        chart.legend.append(("few", f"fewer than {FEWEST[unit]} {unit}"))
    chart.bands({at: _said(label.partition(" (")[0], here, unit) for at, here in said.items()})
    return chart.svg()

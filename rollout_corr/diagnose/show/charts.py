"""The charts of the pages; those of a report show one dump, or two for before and after."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from ...metrics.histogram import HISTOGRAM, HISTOGRAM_BINS, bin_edges
from ..measure.measurement import CELLS, LOWEST_LOGP, Measurement
from ..measure.profiles import Row
from ..what_if import Setting, SettingResult
from .content import Named
from .html import Html
from .svg import Axis, Chart, spanning

HALF = HISTOGRAM_BINS // 2
# Smaller |D| is one bin in the middle of the histogram, larger |D| one at each end.
SMALLEST, LARGEST = 2.0**-16, 32.0
# The ratio that the histograms mark, up and down.
RATIO = 2.0
# Most bars of a linear histogram. Its axis has the first share of the values, or ends at so many times the |D| that has
# the second one, so that a few values far out do not make one bar of all others.
MOST_BARS, SHOWN, MOST, TIMES = 61, 0.999, 0.9, 8.0
# A bin of fewer tokens, or sequences, is gray: its mean is chance.
FEW_TOKENS, FEW_SEQUENCES = 50, 5

# Lower bias and variance are drawn here, and axes reach to 1: differences below 0.1 % look as small as they are.
FLOOR = 1e-3

# CSS classes of the first and of the second dump.
KINDS = ("a", "b")


def _signed(d: float) -> float:
    """Return the place of D on an axis that is logarithmic to both sides: 1 is SMALLEST, 0 is 0."""
    if abs(d) <= SMALLEST:
        return d / SMALLEST
    return math.copysign(1.0 + math.log2(min(abs(d), LARGEST) / SMALLEST), d)


def _bars(counts: Sequence[float]) -> list[tuple[float, float, float, str]]:
    """Make bars (from, to, fraction, tooltip) of the signed histogram, two to an octave."""
    total = sum(counts) or 1.0
    found: dict[tuple[float, float], float] = {}
    for i, count in enumerate(counts):
        if not count:
            continue
        low, high = bin_edges(i % HALF)
        sign = -1.0 if i >= HALF else 1.0
        if high <= SMALLEST:
            key = (-1.0, 1.0)
        else:
            start = math.floor(2.0 * _signed(low) + 1e-9) / 2.0
            key = (start, start + 0.5) if sign > 0 else (-start - 0.5, -start)
        found[key] = found.get(key, 0.0) + count
    return [
        (low, high, count / total, f"{count:.0f} ({100 * count / total:.3g} %)")
        for (low, high), count in sorted(found.items())
    ]


def _of(name: str, several: bool) -> str:
    """Return what tells the dumps of a chart apart, if there are several."""
    return f", {name}" if several else ""


def _mark_ratio(chart: Chart, at: Callable[[float], float] = float) -> None:
    if at(math.log(RATIO)) < 0.1 * chart.x.high:
        # The two labels would touch.
        return
    chart.vertical(at(math.log(RATIO)), f"x{RATIO:g}")
    chart.vertical(at(-math.log(RATIO)), f"/{RATIO:g}")


def distributions(dumps: Named) -> list[Html]:
    """Draw the distributions of D of tokens, and of mean D of sequences, on linear axes."""
    return [_linear_chart(f"{title} of {unit}", unit, series) for title, unit, series in _series(dumps)]


def tails(dumps: Named) -> list[Html]:
    """Draw the same distributions with both axes logarithmic."""
    return [
        _logarithmic_chart(f"{title} of {unit}, all values", title, series) for title, unit, series in _series(dumps)
    ]


def _series(dumps: Named) -> list[tuple[str, str, list[tuple[str, list[float]]]]]:
    """Return title, unit and histograms by dump."""
    tokens = [(name, _histogram_of(measured)) for name, measured in dumps]
    sequences = [(name, measured.sequence_means.tolist()) for name, measured in dumps]
    return [("D = train - rollout", "tokens", tokens), ("mean D", "sequences", sequences)]


def _linear_chart(title: str, unit: str, series: Sequence[tuple[str, Sequence[float]]]) -> Html:
    """Draw the middle of distributions, and say how much of them lies further out."""
    reach = max(_reach(counts) for _, counts in series)
    bars = [(name, *_linear_bars(counts, reach, unit)) for name, counts in series]
    outside = max(share for *_, share in bars)
    label = "D, nats" + (f" ({100 * outside:.2g} % of the {unit} lie further out)" if outside > 5e-7 else "")
    heights = [height for _, some, _ in bars for *_, height, _ in some]
    top = spanning(f"% of the {unit}, per bar", heights, zero=True)
    chart = Chart(title, Axis(label, -reach, reach), top)
    _mark_ratio(chart)
    for kind, (name, some, _) in zip(("a", "b hollow"), bars, strict=False):
        chart.bars(some, kind, name if len(bars) > 1 else "")
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


def _linear_bars(
    counts: Sequence[float], reach: float, unit: str
) -> tuple[list[tuple[float, float, float, str]], float]:
    """Make bars (from, to, percent, tooltip) of equal widths, and the share of the values beyond them.

    A bin of the histogram is spread evenly over the bars that it touches.
    """
    total = sum(counts) or 1.0
    # With few values, narrow bars would show chance. An odd number has one in the middle.
    count_of_bars = min(MOST_BARS, 2 * round(math.sqrt(total)) + 1)
    width = 2.0 * reach / count_of_bars
    inside = [0.0] * count_of_bars
    for i, count in enumerate(counts):
        low, high = bin_edges(i % HALF)
        if not count or high > reach * (1.0 + 1e-9):
            continue
        if i >= HALF:
            low, high = -high, -low
        first = int((low + reach) / width)
        for bar in range(first, min(count_of_bars, int((high + reach) / width) + 1)):
            left = bar * width - reach
            inside[bar] += count * max(0.0, min(high, left + width) - max(low, left)) / (high - low)
    bars = []
    for i, count in enumerate(inside):
        if count:
            left, percent = i * width - reach, 100.0 * count / total
            says = f"{left:.3g} to {left + width:.3g}: {percent:.3g} % of the {unit}"
            bars.append((left, left + width, percent, says))
    return bars, max(0.0, 1.0 - sum(inside) / total)


def _logarithmic_chart(title: str, label: str, series: Sequence[tuple[str, Sequence[float]]]) -> Html:
    bars = [(name, _bars(counts)) for name, counts in series]
    values = [value for _, some in bars for *_, value, _ in some]
    ticks = [(_signed(d), f"{d:g}") for d in (-10.0, -1.0, -0.1, -1e-3, 0.0, 1e-3, 0.1, 1.0, 10.0)]
    reach = _signed(LARGEST)
    x = Axis(f"{label}, nats (logarithmic to both sides)", -reach, reach, ticks=ticks)
    chart = Chart(title, x, spanning("fraction", values, log=True))
    _mark_ratio(chart, _signed)
    for kind, (name, some) in zip(("a", "b hollow"), bars, strict=False):
        chart.bars(some, kind, name if len(bars) > 1 else "")
    return chart.svg()


def _histogram_of(measured: Measurement) -> list[float]:
    """Return the histogram of D of tokens."""
    raw = measured.raw()
    return [raw[key] for key in HISTOGRAM]


def densities(dumps: Named) -> list[Html]:
    """Draw the densities of train against rollout, as log-probs and as probabilities."""
    charts = []
    for name, measured in dumps:
        of = f": {name}" if len(dumps) > 1 else ""
        charts.append(_density(f"log-probs{of}", measured.density, LOWEST_LOGP, 0.0))
        charts.append(_density(f"probabilities{of}", measured.probability_density, 0.0, 1.0))
    return charts


def _density(title: str, counts: Tensor, low: float, high: float) -> Html:
    chart = Chart(title, Axis("rollout", low, high), Axis("train", low, high))
    step = (high - low) / CELLS

    def says(row: int, column: int, count: int) -> str:
        return f"rollout {low + column * step:.3g}, train {low + row * step:.3g}: {count} tokens"

    chart.cells(counts.view(CELLS, CELLS).tolist(), says)
    chart.diagonal()
    return chart.svg()


def _rows_of(series: Sequence[tuple[str, Sequence[Row]]]) -> list[Row]:
    return [row for _, rows in series for row in rows]


def _parted(rows: Sequence[Row], unit: str) -> tuple[list[Row], list[Row]]:
    """Return the rows that have enough tokens or sequences, and the others; all, if none has enough."""
    least = FEW_SEQUENCES if unit == "sequences" else FEW_TOKENS
    many = [row for row in rows if row.count >= least]
    return (many, [row for row in rows if row.count < least]) if many else (list(rows), [])


def _nats(rows: Sequence[Row]) -> Axis:
    """Make an axis on which mean D and mean |D| of the rows fit."""
    return spanning("nats", [value for row in rows for value in (row.logratio_abs_mean, row.logratio_mean)], zero=True)


def _few(unit: str) -> tuple[str, str]:
    """Return the entry of the legend for small bins."""
    least = FEW_SEQUENCES if unit == "sequences" else FEW_TOKENS
    return "few", f"fewer than {least} {unit}"


def axis_chart(title: str, label: str, series: Sequence[tuple[str, Sequence[Row]]], log: bool, unit: str) -> Html:
    """Draw mean |D| and mean D along an axis whose bins are numbers; a small bin is a gray dot beside the line."""
    rows = _rows_of(series)
    # On a logarithmic axis the first position is 1.
    shift = 1.0 if log and min(row.at for row in rows) < 1.0 else 0.0
    parted = [(name, *_parted(some, unit)) for name, some in series]
    x = spanning(label, [row.at + shift for row in rows], log=log)
    chart = Chart(title, x, _nats([row for _, many, _ in parted for row in many]))
    for kind, (name, many, few) in zip(KINDS, parted, strict=False):
        of = _of(name, len(series) > 1)
        for row in few:
            says = f"{label} {row.label}: mean |D| {row.logratio_abs_mean:.4g}, {row.count} {unit}"
            chart.dot(row.at + shift, row.logratio_abs_mean, "few", says)
        chart.line([(row.at + shift, row.logratio_abs_mean) for row in many], kind, f"mean |D|{of}")
        chart.line([(row.at + shift, row.logratio_mean) for row in many], f"{kind} thin", f"mean D{of}")
    if any(few for *_, few in parted):
        chart.legend.append(_few(unit))
    return chart.svg()


def category_chart(title: str, label: str, series: Sequence[tuple[str, Sequence[Row]]], unit: str) -> Html:
    """Draw mean |D| and mean D along an axis whose bins have names; a small bin is a gray bar."""
    rows = _rows_of(series)
    places = sorted({(row.at, row.label) for row in rows})
    index = {place: i for i, place in enumerate(places)}
    step = max(1, -(-len(places) // 5))
    ticks = [(float(i), text) for i, (_, text) in enumerate(places) if i % step == 0]
    parted = [(name, *_parted(some, unit)) for name, some in series]
    x = Axis(label, -0.6, len(places) - 0.4, ticks=ticks)
    chart = Chart(title, x, _nats([row for _, many, _ in parted for row in many]))
    width = 0.8 / len(series)
    for i, (kind, (name, many, few)) in enumerate(zip(KINDS, parted, strict=False)):
        of = _of(name, len(series) > 1)
        for some, painted, called in ((many, kind, f"mean |D|{of}"), (few, "few", "")):
            bars = []
            for row in some:
                left = index[row.at, row.label] - 0.4 + i * width
                says = f"{row.label}: mean |D| {row.logratio_abs_mean:.4g}, {row.count} {unit}"
                bars.append((left, left + width, row.logratio_abs_mean, says))
            chart.bars(bars, painted, called)
        chart.line([(index[row.at, row.label], row.logratio_mean) for row in many], f"{kind} thin", f"mean D{of}")
    if any(few for *_, few in parted):
        chart.legend.append(_few(unit))
    return chart.svg()


def kept(dumps: Named) -> Html:
    """Draw how much a bound on the ratio keeps: tokens by their own, sequences by their geometric mean."""
    x = Axis("largest |log ratio| that is kept, nats", SMALLEST, LARGEST, log=True)
    chart = Chart("kept within a bound of the ratio", x, Axis("fraction", 0.0, 1.0))
    for kind, (name, measured) in zip(KINDS, dumps, strict=False):
        of = _of(name, len(dumps) > 1)
        chart.line(_below(_histogram_of(measured)), kind, f"tokens{of}", dots=False)
        chart.line(_below(measured.sequence_means.tolist()), f"{kind} thin", f"sequences{of}", dots=False)
    for bound, text in ((1e-3, "1.001"), (1e-2, "1.01"), (0.1, "1.1"), (math.log(2.0), "2")):
        chart.vertical(bound, text)
    return chart.svg()


def _below(counts: Sequence[float]) -> list[tuple[float, float]]:
    """Return (bound, fraction of values within it) at the edges of a histogram."""
    total, seen, points = sum(counts), 0.0, []
    if not total:
        return []
    for i in range(HALF):
        seen += counts[i] + counts[i + HALF]
        upper = bin_edges(i)[1]
        if SMALLEST <= upper <= LARGEST:
            points.append((upper, seen / total))
    return points


def trade_off(outcomes: Sequence[tuple[Setting, SettingResult]], best: Sequence[str]) -> Html:
    """Draw bias against variance of every setting; those of `best` are large, and numbered in its order from 1."""
    # A logarithmic axis has no 0.
    finite = [
        (setting, outcome, max(outcome.bias, FLOOR), max(outcome.variance, FLOOR))
        for setting, outcome in outcomes
        if math.isfinite(outcome.variance) and math.isfinite(outcome.bias)
    ]
    ends = [FLOOR, 1.0]
    cut = any(outcome.bias < FLOOR or outcome.variance < FLOOR for _, outcome, *_ in finite)
    chart = Chart(
        "each setting: lower and further left is better",
        spanning(f"bias{f' (less is drawn at {FLOOR:g})' if cut else ''}", ends + [x for *_, x, _ in finite], log=True),
        spanning("variance", ends + [y for *_, y in finite], log=True),
    )
    places: dict[str, tuple[float, float]] = {}
    for setting, outcome, bias, variance in sorted(finite, key=lambda one: one[0].name in best):
        interval = f"{outcome.bias_low:.2g} to {outcome.bias_high:.2g}"
        numbers = f"bias {outcome.bias:.3g} ({interval}), variance {outcome.variance:.3g}, ESS {outcome.ess:.3g}"
        says = f"{setting.name}: {numbers}"
        chart.dot(bias, variance, "b" if setting.family else "a", says, 4.5 if setting.name in best else 2.4)
        places[setting.name] = bias, variance
    chart.numbers([places[name] for name in best])
    unusable = len(outcomes) - len(finite)
    chart.legend += [("a dot", "specs"), ("b dot", "grid")]
    if unusable:
        chart.legend.append(("none", f"{unusable} that reject everything are left out"))
    return chart.svg()


def thresholds(outcomes: Sequence[tuple[Setting, SettingResult]]) -> list[Html]:
    """Draw kept tokens and effective sample size along every family of the grid."""
    families: dict[str, list[tuple[float, SettingResult]]] = {}
    for setting, outcome in outcomes:
        if setting.family:
            families.setdefault(setting.family, []).append((setting.threshold, outcome))
    charts = []
    for family, points in families.items():
        # A veto has a small lower bound; the others have upper bounds above 1, whose distance to 1 is drawn.
        above = 0.0 if family == "veto" else 1.0
        label = "lowest ratio that is kept" if family == "veto" else "upper bound of the ratio"
        places = [at - above for at, _ in points]
        ticks = [(place, f"{at:g}") for place, (at, _) in zip(places, points, strict=True)]
        x = replace(spanning(label, places, log=True), ticks=ticks)
        chart = Chart(family, x, Axis("fraction", 0.0, 1.05))
        chart.line([(at - above, outcome.tokens_kept) for at, outcome in points], "a", "tokens kept")
        chart.line([(at - above, outcome.ess) for at, outcome in points], "b", "ESS")
        charts.append(chart.svg())
    return charts

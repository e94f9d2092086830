"""The pages: well-formed, loading nothing, all shapes inside their chart, all text of a dump escaped."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path

import pytest
import torch

import rollout_corr as rc
from builders import chromium, planted_dumps
from builders.parsed_page import Page
from rollout_corr.cli.main import main
from rollout_corr.diagnose.measure.profiles import Row
from rollout_corr.diagnose.show import charts
from rollout_corr.diagnose.show.page import TILES
from rollout_corr.diagnose.show.svg import BOTTOM, LEFT, RIGHT, TOP, Axis, Chart, spanning
from rollout_corr.metrics.histogram import histogram

SECTIONS = {
    "Train against rollout": "figure",
    "Where it differs": "figure",
    "Worst records": "div",
    "Distribution of D": "figure",
    "Importance weights": "table",
    "All numbers": "table",
}
ELSEWHERE = re.compile(r"https?://|//[a-z]|url\(|@import|javascript:", re.IGNORECASE)


def checked(text):
    """Parse a page and check what holds for every page."""
    page = Page(text)
    assert page.wrong == []
    for _, attributes, _ in page.elements:
        assert not any(ELSEWHERE.search(value or "") for value in attributes.values()), attributes
    assert not any(ELSEWHERE.search(text) for text in page.said("style"))
    box = None
    for tag, attributes, above in page.elements:
        if tag == "svg":
            box = [float(x) for x in attributes["viewbox"].split()]
            assert attributes["aria-label"]
        if "svg" not in above:
            continue
        for name in ("x", "cx", "x1", "x2"):
            if name in attributes:
                assert 0 <= float(attributes[name]) <= box[2], (tag, attributes)
        for name in ("y", "cy", "y1", "y2"):
            if name in attributes:
                assert 0 <= float(attributes[name]) <= box[3], (tag, attributes)
        if tag == "polyline":
            for x, y in (pair.split(",") for pair in attributes["points"].split()):
                assert LEFT <= float(x) <= box[2] - RIGHT and TOP <= float(y) <= box[3] - BOTTOM
        for name in ("width", "height", "r"):
            assert float(attributes.get(name, 0)) >= 0, (tag, attributes)
    assert "nan" not in " ".join(page.said("text")).split()
    return page


@functools.cache
def report(*paths, by=()):
    return rc.Report(tuple(rc.doctor(path, by=by) for path in paths)).html()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write dumps that together have every axis and every severity."""
    path = tmp_path_factory.mktemp("dumps")
    turns = planted_dumps.retokenized(0, 2)
    n = turns["mask"].numel()
    more = {"versions": torch.arange(n) % 3, "entropy": torch.rand(n), "steps": torch.arange(n) // 1000}
    torch.save(turns | more, path / "turns.pt")
    torch.save(planted_dumps.over_steps(0, lambda step: 0.02 + 0.01 * step, steps=40), path / "steps.pt")
    torch.save(planted_dumps.renormalized(0, top_p=0.8), path / "truncated.pt")
    torch.save(planted_dumps.temperature(0, 0.7, 0.7, 1.0), path / "hot.pt")
    healthy = planted_dumps.Model(0).healthy()
    torch.save(healthy, path / "healthy.pt")
    healthy["train_logp"] = healthy["train_logp"].clone()
    healthy["train_logp"][100:103] -= 9.0
    torch.save(healthy, path / "spiked.pt")
    torch.save(planted_dumps.broken(0, rows=1.0), path / "broken.pt")
    torch.save(planted_dumps.copied(0), path / "copied.pt")
    torch.save(planted_dumps.filled(0, -9999.0), path / "filled.pt")
    one = {"train_logp": torch.tensor([-1.0]), "rollout_logp": torch.tensor([-1.25]), "lengths": torch.tensor([1])}
    torch.save(one, path / "one.pt")
    return path


def of_class(page, name):
    """Return the attributes of the elements of a class."""
    return [attributes for _, attributes, _ in page.elements if name in attributes.get("class", "").split()]


def opened(page):
    """Return the headings of the sections that are open, in their order."""
    heads = [head for head in page.said("h2") if head in SECTIONS]
    tops = [
        "open" in attributes for tag, attributes, above in page.elements if tag == "details" and "details" not in above
    ]
    return [head for head, shown in zip(heads, tops, strict=False) if shown]


POLICIES, PLACES, RECORDS, DISTRIBUTION = list(SECTIONS)[:4]
# The sections that a page lacks, the captions that it begins with, the sections that are open, and the states of its
# five numbers but watch and alarm.
HEALTHY, BLIND, NONE = "healthy", "blind", "none"
PAGES = {
    "turns": ((), ["by turn", "by position in the sequence"], [], {BLIND}),
    "steps": ((), ["by step"], [], {BLIND}),
    "truncated": ((), ["log-probs, train against rollout", "by rollout probability"], [POLICIES], {BLIND}),
    "spiked": ((), [], [RECORDS], {BLIND}),
    "healthy": ((), [], [POLICIES, PLACES, DISTRIBUTION], {HEALTHY}),
    "broken": ((PLACES, RECORDS), [], [POLICIES], {NONE}),
    "copied": ((RECORDS,), ["log-probs, train against rollout"], [POLICIES], {BLIND}),
    "filled": ((), ["log-probs, train against rollout"], [POLICIES], {BLIND}),
    "one": ((PLACES,), ["log-probs, train against rollout"], [POLICIES], {BLIND}),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_begins_with_the_finding_and_its_pictures(name, folder):
    """Its card holds its pictures, its sections are open and the first, and everything else is folded.

    A number that lies in its healthy range has not seen the finding: none is green next to one.
    """
    absent, pictures, shown, states = PAGES[name]
    page = checked(report(folder / f"{name}.pt"))
    assert sorted(page.said("h2")) == sorted(set(SECTIONS) - set(absent))
    assert opened(page) == shown and page.said("h2")[: len(shown)] == shown
    captions = page.said("figcaption")
    assert captions[: len(pictures)] == pictures
    assert ("found" in of_class(page, "card")[0]["class"].split()) == (len(pictures) == 1)
    tiles = [tile["class"].split()[1] for tile in of_class(page, "tile")]
    assert [key for key in page.said("code") if key in TILES] == list(TILES) and len(tiles) == 5
    assert {*tiles} - {"watch", "alarm"} == states, tiles
    assert page.said("span").count("cannot see this") == tiles.count(BLIND)
    # The range does not come from what is broken.
    for room in (re.fullmatch(r"healthy: (0.*) to (1.*)", said) for said in page.said("span") if " to 1." in said):
        assert 0.9 < float(room[1]) < 1.0 < float(room[2]) < 1.1
    # Where the numbers come from.
    strip = " ".join(page.said("span"))
    assert f"{name}.pt" in strip and f"rollout-corr {rc.__version__}, torch {torch.__version__}" in strip
    assert f"rollout-corr report {folder / name}.pt" in strip and re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", strip)


def test_a_report_has_a_chart_for_every_axis(folder):
    page = checked(report(folder / "turns.pt", by=("entropy",)))
    # Those of the finding are the first, and stand in its card.
    wanted = ["by turn", "by position", "log-probs", "probabilities", "by rollout probability", "by sequence length"]
    wanted += ["by weight version", "by step", "by entropy", "D of tokens", "mean D of sequences"]
    for caption, start in zip(page.said("figcaption"), wanted, strict=True):
        assert caption.startswith(start)
    assert any("turns begin with other tokens" in text for text in page.said("b"))


def test_the_fitted_line_of_a_temperature_is_drawn():
    """From the left edge of the log-probs to a probability of 0.1, with the slope that the estimate has."""
    for engine, lines in ((0.7, 1), (1.0, 0)):
        columns = planted_dumps.temperature(0, engine, engine, 1.0)
        page = rc.report(columns["train_logp"], columns["rollout_logp"], cu_seqlens=columns["cu_seqlens"]).html()
        assert page.count("fitted below a probability of 0.1: slope 0.7") == lines
    chart = Chart("", Axis("", -4.0, 0.0), Axis("", -2.0, 0.0))
    chart.segment((-4.0, -4.0), (0.0, 0.0), "over")
    ends = f"{chart.px(-2.0):.1f},{chart.py(-2.0):.1f} {chart.px(0.0):.1f},{chart.py(0.0):.1f}"
    assert f'points="{ends}"' in str(chart.parts[-1])


def test_every_place_says_series_x_y_and_count(folder):
    """Nothing needs the browser's own titles, which come late, and on a phone never."""
    page = checked(report(folder / "hot.pt"))
    assert [tag for tag, _, above in page.elements if tag == "title" and "svg" in above] == []
    says = page.said("text")
    for wanted in (
        r"position in the sequence 26 - 30",
        r"rollout probability 0\.99 - 0\.999",
        r"mean D [+-][\d.e-]+, mean \|D\| [\d.e-]+",
        r"[\d,]+ tokens, largest \|D\| [\d.]+",
        r"rollout -[\d.]+ to -[\d.]+",
        r"D -?[\d.e-]+ to [\d.e-]+",
        r"[\d.]+ %, [\d,]+ tokens?",
    ):
        assert any(re.fullmatch(wanted, text) for text in says), wanted
    # The tokens of one axis are all tokens, whatever the number of bins.
    counts = [
        int(m[1].replace(",", "")) for m in (re.fullmatch(r"([\d,]+) tokens?, largest .*", text) for text in says) if m
    ]
    tokens = int(rc.doctor(folder / "hot.pt").metrics()["tokens"])
    assert sum(counts) == 2 * tokens


def test_two_dumps_side_by_side(folder):
    page = checked(report(folder / "healthy.pt", folder / "truncated.pt"))
    assert {"healthy.pt", "truncated.pt", "change"} <= set(page.said("th"))
    kinds = {
        value
        for _, attributes, above in page.elements
        if "svg" in above
        for value in attributes.get("class", "").split()
    }
    assert {"a", "b"} <= kinds
    texts = " ".join(" ".join(page.said("div", "b")).split())
    assert "healthy : no known" in texts and "error: the rollout log-probs are of a truncated" in texts
    assert page.said("h2")[:3] == ["healthy.pt", "truncated.pt", "Train against rollout"]
    assert opened(page)[0] == "Train against rollout"
    # Findings and records stand in columns.
    assert len(of_class(page, "columns")) == 2
    assert len(of_class(page, "tile")) == 5


def bars_of(counts):
    """Return (from, to, percent) of the bars of a linear chart, and the share further out."""
    reach = charts._reach(counts)
    total = sum(counts)
    found = charts._linear_bars(counts, reach, charts.MOST_BARS)
    bars = [(low, high, 100.0 * count / total) for (low, high), count in found.items()]
    return reach, bars, 1.0 - sum(found.values()) / total


def test_linear_bars_show_a_bell_as_a_bell():
    """One hump, and every bar is the share of the values between its edges."""
    d = 0.1 * torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    reach, bars, outside = bars_of(histogram(d, None).tolist())
    assert len(bars) == charts.MOST_BARS and outside == pytest.approx(float((d.abs() >= reach).double().mean()))
    assert 0.0 < outside < 1.0 - charts.SHOWN
    for low, high, percent in bars:
        # A bin of the histogram is up to an eighth wide, within which the bell falls.
        exact = 100.0 * float(((d >= low) & (d < high)).double().mean())
        assert percent == pytest.approx(exact, abs=0.25), (low, high)
    middle = len(bars) // 2
    heights = [percent for *_, percent in bars]
    rising = heights[:middle:4]
    assert rising == sorted(rising) and max(heights) < 1.2 * heights[middle]


def test_a_bin_of_few_tokens_is_an_outline_and_does_not_stretch_the_axis():
    """Its dot is drawn where it lies within the frame."""
    rows = [Row(str(i), float(i), 2 if i == 3 else 500, 0.01, 90.0 if i == 3 else 0.01, 0.0, 1.0) for i in range(8)]
    for named in (False, True):
        page = Page(charts.axis_chart("t", "turn", [("", rows)], "tokens", named=named).source)
        assert [one["class"] for one in of_class(page, "few")] == ["key few", *["bar few"] * named]
        axis = [float(text) for text in page.said("text") if re.fullmatch(r"[\d.]+", text)]
        assert max(axis) < 8 and "fewer than 50 tokens" in page.said("span")


def test_bars_have_the_sign_of_mean_d():
    means = [0.5, -0.2, 3.75, 0.1]
    rows = [Row(f"bin {i}", float(i), 20 if i == 2 else 900, mean, abs(mean), 0.0, 5.0) for i, mean in enumerate(means)]
    page = Page(charts.axis_chart("t", "version", [("", rows)], "tokens", named=True).source)
    (zero,) = (float(line["y1"]) for line in of_class(page, "zero"))
    sides = [float(bar["y"]) + float(bar["height"]) / 2.0 < zero for bar in of_class(page, "bar")]
    # The bins of enough tokens come first.
    assert sides == [True, False, True, True]
    assert {f"bin {i}" for i in range(4)} <= set(page.said("text"))


def test_the_worst_records_come_with_their_tokens(tmp_path):
    """One record of many carries nearly all of k3: it is the first, with its share and its worst tokens."""
    made = planted_dumps.Model(0).healthy()
    start = int(made["cu_seqlens"][7])
    made["train_logp"][start + 3 : start + 7] -= torch.tensor([8.0, 11.0, 9.0, 10.0])
    torch.save(made, tmp_path / "x.pt")
    source = report(tmp_path / "x.pt")
    page = checked(source)
    bold = page.said("b")
    first = bold.index("record 7")
    assert [text.startswith("record ") for text in bold[first : first + 5]] == [True] * 5
    # Two of them, and a fold.
    assert "3 more records" in page.said("summary")
    assert source.count('class="record"') == 5
    spans = page.said("span")
    about = spans.index(next(text for text in spans if " % of k3, " in text))
    assert float(spans[about].partition(" %")[0]) > 90.0 and "largest |D| 10.9" in spans[about]
    # Three of its four broken tokens, the worst first, each with its ids.
    where = [text for text in spans if text.startswith("token ")]
    assert [text.partition(":")[0] for text in where[:3]] == ["token 4", "token 6", "token 5"]
    assert str(int(made["token_ids"][start + 4])) in spans


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_page_is_written_where_it_is_asked_for(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = str(folder / "healthy.pt")
    assert main(["report", path]) == 0
    assert "page: healthy.pt.report.html" in capsys.readouterr().out
    checked((tmp_path / "healthy.pt.report.html").read_text(encoding="utf-8"))
    assert main(["report", path, "--page", "x.html", "--compare", str(folder / "truncated.pt")]) == 0
    assert "truncated.pt" in (tmp_path / "x.html").read_text(encoding="utf-8")
    written = sorted(tmp_path.iterdir())
    assert main(["report", path, "--no-page"]) == 0
    assert main(["report", path, "--json"]) == 0
    assert sorted(tmp_path.iterdir()) == written
    assert main(["report", path, "--json", "--page", "y.html"]) == 0
    assert (tmp_path / "y.html").exists()
    capsys.readouterr()
    assert main(["report", path, "--page", "no/where.html"]) == 2
    assert "page no/where.html: cannot be written" in capsys.readouterr().err


def test_pictures_show_the_pages_of_today(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures = Path(__file__).parents[2] / "docs" / "pictures"
    pages = chromium.write_pages()
    made_of = json.loads((pictures / chromium.DIGESTS).read_text(encoding="utf-8"))
    again = "take them again: PYTHONPATH=tests:. python -m builders.chromium docs/pictures"
    assert made_of == {name: chromium.digest(page) for name, page in pages.items()}, again
    assert sorted(path.stem for path in pictures.glob("*.png")) == sorted(chromium.PICTURES)


# --- axes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "log"),
    [
        (0.0, 1.0, False),
        (-3.0, 17.0, False),
        (1e-7, 3e-7, False),
        (0.9, 1.1, True),
        (1e-6, 10.0, True),
        (3.0, 4.0, True),
    ],
)
def test_ticks_are_round_and_inside(low, high, log):
    axis = Axis("x", low, high, log=log)
    marks = axis.marks()
    assert 1 <= len(marks) <= 12
    for value, text in marks:
        assert low - 1e-9 * abs(low) <= value <= high * (1 + 1e-9) and len(text) <= 7
        assert float(text) == pytest.approx(value, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("values", [[], [0.0], [3.0, 3.0], [math.nan, 1.0], [-1.0, math.inf], [1e-300, 1e300]])
@pytest.mark.parametrize("log", [False, True])
def test_any_values_have_an_axis(values, log):
    axis = spanning("x", values, log=log)
    assert math.isfinite(axis.low) and math.isfinite(axis.high) and axis.low < axis.high
    for value in values:
        if math.isfinite(value):
            assert 0.0 <= axis.at(value) <= 1.0

"""The pages: well-formed, loading nothing, all shapes inside their chart, all text of a dump escaped."""

from __future__ import annotations

import math
import re

import pytest
import torch

import rollout_corr as rc
from attack.pages import Page
from builders import planted_dumps
from rollout_corr.cli.main import main
from rollout_corr.diagnose.best_settings import best_settings
from rollout_corr.diagnose.measure.profiles import Row
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.show import charts
from rollout_corr.diagnose.show.content import TILES
from rollout_corr.diagnose.show.svg import BOTTOM, LEFT, RIGHT, TOP, Axis, spanning
from rollout_corr.diagnose.show.what_if_page import what_if_page
from rollout_corr.diagnose.what_if import pareto, try_all
from rollout_corr.metrics.histogram import histogram

pytestmark = pytest.mark.usefixtures("one_thread")

SECTIONS = ["Distribution of D", "Train against rollout", "Where it differs", "Weights and rejection", "More"]
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
    torch.save(planted_dumps.Model(0).healthy(), path / "healthy.pt")
    torch.save(planted_dumps.broken(0, rows=1.0), path / "broken.pt")
    torch.save(planted_dumps.copied(0), path / "copied.pt")
    torch.save(planted_dumps.filled(0, -9999.0), path / "filled.pt")
    one = {"train_logp": torch.tensor([-1.0]), "rollout_logp": torch.tensor([-1.25]), "lengths": torch.tensor([1])}
    torch.save(one, path / "one.pt")
    return path


@pytest.mark.parametrize("name", ["turns", "steps", "truncated", "healthy", "broken", "copied", "filled", "one"])
def test_every_report_is_a_whole_page(name, folder):
    page = checked(report(folder / f"{name}.pt", by=("entropy",) if name == "turns" else ()))
    heads = page.said("h2")
    wanted = [head for head in SECTIONS if head != "Where it differs" or name not in ("broken", "one")]
    assert [head for head in heads if head != "Worst records"] == wanted
    assert ("Worst records" in heads) == (name not in ("broken", "copied"))
    tiles = [attributes for _, attributes, _ in page.elements if "tile" in attributes.get("class", "").split()]
    assert [tile["title"] for tile in tiles] == list(TILES)
    assert f"{name}.pt" in page.said("p")[0]


def test_a_report_has_a_chart_for_every_axis(folder):
    page = checked(report(folder / "turns.pt", by=("entropy",)))
    captions = page.said("figcaption")
    wanted = ["D = train", "mean D of sequences", "log-probs", "probabilities", "by position", "by rollout probability"]
    wanted += ["by sequence length", "by turn", "by weight version", "by step", "by entropy", "kept within"]
    wanted += ["D = train", "mean D of sequences"]
    assert len(captions) == len(wanted)
    for caption, start in zip(captions, wanted, strict=True):
        assert caption.startswith(start)
    assert any("turns begin with other tokens" in text for text in page.said("b"))


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
    heads = page.said("h2")
    assert heads[:3] == ["healthy.pt", "truncated.pt", "Distribution of D"]
    assert {"Worst records: healthy.pt", "Worst records: truncated.pt"} <= set(heads)


def bars_of(counts):
    """Return (from, to, percent) of the bars of a linear chart, and the share further out."""
    reach = charts._reach(counts)
    bars, outside = charts._linear_bars(counts, reach, "tokens")
    return reach, [bar[:3] for bar in bars], outside


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


def test_a_bin_of_few_tokens_is_gray_and_does_not_stretch_the_axis():
    rows = [Row(str(i), float(i), 2 if i == 3 else 500, 0.0, 90.0 if i == 3 else 0.01, 0.0, 1.0, 0.0) for i in range(8)]
    for figure in (
        charts.axis_chart("t", "turn", [("", rows)], log=False, unit="tokens"),
        charts.category_chart("t", "version", [("", rows)], "tokens"),
    ):
        page = Page(figure.source)
        kinds = [attributes.get("class", "").split() for _, attributes, _ in page.elements]
        assert sum(kind[1:] == ["few"] for kind in kinds) == 2  # the bin, and its key
        assert "90" not in page.said("text") and "fewer than 50 tokens" in page.said("span")


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
    assert source.count('class="record"') == 5
    spans = page.said("span")
    about = spans.index(next(text for text in spans if " % of k3, " in text))
    assert float(spans[about].partition(" %")[0]) > 90.0 and "largest |D| 10.9" in spans[about]
    # Three of its four broken tokens, the worst first, each with its ids.
    where = [text for text in spans if text.startswith("token ")]
    assert [text.partition(":")[0] for text in where[:3]] == ["token 4", "token 6", "token 5"]
    assert str(int(made["token_ids"][start + 4])) in spans


def test_the_page_of_what_if(folder):
    dump = Dump(folder / "turns.pt")
    tried = try_all(dump)
    page = checked(what_if_page(dump, tried))
    cells = page.said("td")
    for setting in tried.settings:
        assert " = ".join([setting.name, *setting.same]) in cells
    assert set(tried.left_out) <= set(cells)
    families = {setting.family for setting in tried.settings if setting.family}
    assert families <= set(page.said("figcaption"))
    # The best ones come first, then the Pareto-optimal ones by their numbers in the chart; all others are folded.
    outcomes = tried.outcomes()
    first = [one.setting.name for one in best_settings(outcomes, tried.sequences)]
    assert len(first) > 1 and [text for text in page.said("b") if text in first] == first
    best = pareto(outcomes)
    at = cells.index("1")
    assert [cells[at + 6 * i + 1] for i in range(len(best))] == best
    assert page.said("h2") == ["Settings on broken data", "Bounds for these sequences", "Bias and variance", "The rest"]
    folded = [tag for tag, _, above in page.elements if tag in ("figure", "table") and "details" in above]
    assert folded == ["figure"] * len(families) + ["table"] * 2
    numbers = [text for i in (text.split("-") for text in page.said("text")) for text in i if text.isdigit()]
    assert "1" in numbers and str(len(best)) in numbers


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

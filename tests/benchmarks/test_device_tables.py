"""Tables and pictures of the device benchmark, from a run whose answers are easy."""

from __future__ import annotations

import pytest

from builders.benchmark_folder import load, results_of

pytestmark = pytest.mark.usefixtures("benchmarks")


# --- tables ---


def text_of(results):
    return "\n".join(load("tables").markdown(load("gpu_tables").all_tables(results)))


def test_tables():
    page = text_of(results_of())
    ours = "| 16M | token weights, rejection | 0.0100 | - | 0.0100 | 0.100 | 4 | 0 | 1 | 1.0 | 1400 | 70% |"
    assert ours in page
    assert "| 16M | token weights, rejection | 5.0 x | 25.0 x |" in page
    assert "| 16M | token weights, rejection | 4.0 x | 8.0 x |" in page
    assert "0.0800 (0.0400-0.160) e |" in page and "0.0400 (0.0200-0.0800) |" in page
    assert "| 16M | token weights, rejection | torch by hand | 3 | 1 | 0 | 0 | 0.500 |" in page
    assert "| 16M | token weights, rejection | read_kernel | 2 | 10.0 |" in page
    assert "| 16M | token weights, rejection | 1.0 | 1.0 | 1.0 |" in page
    assert (
        "| 16M | token weights, rejection | packed | float32 | bool | 900,000 | 1,000,000 | 10 | 14 | 14.00 |" in page
    )
    assert "| tokens | 16M | 1,000,000 | 10 | 0.0100 | - | 1400 | 70% | 8.0 x |" in page
    assert load("gpu_tables").notes(results_of()) == [
        "16M, token weights, rejection: verl absent: it has no packed form"
    ]


def test_every_cell_has_a_heading():
    """A terminal without rich, and Markdown, show a row as long as its head."""
    tables, names = load("tables"), load("gpu_tables")
    made = names.all_tables(results_of())
    assert len(made) == 12
    for table in made:
        assert {len(row) for row in table.rows} == {len(table.head)}, table.title
    assert "of a copy" in tables._plain(names.our_table(results_of()))


def test_beside_a_compiler():
    page = text_of(results_of())
    assert "| 16M | token weights, rejection | 7.00 | 0.0400 | 0.0100 | 4.0 x | 0.0400 | 0.0100 | 4.0 x |" in page


def test_the_head_of_a_table():
    results = results_of()
    assert load("gpu_tables").facts(results) == [
        "2026-01-01, commit cccccccccccc with uncommitted changes; Python 3.12.3, torch 2.11.0, Triton 3.6.0.",
        "a GPU, 132 multiprocessors, L2 50 MiB, memory 80 GiB, driver 580.1, CUDA 13.0; 16 cores of a processor.",
    ]


def test_promises():
    page = text_of(results_of())
    assert "| 16M | token weights, rejection | >= 90 % of the copy bandwidth | 0.7 | no |" in page
    assert "| extra memory <= 2 % of inputs and outputs | 0.0749 | no |" in page
    small = text_of(results_of("32k in 256"))
    assert "| GPU time <= 20 us | 10 | yes |" in small
    assert "| >= 20 x the fastest peer, whole calls | 25 | yes |" in small
    assert "| >= 3 x torch.compile of our reference, no metrics | 4 | yes |" in small
    another = results_of("32k in 256")
    rows = another["measured"][0]["rows"]
    rows.append({**rows[2], "name": load("device_contender").XTUNER, "wall_ms": rows[1]["wall_ms"]})
    assert "| >= 20 x the fastest peer, whole calls | 5 | no |" in text_of(another)
    loss = text_of(results_of("16M", "BOTH"))
    assert "| <= 1.45 x the time of the required bytes | 1.43 | yes |" in loss
    both = results_of("16M in 100,000")
    assert "the time of long sequences" not in text_of(both)
    both["measured"] += results_of("16M")["measured"]
    assert "| <= 1.5 x the time of long sequences | 1 | yes |" in text_of(both)
    unprofiled = {**results_of(), "profiled": [{"case": "16M", "operation": "x", "problem": "the run ended in it"}]}
    assert "| 0.0100 | - | 0.0100 | 0.100 | - | - | - | 1.0 | 1400 | 70% |" in text_of(unprofiled)
    tiny_run = {**results_of(), "tiny": True}
    assert "Promised" not in text_of(tiny_run)


def test_time_in_a_row_is_the_time_on_the_gpu():
    results = results_of("32k in 256")
    row = results["measured"][0]["rows"][0]
    row["row_ms"] = {"median": 0.006, "low": 0.005, "high": 0.007}
    page = text_of(results)
    assert "| GPU time <= 20 us | 6 | yes |" in page and "| 0.0100 | 0.00600 | 0.0100 | 0.100 |" in page


def test_a_problem_is_a_note_and_no_row():
    results = results_of()
    results["measured"].append({"case": "64M", "operation": "x", "problem": "the run ended in it"})
    assert text_of(results) == text_of(results_of())
    assert "64M, x: not timed: the run ended in it" in load("gpu_tables").notes(results)
    assert load("gpu_tables").one_line(results["measured"][1]) == "64M, x: the run ended in it"


# --- pictures ---


def scaled(axis, case, in_a_row=None, **changed):
    """A point of a curve."""
    found = {**results_of(case)["measured"][0], "axis": axis, **changed}
    if in_a_row is not None:
        found["rows"][0]["row_ms"] = {"median": in_a_row, "low": in_a_row, "high": in_a_row}
    return found


def with_points():
    results = results_of("32k in 256")
    points = [("tokens", "1k", 0.007, 1024), ("tokens", "4k", 0.014, 4096), ("tokens", "16k", None, 16384)]
    results["scaling"] = [scaled(axis, case, row, slots=slots) for axis, case, row, slots in points]
    results["scaling"] += [scaled("skew", "skew 0.5"), {"axis": "skew", "case": "skew 1", "problem": "wrong"}]
    return results


def test_curves():
    """14 MB in 10 us are 0.7 of the copy, in 7 us in a row as much as the copy, in 14 us half of it."""
    curves, names = load("curves"), load("device_contender")
    tokens, skew = curves.scaling(with_points())
    assert tokens.logarithmic and not skew.logarithmic
    assert [x for x, _ in tokens.lines["one call, cold caches"]] == [1024.0, 4096.0, 16384.0]
    assert [y for _, y in tokens.lines["one call, cold caches"]] == pytest.approx([0.7] * 3)
    assert tokens.lines["calls in a row"] == [(1024.0, pytest.approx(1.0)), (4096.0, pytest.approx(0.5))]
    assert skew.lines == {"one call, cold caches": [(0.5, pytest.approx(0.7))]}
    assert curves.speedups(with_points()) == {
        names.EAGER: [("32k in 256", pytest.approx(5.0))],
        names.BY_HAND: [("32k in 256", pytest.approx(25.0))],
    }
    assert curves.scaling({**with_points(), "scaling": []}) == []


def test_no_pictures_without_a_report(monkeypatch, tmp_path):
    plots = load("plots")
    monkeypatch.setattr(load("report"), "load", lambda path: None)
    with pytest.raises(SystemExit, match=r"there is no benchmarks/results/gpu\.json to draw"):
        plots.main()


@pytest.mark.slow
def test_pictures(tmp_path, monkeypatch):
    """Small, the same each time, and with a caption that says of which machine and when."""
    plots, report = load("plots"), load("report")
    monkeypatch.setattr(report, "PAGE", tmp_path / "benchmarks.md")
    results = {**with_points(), "machine": {"gpu": "a GPU"}}
    parts = [{"found": results}]
    found = {"date": "2026-01-01", "commit": "c" * 40, "steps": [{"name": "benchmark", "parts": parts}]}
    drawn = []
    for _ in range(2):
        assert plots.write(found) == ["gpu-scaling.svg", "gpu-speedup.svg"]
        drawn.append([(tmp_path / name).read_bytes() for name in ("gpu-scaling.svg", "gpu-speedup.svg")])
    assert drawn[0] == drawn[1] and all(len(picture) < 60_000 for picture in drawn[0])
    assert all(b"a GPU, 2026-01-01, commit cccccccccccc" in picture for picture in drawn[0])
    assert plots.write({"steps": []}) == []

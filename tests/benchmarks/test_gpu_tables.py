"""The tables and pictures of the benchmark of a GPU."""

from __future__ import annotations

import pytest

from benchmarks import plots, report, tables
from benchmarks.cases.contender import (
    BY_HAND,
    EAGER,
    XTUNER,
)
from benchmarks.gpu import tables as gpu_tables
from builders.benchmark_results import results_of_gpu

# --- tables -----------------------------------------------------------------------------------------------------------


def text_of(results):
    return "\n".join(tables.markdown(gpu_tables.all_tables(results)))


def test_tables():
    results = results_of_gpu()
    page, where = text_of(results), "| 16M | token weights, rejection |"
    for line in (
        f"{where} 0.0100 | - | 0.0100 | 0.100 | 4 | 0 | 1 | 1.0 | 1400 | 70% |",
        f"{where} 5.0 x | 25.0 x |",
        f"{where} 4.0 x | 8.0 x |",
        "0.0800 (0.0400-0.160) e |",
        "0.0400 (0.0200-0.0800) |",
        f"{where} torch by hand | 3 | 1 | 0 | 0 | 0.500 |",
        f"{where} read_kernel | 2 | 10.0 |",
        f"{where} 1.0 | 1.0 | 1.0 |",
        f"{where} packed | float32 | bool | 900,000 | 1,000,000 | 10 | 14 | 14.00 |",
        "| tokens | 16M | 1,000,000 | 10 | 0.0100 | - | 1400 | 70% | 8.0 x |",
        f"{where} 7.00 | 0.0400 | 0.0100 | 4.0 x | 0.0400 | 0.0100 | 4.0 x |",
        f"{where} >= 90 % of the copy bandwidth | 0.7 | no |",
        "| extra memory <= 2 % of inputs and outputs | 0.0749 | no |",
    ):
        assert line in page, line
    made = gpu_tables.all_tables(results)
    assert len(made) == 12
    for table in made:
        assert {len(row) for row in table.rows} == {len(table.head)}, table.title
    assert "of a copy" in tables.plain(gpu_tables.our_table(results))
    assert gpu_tables.notes(results) == ["16M, token weights, rejection: verl absent: it has no packed form"]
    assert gpu_tables.facts(results) == [
        "2026-01-01, commit cccccccccccc with uncommitted changes; Python 3.12.3, torch 2.11.0, Triton 3.6.0.",
        "a GPU, 132 multiprocessors, L2 50 MiB, memory 80 GiB, driver 580.1, CUDA 13.0; 16 cores of a processor.",
    ]


def test_promises():
    small = text_of(results_of_gpu("32k in 256"))
    assert "| GPU time <= 20 us | 10 | yes |" in small
    assert "| >= 20 x the fastest peer, whole calls | 25 | yes |" in small
    assert "| >= 3 x torch.compile of our reference, no metrics | 4 | yes |" in small
    another = results_of_gpu("32k in 256")
    rows = another["measured"][0]["rows"]
    rows.append({**rows[2], "name": XTUNER, "wall_ms": rows[1]["wall_ms"]})
    rows[0]["row_ms"] = {"median": 0.006, "low": 0.005, "high": 0.007}
    page = text_of(another)
    assert "| >= 20 x the fastest peer, whole calls | 5 | no |" in page
    # In a row there is no gap that a host could fill.
    assert "| GPU time <= 20 us | 6 | yes |" in page and "| 0.0100 | 0.00600 | 0.0100 | 0.100 |" in page
    assert "| <= 1.45 x the time of the required bytes | 1.43 | yes |" in text_of(results_of_gpu("16M", "BOTH"))
    both = results_of_gpu("16M in 100,000")
    assert "the time of long sequences" not in text_of(both)
    both["measured"] += results_of_gpu("16M")["measured"]
    assert "| <= 1.5 x the time of long sequences | 1 | yes |" in text_of(both)
    assert "Promised" not in text_of(results_of_gpu() | {"tiny": True})


def test_a_problem_is_a_note_and_no_row():
    problem = {"case": "64M", "operation": "x", "problem": "the run ended in it"}
    results = results_of_gpu()
    results["measured"].append(problem)
    assert text_of(results) == text_of(results_of_gpu())
    assert "64M, x: not timed: the run ended in it" in gpu_tables.notes(results)
    assert gpu_tables.one_line(problem) == "64M, x: the run ended in it"
    unprofiled = text_of(results_of_gpu() | {"profiled": [{**problem, "case": "16M"}]})
    assert "| 0.0100 | - | 0.0100 | 0.100 | - | - | - | 1.0 | 1400 | 70% |" in unprofiled


# --- pictures ---------------------------------------------------------------------------------------------------------


def with_points():
    def point(axis, case, in_a_row=None, **changed):
        found = {**results_of_gpu(case)["measured"][0], "axis": axis, **changed}
        if in_a_row is not None:
            found["rows"][0]["row_ms"] = {"median": in_a_row, "low": in_a_row, "high": in_a_row}
        return found

    points = [("1k", 0.007, 1024), ("4k", 0.014, 4096), ("16k", None, 16384)]
    return results_of_gpu("32k in 256") | {
        "scaling": [
            *(point("tokens", case, row, slots=slots) for case, row, slots in points),
            point("skew", "skew 0.5"),
            {"axis": "skew", "case": "skew 1", "problem": "wrong"},
        ]
    }


def test_curves():
    """14 MB in 10 us are 0.7 of the copy, in 7 us in a row as much as the copy, in 14 us half of it."""
    alone, row = "one call, cold caches", "calls in a row"
    curves = gpu_tables.scaling(with_points())
    assert list(curves) == ["tokens", "skew"] and curves["skew"] == {alone: [(0.5, pytest.approx(0.7))]}
    assert curves["tokens"][alone] == [(x, pytest.approx(0.7)) for x in (1024.0, 4096.0, 16384.0)]
    assert curves["tokens"][row] == [(1024.0, pytest.approx(1.0)), (4096.0, pytest.approx(0.5))]
    bars = {EAGER: [("32k in 256", pytest.approx(5.0))], BY_HAND: [("32k in 256", pytest.approx(25.0))]}
    assert gpu_tables.speedups(with_points()) == bars
    assert gpu_tables.scaling({**with_points(), "scaling": []}) == {}


def test_no_pictures_without_a_report(monkeypatch):
    monkeypatch.setattr(report, "load", lambda path: None)
    with pytest.raises(SystemExit, match=r"there is no benchmarks/results/gpu\.json to draw"):
        plots.main()


@pytest.mark.slow
def test_pictures(tmp_path, monkeypatch):
    """Small, the same each time, and with a caption that names machine and date."""
    monkeypatch.setattr(report, "PAGE", tmp_path / "benchmarks.md")
    results = {**with_points(), "machine": {"gpu": "a GPU"}}
    step = {"name": "benchmark", "parts": [{"found": results}]}
    found = {"date": "2026-01-01", "commit": "c" * 40, "steps": [step]}
    drawn = []
    for _ in range(2):
        assert plots.write(found) == list(gpu_tables.PICTURES.values())
        drawn.append([(tmp_path / name).read_bytes() for name in gpu_tables.PICTURES.values()])
    assert drawn[0] == drawn[1] and all(len(picture) < 60_000 for picture in drawn[0])
    assert all(b"a GPU, 2026-01-01, commit cccccccccccc" in picture for picture in drawn[0])
    assert plots.write({"steps": []}) == []

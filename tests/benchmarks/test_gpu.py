"""The benchmark of a GPU without a GPU: its run, from the plan to the files."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from benchmarks.cases.contender import (
    BY_HAND,
    OURS,
    TRACED,
    Contender,
)
from benchmarks.cases.operations import PLAN, PRODUCT, planned
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import measure
from benchmarks.gpu import tables as gpu_tables
from benchmarks.gpu.measure import Budget
from builders.clockwork import Clockwork


@pytest.fixture
def device():
    return Clockwork()


WANTED = [(case, operation.name) for case, many in PLAN for operation in many]


def options(**changed):
    return argparse.Namespace(**{"tiny": True, "cases": None, "rounds": 0.0, "parts": ["times"], **changed})


def noted(where, case, operation, **_):
    return {"case": case.name, "operation": operation.name, "rows": []}


def run(device, results, measured=noted, profile=noted, save=lambda _: None, budget=None, **changed):
    gpu.run(device, results, options(**changed), budget or Budget(1e6), save, measured, profile)
    return results


def test_run_goes_on_where_it_ended(device):
    saved, results = [], gpu.head(device, True)

    def ends(where, case, operation, **more):
        if len(results["measured"]) == 2:
            raise KeyboardInterrupt
        return noted(where, case, operation)

    with pytest.raises(KeyboardInterrupt):
        run(device, results, ends, save=lambda found: saved.append(json.loads(json.dumps(found))))
    left = saved[-1]
    assert [gpu.key(x) for x in left["measured"]] == WANTED[:2] and left["under_way"] == ["measured", *WANTED[2]]
    run(device, left)
    assert [gpu.key(x) for x in left["measured"]] == WANTED
    assert left["measured"][2]["problem"] == "the run ended in it" and left["under_way"] is None
    assert left["machine"]["gpu"] == "clockwork" and len(set(WANTED)) == len(WANTED)


def test_an_operation_that_breaks_is_a_problem_and_the_rest_is_measured(device):
    """In the same process where the device still answers; else this one ends, and writes first what broke."""

    def breaks(where, case, operation, **more):
        if operation is PRODUCT:
            raise ValueError("it does not compile\nmore")
        return noted(where, case, operation)

    results = run(device, gpu.head(device, True), breaks, breaks, parts=list(gpu.PARTS))
    broken = [name for _, name in WANTED].count(PRODUCT.name)
    for name in ("measured", "profiled"):
        assert len(results[name]) == len(WANTED)
        problems = [found["problem"] for found in results[name] if "problem" in found]
        assert problems == ["ValueError: it does not compile"] * broken
    first = gpu_tables.problems(results)[0]
    assert first["traceback"][-2:] == ["ValueError: it does not compile", "more"]
    assert len(gpu_tables.problems(results)) == 2 * broken

    def no_answer():
        raise RuntimeError("an illegal memory access was encountered")

    device.synchronize, saved = no_answer, []
    with pytest.raises(RuntimeError, match="illegal"):
        run(device, gpu.head(device, True), breaks, save=lambda found: saved.append(json.dumps(found)))
    left = json.loads(saved[-1])
    assert left["measured"][-1]["problem"] == "ValueError: it does not compile" and left["under_way"] is None


def test_run_ends_with_its_budget(device):
    now = [0.0]

    def ten_seconds(where, case, operation, **_):
        now[0] += 10.0
        return noted(where, case, operation)

    results = run(device, gpu.head(device, True), ten_seconds, budget=Budget(35.0, lambda: now[0]))
    assert len(results["measured"]) == 3 and now[0] <= 35.0
    assert results["not_reached"] == [list(one) for one in WANTED[3:]]
    run(device, results)
    assert len(results["measured"]) == len(WANTED) and results["not_reached"] == []


def test_parts(device):
    """A scaling curve is of ours and by hand; profiles come last."""
    asked, order = [], []

    def timing(where, case, operation, everybody=None, **_):
        order.append("time")
        if everybody is gpu.EVERYBODY["scaling"]:
            asked.append({who.name for who in everybody(gpu.batches.make(case), operation)})
        return noted(where, case, operation)

    def profiling(where, case, operation):
        order.append("profile")
        return noted(where, case, operation)

    results = run(device, gpu.head(device, True), timing, profiling, parts=list(gpu.PARTS), cases=["1M"])
    assert {found["axis"] for found in results["scaling"]} == {"tokens", "sequences", "skew"}
    assert asked and all(who == {OURS, BY_HAND} for who in asked)
    assert {found["case"] for found in results["measured"]} == {"1M"}
    assert order == sorted(order, reverse=True) and order.count("profile") == len(results["profiled"]) == 2


def test_compile_part(monkeypatch, capsys):
    """The parts together run ours once for the plan and for all shapes of the kernels, and the compiled reference."""
    ran = []
    monkeypatch.setattr(gpu.batches, "make", lambda case, device: case)
    for name in ("contenders", "with_compiler"):
        made = [
            Contender(who, None, lambda name=name, who=who: ran.append((name, who))) for who in (OURS, TRACED, BY_HAND)
        ]
        monkeypatch.setattr(gpu, name, lambda case, operation, made=made: made)
    for part in range(3):
        gpu.main(["--device", "cpu", "--compile", f"{part}/3"])
    sequences = sum(axis == "sequences" for axis, _ in gpu.scaling(True))
    assert ran.count(("with_compiler", TRACED)) == 4 and BY_HAND not in {who for _, who in ran}
    assert ran.count(("contenders", OURS)) == len(list(planned(True))) + sequences


def test_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no GPU here"):
        gpu.main(["--json", str(tmp_path / "x.json")])
    assert not (tmp_path / "x.json").exists()
    with pytest.raises(SystemExit):
        gpu.parse(["--resume"])


def test_the_whole_thing_on_the_host(tmp_path, capsys, monkeypatch):
    """From the command line to the table, with the clock of the host; too little time is left for a compiler."""
    monkeypatch.setattr(measure, "FEWEST", 1)
    path = tmp_path / "results.json"
    only = ["--device", "cpu", "--tiny", "--rounds", "0", "--seconds", "30", "--json", str(path)]
    only += ["--cases", "SkyRL's row"]
    assert gpu.main([*only, "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed and "No GPU; " in printed and "Tiny sizes" in printed
    assert "## rollout-corr" in printed and "| SkyRL's row | SkyRL's recommended recipe |" in printed
    results = json.loads(path.read_text())
    assert results["tiny"] and results["machine"]["torch"] == torch.__version__ and len(results["commit"]) >= 7
    assert len(results["measured"]) == 2 and results["under_way"] is None
    gpu.main([*only, "--resume"])
    assert json.loads(path.read_text())["measured"] == results["measured"]
    results["measured"][0]["problem"] = "it broke"
    path.write_text(json.dumps(results))
    assert gpu.main([*only, "--resume"]) == gpu.INCOMPLETE

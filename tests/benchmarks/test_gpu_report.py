"""The report of a GPU: a step that passes, fails, hangs or is refused, the files that are there then, and the page.

`make gpu-report ARGS=--rehearse`, which the gate runs, is the test of its steps.
"""

from __future__ import annotations

import json
import os
import sys

import pytest

from benchmarks import report
from benchmarks.cases.contender import BY_HAND, COMPILED, OURS, VERL
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import tables as gpu_tables
from benchmarks.gpu.report import Step

SAYS = "import sys; open(sys.argv[1], 'w').write('{\"held\": 1}'); print('a line'); "
JUNIT = """<testsuites><testsuite><testcase classname="a" name="right"/><testcase classname="a" name="wrong">
<failure message="m">first
last</failure></testcase><testcase classname="a" name="out"><skipped/></testcase></testsuite></testsuites>"""


def step(code, **about):
    return Step("one", "what it shows", [sys.executable, "-c", SAYS + code, "{json}"], 60.0, **about)


@pytest.mark.parametrize(
    ("code", "about", "status"),
    [
        ("", {}, "passed"),
        ("sys.exit(3)", {}, "failed"),
        ("import time; time.sleep(60)", {"seconds": 4.0}, "out of time"),
        ("import time; time.sleep(60)", {"seconds": 4.0, "may_be_cut": True}, "cut"),
        ("sys.exit('Device not supported')", {"needs": "timeout"}, "not run"),
        ("", {"needs": "a-program-that-is-nowhere"}, "not run"),
    ],
)
def test_a_step(code, about, status, tmp_path, monkeypatch):
    """A step's output survives however the step ends."""
    monkeypatch.setattr(gpu_report, "GRACE", 1)
    seconds = about.get("seconds", 60.0)
    about = {name: about[name] for name in about if name != "seconds"}
    entry = gpu_report.run_step(step(code, **about), tmp_path, seconds)
    assert entry["status"] == status
    assert entry.get("found", {"held": 1}) == {"held": 1} and ("found" in entry or "why" in entry)
    assert status != "failed" or entry["output"] == ["a line"]


def test_a_step_that_is_cut_has_failed_if_what_it_found_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "GRACE", 1)
    found = {"failed": {"a::wrong": ["last"]}}
    code = f"import json, sys, time; f = open(sys.argv[1], 'w'); json.dump({found!r}, f); f.close(); time.sleep(60)"
    cut = Step("one", "what it shows", [sys.executable, "-c", code, "{json}"], 4.0, may_be_cut=True)
    assert gpu_report.run_step(cut, tmp_path, 4.0)["status"] == "failed"
    assert gpu_report.is_wrong({"many_tokens": {"what": "w", "held": False, "said": "s"}})
    assert not gpu_report.is_wrong({"many_tokens": {"what": "w", "held": True, "said": "s"}, "failed": {}})


@pytest.mark.parametrize(
    ("status", "code"), [("passed", 0), ("cut", 0), ("not run", 0), ("failed", 1), ("out of time", 1)]
)
def test_the_exit_status(status, code, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "steps", lambda rehearsal=False: [step("")])
    found = {"name": "one", "what": "", "status": status, "seconds": 1.0}
    monkeypatch.setattr(gpu_report, "run_step", lambda *_: dict(found))
    assert gpu_report.main(["--out", str(tmp_path), "--rehearse"]) == code


def test_the_steps_that_may_not_be_cut_have_their_time_whatever_the_others_take():
    """The whole fits into seven minutes with the start of Python and what a step takes to end."""
    every = gpu_report.steps()
    last = max(number for number, one in enumerate(every) if not one.may_be_cut)
    assert sum(one.seconds for one in every[: last + 1]) <= gpu_report.SECONDS <= 405.0
    tests = next(one for one in every if one.name == "tests").command
    assert int(tests[tests.index("--numprocesses") + 1]) == min(12, len(os.sched_getaffinity(0)))


def test_no_time_is_left(tmp_path):
    assert gpu_report.run_step(step(""), tmp_path, 3.0)["why"] == "no time was left"


def test_tests_are_counted(tmp_path):
    path = tmp_path / "x.xml"
    path.write_text(JUNIT)
    found = gpu_report.tests_of(path)
    assert (found["tests"], found["passed"], found["skipped"]) == (3, 1, 1)
    assert found["failed"] == {"a::wrong": ["first", "last"]}


def test_both_files_are_written_after_each_step(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_report, "steps", lambda rehearsal=False: [step(""), step("sys.exit(1)")])
    monkeypatch.setattr(gpu_report.torch.cuda, "is_available", lambda: False)
    assert gpu_report.main(["--out", str(tmp_path)]) == gpu_report.NO_GPU and list(tmp_path.iterdir()) == []
    one = {"case": "16M", "operation": "metrics only", "kernel": "read_kernel", "times": 1, "us": 1.5}
    kernels = {"kernels": [one], "compiled": [{"kernel": "read_kernel", "registers": 96, "spills": 0, "shared": 0}]}
    found = {"name": "kernels", "what": "", "status": "passed", "seconds": 9.0, "found": kernels}
    monkeypatch.setattr(gpu_report, "run_step", lambda step, folder, seconds: dict(found))
    assert gpu_report.main(["--out", str(tmp_path), "--rehearse"]) == 0
    assert len(json.loads((tmp_path / "gpu.json").read_text())["steps"]) == 2
    assert "| 16M | metrics only | read_kernel | 1 | 1.5 |" in (tmp_path / "gpu.md").read_text()
    assert "kernels: passed after 9 s; 1 kernels, 0 with spills" in capsys.readouterr().out


def test_a_page_that_cannot_be_made_loses_nothing(tmp_path):
    gpu_report.write(tmp_path, {"steps": [{"odd": 1}]})
    assert json.loads((tmp_path / "gpu.json").read_text()) == {"steps": [{"odd": 1}]}
    assert "could not be made" in (tmp_path / "gpu.md").read_text()


# --- the tables ---


def measured(case, operation, **milliseconds):
    """Results of one operation: 1 GB is required, its copy takes 1 ms; `milliseconds` of each contender."""
    names = {"ours": OURS, "hand": BY_HAND, "verl": VERL, "compiled": COMPILED}
    rows = [
        {"name": names[who], "note": "", "how": "graph", "temporaries": 10_000_000, "first_s": 9.0}
        | {what: {"median": ms, "low": ms, "high": ms} for what in ("device_ms", "call_ms", "wall_ms")}
        for who, ms in milliseconds.items()
    ]
    return {
        "case": case, "operation": operation, "tokens": 5, "slots": 10, "sequences": 2, "layout": "packed",
        "logp": "float32", "mask": "bool", "bytes_per_slot": 14, "required_bytes": 10**9, "copy_bytes": 10**9,
        "copy_ms": {"median": 1.0}, "rows": rows,
    }  # fmt: skip


def test_promises_are_compared_with_what_was_measured():
    token, product, loss = "token weights, rejection", "product weights", "PPO loss, forward + backward"
    results = {
        "tiny": False,
        "machine": dict.fromkeys(("cpu", "cores", "gpu", "multiprocessors", "cuda"), 1)
        | {"l2_bytes": 1, "memory_bytes": 1},
        "not_reached": [["64M", loss]],
        "measured": [
            measured("16M", token, ours=1.1),
            measured("16M", product, ours=1.3),
            measured("16M", loss, ours=1.4),
            measured("16M in 100,000", token, ours=2.2),
            measured("32k in 256", token, ours=0.02, hand=0.6, verl=0.3),
            measured("1M", token, hand=1.0) | {"rows": [], "problem": "nobody agrees"},
        ],
        "compiled": [measured("32k in 256", token, ours=0.02, compiled=0.01)],
    }
    results["measured"][4]["rows"][0] |= {"in_a_row_us": 15.0, "launches": 2, "MHz": 1980}
    table = gpu_tables.promise_table(results)
    assert [(case, reached, met) for case, _, _, reached, met in table.rows] == [
        ("16M", "0.909", "yes"),  # of the copy
        ("16M", "0.769", "no"),
        ("16M in 100,000", "2", "no"),  # times the time of long sequences
        ("32k in 256", "15", "yes"),  # us, of calls in a row
        ("32k in 256", "15", "no"),  # times the time of the fastest peer
        ("32k in 256", "0.5", "no"),  # torch.compile by hand
        ("16M", "0.01", "yes"),  # extra memory
        ("16M", "1.4", "yes"),  # times the time of the bytes
    ]
    steps = [{"name": "benchmark", "what": "", "status": "passed", "seconds": 1.0, "found": results}]
    about = {"date": "2026-01-01", "commit": "c" * 40, "dirty": False, "python": "3.11", "versions": {}}
    page = report.page(report.PAGE.read_text(encoding="utf-8"), None, about | {"steps": steps}, report.counted(),
                       report.counted_steps())  # fmt: skip
    assert "| 16M | PPO loss, forward + backward | <= 1.45 x the time of the required bytes | 1.4 | yes |" in page
    assert "| 5000% | 2 | 15.0 | 1980 |" in page
    assert "- 64M, PPO loss, forward + backward: no time was left." in page
    assert "- 1M, token weights, rejection: not timed: nobody agrees." in page

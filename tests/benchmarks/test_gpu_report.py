"""The GPU report without a GPU: its plan, its page and the whole command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from benchmarks import machine, report
from benchmarks.cases.operations import PLAN, XTUNER
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import tables as gpu_tables
from benchmarks.gpu_report import __main__ as main
from benchmarks.gpu_report import checks, page
from benchmarks.machine import ROOT
from builders.benchmark_results import results_of_gpu

# --- the plan ---------------------------------------------------------------------------------------------------------


def test_the_steps_fit_into_nine_minutes():
    plan = main.waves(4)
    assert sum(seconds for seconds, _ in plan) <= main.SECONDS <= 9 * 60 - 20
    everything = {one.name: one for _, some in plan for one in some}
    assert len(everything) == sum(len(some) for _, some in plan)
    assert main.chosen(plan, None, main.SECONDS) == plan
    few = main.chosen(plan, ["bits", "first"], 10.0 * main.SECONDS)
    assert [[one.name for one in some] for _, some in few] == [["first"], ["bits"]]
    assert sum(seconds for seconds, _ in few) == pytest.approx(10.0 * main.SECONDS)
    assert everything["tests"].processes == everything["compile"].processes == 4
    assert all(one.environment["TRITON_INTERPRET"] == "0" for one in everything.values())
    # What a second run under the sanitizer would not see again must not pass.
    watched = [one for one in everything.values() if one.needs == "compute-sanitizer"]
    assert len(watched) == 2 and not any(one.resumes for one in watched)


def test_what_is_promised_comes_first_and_who_measures_is_alone():
    plan = [[one.name for one in some] for _, some in main.waves(4)]
    assert plan[:3] == [["compile"], ["first"], ["benchmark"]]
    assert all([name] in plan for name in ("benchmark", "traced", "scaling", "profile"))
    order = [(case, operation.name) for case, some in PLAN for operation in some]
    promised = {(one.case, one.operation) for one in gpu_tables.PROMISES}
    assert promised <= set(order[: order.index(("xtuner's pack", XTUNER.name))])


def test_commands_are_understood():
    """By the programs that they call; the tests' own are tried below."""
    parts = []
    for rehearsal in (False, True):
        for one in (one for _, some in main.waves(2, rehearsal) for one in some):
            arguments = [word.format(json="x.json", seconds="9", part="0/2") for word in one.command]
            assert rehearsal == (arguments[-2:] == ["--device", "cpu"]) or one.name == "tests"
            if "benchmarks.gpu" in arguments:
                options = gpu.parse(arguments[arguments.index("benchmarks.gpu") + 1 :])
                assert options.tiny == rehearsal or options.compile
                parts += [] if options.compile else options.parts
            elif "benchmarks.gpu_report.checks" in arguments:
                assert arguments[arguments.index("benchmarks.gpu_report.checks") + 1] in checks.GROUPS
    assert parts == 2 * list(gpu.PARTS)


def test_tests_that_run_on_a_gpu():
    found = main.gpu_tests()
    assert {"tests/kernels/test_correct.py", "tests/backends/test_operators.py"} <= set(found)
    assert "tests/specs/test_correction.py" not in found
    assert all((ROOT / name).exists() for name in main.REHEARSED[1])


def test_without_a_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main.main(["--out", str(tmp_path)]) == main.NO_GPU == 2
    assert "torch sees no GPU here" in capsys.readouterr().out and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="torch sees no GPU here"):
        checks.main(["bits", "--json", "x"])


@pytest.mark.parametrize(
    ("commit", "dirty", "said", "expected"),
    [
        ("a" * 40, True, "b" * 40, "commit aaaaaaaaaaaa with uncommitted changes"),
        ("unknown", True, None, "commit unknown with uncommitted"),
        ("unknown", True, "b" * 40, "commit bbbbbbbbbbbb (of a copy without git"),
    ],
)
def test_the_commit(commit, dirty, said, expected, monkeypatch):
    monkeypatch.setattr(machine, "commit", lambda: (commit, dirty))
    assert expected in page.facts(main.head(said))[0]


def test_a_page_that_cannot_be_made_loses_nothing(tmp_path):
    main.write(tmp_path, {"steps": "of no shape"})
    assert json.loads((tmp_path / "gpu.json").read_text()) == {"steps": "of no shape"}
    said = (tmp_path / "gpu.md").read_text()
    assert "gpu.json has it all" in said and "Traceback" in said


def test_files_do_not_say_where_things_are(tmp_path):
    """Tracebacks name folders, and the files are meant to be committed."""
    lines = [f'File "{ROOT}/benchmarks/x.py"', f'File "{sys.prefix}/lib/y.py"', str(tmp_path), "/usr/lib/z.py"]
    part = {"found": None, "status": "failed", "output": lines}
    failed = {"name": "bits", "what": "", "status": "failed", "seconds": 1.0, "parts": [part]}
    main.write(tmp_path, main.head("c" * 40) | {"steps": [failed]})
    for name in ("gpu.json", "gpu.md"):
        text = (tmp_path / name).read_text()
        assert "./benchmarks/x.py" in text and "<python>/lib/y.py" in text and "/usr/lib/z.py" in text
        assert not any(place in text for place in (str(ROOT), sys.prefix, str(tmp_path)))
    assert machine.without_places("nothing") == "nothing"


# --- the page ---------------------------------------------------------------------------------------------------------


def a_report(**changed):
    found = {"repeats": {"what": "The same bits.", "held": True, "said": "7 | 8"}}
    counts = {"selected": 10, "passed": 7, "not_run": 2, "failed": {"a::b": []}, "under_way": None}
    failed = {"found": counts, "status": "failed", "output": ["E   assert 0"]}
    return {
        "report": "gpu", "date": "2026-01-01", "commit": "c" * 40, "dirty": True, "python": "3.12.3",
        "versions": {"torch": "2.11.0", "triton": None},
        "steps": [
            {"name": "bits", "what": "bits", "status": "passed", "seconds": 3.2, "parts": [{"found": found}]},
            {"name": "tests", "what": "t", "status": "failed", "seconds": 9.0, "parts": [{"found": counts}, failed]},
            {"name": "memcheck", "what": "m", "status": "not run", "seconds": 0.0, "why": "none", "parts": []},
        ],
        **changed,
    }  # fmt: skip


def test_page():
    text = page.report(a_report())
    for line in (
        "2026-01-01, commit cccccccccccc with uncommitted changes.",
        "torch 2.11.0.",
        "| bits | bits | passed | 1 of 1 hold | 3 |",
        "| tests | t | failed | 14 of 20 passed, 2 failed, 4 not reached | 9 |",
        "| memcheck | m | not run | none | 0 |",
        "| bits | The same bits | yes | 7 / 8 |",
        "## End of the output of tests (failed)\n\n```\nE   assert 0\n```",
    ):
        assert line in text
    assert "ends in the step" not in text and "A rehearsal on a CPU" in page.report(a_report(rehearsal=True))
    ended = a_report()
    ended["steps"][0]["status"] = "under way"
    assert "The report ends in the step bits." in page.report(ended)
    lost = a_report()
    lost["steps"][0]["parts"] = [{"found": None, "status": "out of time", "output": []}]
    lost["steps"][1]["parts"] = [{"found": None}]
    assert "| bits | bits | passed |  | 3 |" in page.report(lost) and "## Checks" not in page.report(lost)


def test_the_parts_are_one_benchmark():
    empty = {"measured": [], "traced": [], "scaling": [], "profiled": [], "not_reached": []}
    times, profile = {**empty, "measured": [1], "machine": "a"}, {**empty, "profiled": [2], "machine": "b"}
    some = [{"name": name, "parts": [{"found": x}]} for name, x in (("benchmark", times), ("profile", profile))]
    assert page.benchmark_of({"steps": some}) == {**times, "profiled": [2]}
    assert page.benchmark_of({"steps": some[1:]}) == profile
    for lost in ({"name": "traced", "parts": []}, {"name": "scaling", "parts": [{"found": None}]}):
        assert page.benchmark_of({"steps": [some[0], lost]}) == times
    assert page.benchmark_of({"steps": []}) is None and page.pictures(empty) == []


def test_page_with_a_benchmark():
    times, found = results_of_gpu(), a_report()
    profile = {**times, "measured": [], "traced": [], "scaling": []}
    times |= {"profiled": [], "not_reached": [["64M", "y"]]}
    times["measured"] += [{"case": "1M", "operation": "x", "problem": "it broke"}]
    found["steps"] += [
        {"name": name, "what": name, "status": "passed", "seconds": 1.0, "parts": [{"found": part}]}
        for name, part in (("benchmark", times), ("profile", profile))
    ]
    text = report.page(None, json.loads(json.dumps(found)))
    said = "1 timed, 1 beside torch.compile, 1 on curves, 1 with a problem, 1 not reached"
    for line in (
        "a GPU, 132 multiprocessors, L2 50 MiB",
        "## Promised and reached",
        f"| benchmark | benchmark | passed | {said} | 1 |",
        "| profile | profile | passed | 1 profiled | 1 |",
        "- 1M, x: not timed: it broke.",
        "- 64M, y: no time was left.",
        "| 16M | token weights, rejection | read_kernel | 2 | 10.0 |",
        "](gpu-scaling.svg)",
        "](gpu-speedup.svg)",
        "- 16M, token weights, rejection: verl absent: it has no packed form.",
    ):
        assert line in text


def test_the_page_of_benchmarks_has_the_report_or_says_that_there_is_none():
    without, with_one = report.page(None, None), report.page(None, a_report())
    assert report.NO_GPU_YET in without and report.NO_GPU_YET not in with_one
    assert "| bits | The same bits | yes | 7 / 8 |" in with_one and "End of the output" not in with_one


# --- the whole command ------------------------------------------------------------------------------------------------


def rehearsal(folder, *names, **environment):
    command = [sys.executable, "-m", "benchmarks.gpu_report", "--rehearse", "--out", str(folder), "--processes", "2"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, "--steps", *names], cwd=ROOT, env=os.environ | environment, **how)


@pytest.mark.slow
def test_a_report_that_is_ended_keeps_what_it_has(tmp_path):
    """SIGTERM in the middle of a step: both files are there and say which step it was."""
    running = rehearsal(tmp_path, "benchmark")
    path, found = tmp_path / "gpu.json", {"steps": []}
    for _ in range(600):
        if path.exists():
            found = json.loads(path.read_text())
        if found["steps"] and found["steps"][0]["parts"][0]["found"]:
            break
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    assert running.wait(20) != 0 and "ended from outside" in running.stdout.read()
    assert "The report ends in the step benchmark." in (tmp_path / "gpu.md").read_text()


# Runs what it is given, and then has found an error.
SANITIZER = """#!/bin/sh
while [ "$1" != -m ]; do python=$1; shift; done
"$python" "$@"
exit 9
"""


@pytest.mark.slow
def test_rehearsal(tmp_path):
    """Every kind of step from end to end on the CPU, with a pretended sanitizer that finds an error at its end."""
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(SANITIZER)
    program.chmod(0o755)
    path = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    wanted = ("first", "benchmark", "scaling", "profile", "tests", "bits", "sizes", "memcheck")
    running = rehearsal(tmp_path, *wanted, **path)
    output, _ = running.communicate(timeout=600)
    said = {one["name"]: one for one in json.loads((tmp_path / "gpu.json").read_text())["steps"]}
    assert list(said) == list(wanted) and running.returncode == 1, output
    assert {one["status"] for name, one in said.items() if name != "memcheck"} == {"passed"}, output
    assert said["memcheck"]["status"] == "failed" and said["memcheck"]["parts"][0]["found"]["sanitized"]["held"]
    text = (tmp_path / "gpu.md").read_text()
    for title in ("Steps", "Checks", "rollout-corr", "Cases and the bytes that they require", "Scaling"):
        assert f"## {title}" in text
    assert "A rehearsal on a CPU" in text and "Tiny sizes" not in output
    tests = page.tests_of(said["tests"])
    assert tests["passed"] == tests["selected"] > 0 and tests["not_run"] == 0


@pytest.mark.slow
def test_rehearsal_without_what_may_be_missing(tmp_path):
    """Without compute-sanitizer and hypothesis, what needs them says so and the rest runs."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('hypothesis', 'matplotlib', 'pyarrow'): sys.modules[name] = None\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    running = rehearsal(tmp_path, "profile", "tests", "bits", "racecheck", **environment)
    output, _ = running.communicate(timeout=600)
    said = {one["name"]: one for one in json.loads((tmp_path / "gpu.json").read_text())["steps"]}
    assert said["profile"]["status"] == said["bits"]["status"] == "passed", output
    assert said["tests"]["status"] == "failed" and "hypothesis" in " ".join(said["tests"]["parts"][0]["output"])
    assert said["racecheck"]["why"] == "compute-sanitizer is not installed"

"""The GPU report without a GPU: steps and their time, the sample of tests, what the checks notice, the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rollout_corr as rc
from benchmark_folder import ROOT, load, results_of

pytestmark = pytest.mark.usefixtures("benchmarks")

WRITES = "import json, sys; json.dump({'n': 1}, open(sys.argv[1], 'w'))"


def step(*codes, limit=20.0, **more):
    commands = [[sys.executable, "-c", code, "{json}"] for code in codes]
    return load("gpu_report.steps").Step("a step", "something", commands, limit, **more)


def ran(wanted, folder, seconds=60.0):
    return load("gpu_report.steps").run_step(wanted, folder, seconds)


def alive(pid):
    """Whether a process runs; one that has ended and waits to be asked about does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


# --- steps ---


def test_a_step_passes(tmp_path):
    found = ran(step(WRITES, "print(1)"), tmp_path)
    assert found["status"] == "passed" and found["parts"] == [{"found": {"n": 1}}, {"found": None}]
    assert found["name"] == "a step" and found["what"] == "something" and 0.0 <= found["seconds"] < 20.0


def test_a_step_fails_and_keeps_what_it_had(tmp_path):
    code = f"{WRITES}; [print(i) for i in range(99)]; sys.exit(3)"
    found = ran(step("pass", code), tmp_path)
    assert found["status"] == "failed"
    first, second = found["parts"]
    assert first == {"found": None} and second["status"] == "failed" and second["found"] == {"n": 1}
    assert second["output"] == [str(i) for i in range(59, 99)]


def test_a_step_that_hangs_ends_with_all_that_it_started(tmp_path):
    """The child of the child too, and one that does not listen to SIGTERM."""
    child = tmp_path / "child"
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(child)!r}, 'w').write(str(p.pid)); {WRITES}; print('so far', flush=True); time.sleep(600)"
    )
    steps = load("gpu_report.steps")
    steps.GRACE, before = 0.3, steps.GRACE
    start = time.monotonic()
    try:
        found = ran(step(code, limit=2.0), tmp_path)
    finally:
        steps.GRACE = before
    assert found["status"] == "out of time" and time.monotonic() - start < 15.0
    assert found["parts"][0]["found"] == {"n": 1} and found["parts"][0]["output"] == ["so far"]
    pid = int(child.read_text())
    for _ in range(100):
        if not alive(pid):
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child of the child lives")


def test_what_is_left_limits_a_step(tmp_path):
    found = ran(step("import time; time.sleep(60)", limit=600.0), tmp_path, seconds=1.5)
    assert found["status"] == "out of time"
    found = ran(step("pass"), tmp_path, seconds=0.5)
    assert (found["status"], found["why"]) == ("not run", "no time was left")


def test_a_missing_program(tmp_path):
    found = ran(step("pass", program="no-such-program"), tmp_path)
    assert (found["status"], found["why"], found["parts"]) == ("not run", "no-such-program is not installed", [])


def test_a_step_goes_on_after_an_error(tmp_path):
    """With an argument more, and what it wrote before; as long as there is time."""
    code = (
        "import json, os, sys; path = sys.argv[1]; seen = json.load(open(path)) if os.path.exists(path) else [];"
        "json.dump([*seen, sys.argv[2:]], open(path, 'w')); sys.exit(len(seen) < 2)"
    )
    found = ran(step(code, again="--resume"), tmp_path)
    assert found["status"] == "passed" and found["parts"][0]["found"] == [[], ["--resume"], ["--resume"]]
    assert ran(step(code), tmp_path)["parts"][0]["found"] == [[]]


def test_arguments_and_environment(tmp_path):
    code = "import json, os, sys; json.dump([sys.argv[2], os.environ['MINE'], os.getcwd()], open(sys.argv[1], 'w'))"
    command = [sys.executable, "-c", code, "{json}", "{seconds}"]
    wanted = load("gpu_report.steps").Step("x", "", [command], 30.0, environment={"MINE": "1"})
    assert ran(wanted, tmp_path)["parts"][0]["found"] == ["30", "1", str(ROOT)]


def test_the_report_is_saved_after_every_step(tmp_path):
    steps, measure = load("gpu_report.steps"), load("measure")
    saved, left = [], []

    def run(wanted, folder, seconds):
        left.append(seconds)
        return {"name": wanted.name}

    report = {"steps": [], "under_way": None}
    wanted = [replace(step("pass"), name=name) for name in ("one", "two")]
    budget = measure.Budget(50.0, lambda: 0.0)
    steps.run_all(wanted, report, tmp_path, budget, lambda r: saved.append(json.dumps(r)), run)
    assert [json.loads(text)["under_way"] for text in saved] == ["one", None, "two", None]
    assert [one["name"] for one in json.loads(saved[-1])["steps"]] == ["one", "two"] and left == [50.0, 50.0]


def test_the_steps_fit_into_nine_minutes():
    main = load("gpu_report.__main__")
    everything = main.steps(4)
    assert sum(one.limit for one in everything) <= main.SECONDS <= 9 * 60 - 10
    assert len({one.name for one in everything}) == len(everything)
    assert main.chosen(everything, None, main.SECONDS) == everything
    few = main.chosen(everything, ["bits", "first"], 10.0 * main.SECONDS)
    assert [one.name for one in few] == ["first", "bits"] and sum(one.limit for one in few) == 10.0 * main.SECONDS
    by_name = {one.name: one for one in everything}
    assert len(by_name["tests"].commands) == len(by_name["compile"].commands) == 4
    assert by_name["memcheck"].program == "compute-sanitizer" and by_name["benchmark"].again == "--resume"
    assert all(one.environment["TRITON_INTERPRET"] == "0" for one in everything)


def test_commands_are_understood():
    """By the programs that they call; the tests' own are tried below."""
    main, gpu, checks = load("gpu_report.__main__"), load("gpu"), load("gpu_report.checks")
    for one in main.steps(2):
        for command in one.commands:
            arguments = [word.format(json="x.json", seconds="9") for word in command]
            if "benchmarks.gpu" in arguments:
                at = arguments.index("benchmarks.gpu")
                assert gpu.parse([*arguments[at + 1 :], "--resume"]).parts in (["times", "scaling"], ["profile"])
            elif "benchmarks.gpu_report.checks" in arguments:
                assert arguments[arguments.index("benchmarks.gpu_report.checks") + 1] in checks.GROUPS


def test_tests_that_run_on_a_gpu():
    found = load("gpu_report.__main__").gpu_tests()
    assert {"tests/test_kernels.py", "tests/test_operator.py"} <= set(found)
    assert "tests/test_spec.py" not in found


def test_without_a_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main = load("gpu_report.__main__")
    assert main.main(["--out", str(tmp_path)]) == main.NO_GPU == 2
    assert "torch sees no GPU here" in capsys.readouterr().out and not list(tmp_path.iterdir())
    for name in ("checks", "warm"):
        with pytest.raises(SystemExit, match="torch sees no GPU here"):
            load(f"gpu_report.{name}").main({"checks": ["bits", "--json", "x"], "warm": ["--shard", "0/1"]}[name])


def test_with_a_gpu(tmp_path, capsys, monkeypatch):
    """The report and its exit status, of steps that need none."""
    main = load("gpu_report.__main__")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    good, bad = replace(step("pass"), name="first"), replace(step("import sys; sys.exit(1)"), name="bits")
    monkeypatch.setattr(main, "steps", lambda _: [good, bad])
    monkeypatch.setenv("PATH", "/bin")
    assert main.main(["--out", str(tmp_path)]) == 1
    assert main.main(["--out", str(tmp_path), "--steps", "first"]) == 0
    assert main.main(["--out", str(tmp_path), "--seconds", "0"]) == 1
    assert os.environ["PATH"].startswith("/bin:/usr/local/cuda/bin")
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["versions"]["torch"] == torch.__version__ and len(report["steps"]) == 2
    assert "first: passed" in capsys.readouterr().out
    assert "| bits | something | not run | no time was left | 0 |" in (tmp_path / "gpu.md").read_text()


def test_the_commit_of_a_copy_without_git(monkeypatch):
    main, machine, page = (load(name) for name in ("gpu_report.__main__", "machine", "gpu_report.page"))
    monkeypatch.setattr(machine, "commit", lambda: ("a" * 40, True))
    assert (main.head("b" * 40)["commit"], main.head(None)["dirty"]) == ("a" * 40, True)
    monkeypatch.setattr(machine, "commit", lambda: ("unknown", True))
    assert (
        main.head(None)["commit"] == "unknown" and "commit unknown with uncommitted" in page.facts(main.head(None))[0]
    )
    assert "commit bbbbbbbbbbbb (a copy without git" in page.facts(main.head("b" * 40))[0]


# --- the sample of tests ---

TESTS = """
import time
import pytest

@pytest.mark.parametrize("i", range(12))
def test_many(i):
    assert i != 5

def test_other():
    pass

@pytest.mark.slow
def test_slow():
    pass
"""


def test_shards(tmp_path):
    """Together they are all tests that the marks let through, each once; a failure is named; none runs out of time."""
    (tmp_path / "test_sample.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: slow\n")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "benchmarks.gpu_report.shard"]
    command += ["--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), "-p", "no:cacheprovider", str(tmp_path)]
    running = []
    for shard, budget in (("0/2", "60"), ("1/2", "60"), ("0/1", "14")):
        path = tmp_path / f"{shard.replace('/', '-')}.json"
        own = ["--shard", shard, "--budget", budget, "--shard-json", str(path)]
        quiet = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "env": os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}}
        running.append((subprocess.Popen([*command, *own], **quiet), path))
    codes, found = zip(*((one.wait(120), json.loads(path.read_text())) for one, path in running), strict=True)
    halves, late = found[:2], found[2]
    assert sorted(codes[:2]) == [0, 1] and codes[2] == 0
    assert sum(one["selected"] for one in halves) == 13 and abs(halves[0]["selected"] - halves[1]["selected"]) == 1
    assert sum(one["passed"] for one in halves) == 12
    (failed,) = [name for one in halves for name in one["failed"]]
    assert failed.endswith("test_many[5]") and all(one["under_way"] is None for one in found)
    assert (late["selected"], late["passed"], late["not_run"], late["failed"]) == (13, 0, 13, [])


# --- the checks ---


@pytest.fixture
def small(monkeypatch):
    """Cases of a size that a CPU does in no time."""
    batches = load("batches")
    by_name = batches.named
    monkeypatch.setattr(batches, "named", lambda name: by_name(name).tiny())
    return load("device").Host()


def noisy(x):
    """What a race would do."""
    return x + 1e-7 * torch.rand_like(x)


def test_repeats(small, monkeypatch):
    checks = load("gpu_report.checks")
    assert "bit by bit" in checks.repeats(small, ("32k in 256",))
    correct = rc.correct

    def racing(*args, **options):
        out = correct(*args, **options)
        return replace(out, weights=None if out.weights is None else noisy(out.weights))

    monkeypatch.setattr(rc, "correct", racing)
    with pytest.raises(checks.Broken, match="a second call gave other bits"):
        checks.repeats(small, ("32k in 256",))


def test_packs(small, monkeypatch):
    checks = load("gpu_report.checks")
    assert "8 sequences in 12 packings" in checks.packs(small)
    correct = rc.correct

    def feels_where_it_starts(*args, cu_seqlens, **options):
        out = correct(*args, cu_seqlens=cu_seqlens, **options)
        return replace(out, weights=out.weights * (1.0 + 1e-6 * int(cu_seqlens[0])))

    monkeypatch.setattr(rc, "correct", feels_where_it_starts)
    with pytest.raises(checks.Broken, match="gave other bits"):
        checks.packs(small)


def test_repacked():
    batches, checks = load("batches"), load("gpu_report.checks")
    batch = batches.make(batches.Case("", "", 30, 3))
    other, came = checks.repacked(batch, torch.tensor([2, 0]), 4)
    a, b, c, d = batch.cu_seqlens.tolist()
    assert came.tolist() == [*range(c, d), *range(a, b)]
    assert other.cu_seqlens.tolist() == [4, 4 + d - c, 4 + d - c + b - a]
    assert torch.equal(other.old, torch.cat([torch.ones(4), batch.old[c:d], batch.old[a:b]]))


def test_launches(small, monkeypatch):
    checks, trace = load("gpu_report.checks"), load("trace")
    kernels = {"alone": 3, "syncs": 0, "whole": 1}

    def counts(call):
        call()
        whole = call.__name__ == "whole"
        syncs = kernels["whole"] if whole else kernels["syncs"]
        return trace.Counts(kernels=kernels["alone"], syncs=syncs)

    monkeypatch.setattr(small, "counts", counts)
    assert "token weights, rejection: 3 kernels" in checks.launches(small, ("32k in 256", "1M in 1"))
    for changed, words in (
        ({"alone": 9}, "9 kernels, at most 3 were promised"),
        ({"alone": 0}, "0 kernels"),
        ({"syncs": 1}, "the host waits 1 times before metrics"),
        ({"whole": 2}, "the host waits 2 times with metrics"),
    ):
        monkeypatch.setattr(small, "counts", counts)
        before = dict(kernels)
        kernels.update(changed)
        with pytest.raises(checks.Broken, match=words):
            checks.launches(small, ("32k in 256",))
        kernels.update(before)
    growing = iter(range(1, 100))
    monkeypatch.setattr(small, "counts", lambda call: call() and trace.Counts(kernels=1 + next(growing) // 6))
    with pytest.raises(checks.Broken, match="the number of sequences decides"):
        checks.launches(small, ("32k in 256", "1M in 1"))
    monkeypatch.setattr(small, "counts", lambda call: None)
    with pytest.raises(checks.Broken, match="the profiler saw no device"):
        checks.launches(small, ("32k in 256",))


def test_graphs(small, monkeypatch):
    """A replay that knows the numbers that are there now, and one that kept those of its capture."""
    checks = load("gpu_report.checks")
    monkeypatch.setattr(small, "graph", lambda calls: lambda: [call() for call in calls])
    assert "bit by bit" in checks.graphs(small)

    def stale(calls):
        results = [call() for call in calls]
        kept = [tuple(x.clone() for x in checks.tensors(result)) for result in results]
        return lambda: kept

    monkeypatch.setattr(small, "graph", stale)
    with pytest.raises(checks.Broken, match="the replay gave other bits"):
        checks.graphs(small)


def test_sizes(small, monkeypatch):
    checks = load("gpu_report.checks")
    assert "2,000 sequences" in checks.many_sequences(small, 2000)
    assert "20,480 tokens" in checks.many_tokens(small, 5, 4096)
    correct = rc.correct

    def wraps(old, *args, **options):
        out = correct(old, *args, **options)
        if old.numel() > 5000:
            out.weights[-1] = 0.0
        return out

    monkeypatch.setattr(rc, "correct", wraps)
    with pytest.raises(checks.Broken, match="copy 4 has other bits"):
        checks.many_tokens(small, 5, 4096)


def test_sanitized(small):
    assert load("gpu_report.checks").sanitized(small).endswith("calls of the plan, 2 with other offsets")


def test_agrees_asks_for_the_backend(small, monkeypatch):
    checks = load("gpu_report.checks")
    assert "plain-torch reference" in checks.agrees(small, ("SkyRL's row",))
    monkeypatch.setattr(rc, "backend_for", lambda tensor: rc.Backend("triton", "by mistake"))
    with pytest.raises(checks.Broken, match="by mistake"):
        checks.agrees(small, ())


def test_checks_are_saved_one_by_one():
    checks = load("gpu_report.checks")
    device = load("device").Host()
    saved = []

    def holds(where):
        """It holds. And more."""
        return "seen"

    def breaks(where):
        """It breaks."""
        raise checks.Broken("that was it")

    def crashes(where):
        """It crashes."""
        raise RuntimeError("an illegal memory access\nmore")

    good = checks.run(device, [holds, breaks, crashes], lambda found: saved.append(json.loads(json.dumps(found))))
    assert not good and len(saved) == 6
    assert saved[0]["holds"] == {"what": "It holds. And more.", "held": None, "said": "under way"}
    said = {name: (one["held"], one["said"]) for name, one in saved[-1].items()}
    assert said == {
        "holds": (True, "seen"),
        "breaks": (False, "that was it"),
        "crashes": (False, "RuntimeError: an illegal memory access"),
    }
    assert checks.run(device, [holds], lambda found: None)


# --- the page ---


def a_report(**changed):
    checks = {"repeats": {"what": "The same bits.", "held": True, "said": "7 | 8"}}
    shard = {"selected": 10, "passed": 7, "not_run": 2, "failed": ["a::b"], "under_way": None}
    failed = {"found": shard, "status": "failed", "output": ["E   assert 0"]}
    return {
        "report": "gpu", "date": "2026-01-01", "commit": "c" * 40, "dirty": True, "python": "3.12.3",
        "versions": {"torch": "2.11.0", "triton": None}, "under_way": None,
        "steps": [
            {"name": "bits", "what": "bits", "status": "passed", "seconds": 3.2, "parts": [{"found": checks}]},
            {"name": "tests", "what": "tests", "status": "failed", "seconds": 9.0, "parts": [{"found": shard}, failed]},
            {"name": "memcheck", "what": "m", "status": "not run", "seconds": 0.0, "why": "none", "parts": []},
        ],
        **changed,
    }  # fmt: skip


def test_page():
    page = load("gpu_report.page").report(a_report())
    assert "2026-01-01, commit cccccccccccc with uncommitted changes." in page and "torch 2.11.0." in page
    assert "| bits | bits | passed | 1 of 1 hold | 3 |" in page
    assert "| tests | tests | failed | 14 of 20 passed, 2 failed, 4 not reached | 9 |" in page
    assert "| memcheck | m | not run | none | 0 |" in page
    assert "| bits | The same bits | yes | 7 / 8 |" in page
    assert "## The end of what tests said (failed)\n\n```\nE   assert 0\n```" in page
    assert "ends in the step" not in page
    assert "The report ends in the step calls." in load("gpu_report.page").report(a_report(under_way="calls"))


def test_times_and_profile_are_one_benchmark():
    page = load("gpu_report.page")
    times, profile = ({"measured": [], "scaling": [], "profiled": [x]} for x in (1, 2))
    steps = [{"name": name, "parts": [{"found": x}]} for name, x in (("benchmark", times), ("profile", profile))]
    assert page.benchmark_of({"steps": steps}) == {**times, "profiled": [2]}
    assert page.benchmark_of({"steps": steps[:1]}) == times
    assert page.benchmark_of({"steps": steps[1:]}) is None
    lost = {"name": "profile", "parts": []}
    assert page.benchmark_of({"steps": [steps[0], lost]}) == times


def test_page_with_a_benchmark():
    times, said = results_of(), {"status": "passed", "seconds": 1.0}
    profile = {**times, "measured": [], "scaling": []}
    found = a_report()
    found["steps"] += [
        {"name": name, "what": name, **said, "parts": [{"found": x}]}
        for name, x in (("benchmark", {**times, "profiled": []}), ("profile", profile))
    ]
    page = load("report").page(None, json.loads(json.dumps(found)))
    assert "a GPU, 132 multiprocessors, L2 50 MiB" in page and "## Promised and reached" in page
    assert "| benchmark | benchmark | passed | 1 operations and 1 points timed, 0 operations profiled | 1 |" in page
    assert "| 16M | token weights, rejection | read_kernel | 2 | 10.0 |" in page
    assert "](gpu-scaling.svg)" in page and "](gpu-speedup.svg)" in page
    assert "- 16M, token weights, rejection: verl absent: it has no packed form." in page


def test_page_without_what_a_step_should_have_written():
    found = a_report()
    found["steps"][0]["parts"] = [{"found": None, "status": "out of time", "output": []}]
    found["steps"][1]["parts"] = [{"found": None}]
    page = load("gpu_report.page").report(found)
    assert "| bits | bits | passed |  | 3 |" in page and "## Checks" not in page


def test_the_page_of_benchmarks_has_the_report_or_says_that_there_is_none():
    report = load("report")
    without, with_one = report.page(None, None), report.page(None, a_report())
    assert report.NO_GPU_YET in without and report.NO_GPU_YET not in with_one
    assert "| bits | The same bits | yes | 7 / 8 |" in with_one and "The end of what" not in with_one


def test_pictures_that_the_page_shows_are_there():
    report = load("report")
    shown = re.findall(r"!\[[^]]*\]\(([^)]+)\)", report.PAGE.read_text(encoding="utf-8"))
    assert [name for name in shown if not (report.PAGE.parent / name).exists()] == [], "run python -m benchmarks.plots"
    measured = {"measured": [], "scaling": []}
    assert load("gpu_report.page").pictures(measured) == []

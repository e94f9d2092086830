"""The GPU report without a GPU: its plan, the sample of tests, what the checks notice, the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.benchmark_folder import ROOT, load, results_of

pytestmark = pytest.mark.usefixtures("benchmarks")

# --- the plan ---


def test_the_steps_fit_into_nine_minutes():
    main = load("gpu_report.__main__")
    plan = main.waves(4)
    assert sum(max(one.limit for one in wave) for wave in plan) <= main.SECONDS <= 9 * 60 - 20
    everything = [one for wave in plan for one in wave]
    assert len({one.name for one in everything}) == len(everything)
    assert main.chosen(plan, None, main.SECONDS) == plan
    few = main.chosen(plan, ["bits", "first"], 10.0 * main.SECONDS)
    assert [[one.name for one in wave] for wave in few] == [["first"], ["bits"]]
    assert sum(one.limit for wave in few for one in wave) == pytest.approx(10.0 * main.SECONDS)
    by_name = {one.name: one for one in everything}
    assert len(by_name["tests"].commands) == len(by_name["compile"].commands) == 4
    assert by_name["memcheck"].program == "compute-sanitizer" and by_name["benchmark"].again == "--resume"
    assert all(one.environment["TRITON_INTERPRET"] == "0" for one in everything)


def test_what_is_promised_comes_first_and_who_measures_is_alone():
    main, operations, tables = load("gpu_report.__main__"), load("operations"), load("gpu_tables")
    plan = [[one.name for one in wave] for wave in main.waves(4)]
    assert plan[:3] == [["compile"], ["first"], ["benchmark"]]
    for name in ("benchmark", "traced", "scaling", "profile"):
        assert [name] in plan
    # What a second run under the sanitizer would not see again must not pass.
    assert all(one.again is None for one in main.waves(4)[-1] if one.program == "compute-sanitizer")
    order = [(case, operation.name) for case, some in operations.PLAN for operation in some]
    promised = {(one.case, one.operation) for one in tables.PROMISES}
    assert promised <= set(order[: order.index(("xtuner's pack", operations.XTUNER.name))])


def test_commands_are_understood():
    """By the programs that they call; the tests' own are tried below."""
    main, gpu, checks = load("gpu_report.__main__"), load("gpu"), load("gpu_report.checks")
    parts = []
    for rehearsal in (False, True):
        for one in (step for wave in main.waves(2, rehearsal) for step in wave):
            for command in one.commands:
                arguments = [word.format(json="x.json", seconds="9") for word in command]
                assert rehearsal == (arguments[-2:] == ["--device", "cpu"]) or one.name == "tests"
                if "benchmarks.gpu" in arguments:
                    options = gpu.parse([*arguments[arguments.index("benchmarks.gpu") + 1 :], "--resume"])
                    assert options.tiny == rehearsal
                    parts += options.parts
                elif "benchmarks.gpu_report.checks" in arguments:
                    assert arguments[arguments.index("benchmarks.gpu_report.checks") + 1] in checks.GROUPS
    assert parts == 2 * list(gpu.PARTS)


def test_tests_that_run_on_a_gpu():
    found = load("gpu_report.__main__").gpu_tests()
    assert {"tests/kernels/test_correct.py", "tests/backends/test_operators.py"} <= set(found)
    assert "tests/spec/test_correction.py" not in found


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
    good, bad = (
        load("gpu_report.steps").Step(name, "something", [[sys.executable, "-c", code]], 20.0)
        for name, code in (("first", "pass"), ("bits", "import sys; sys.exit(1)"))
    )
    monkeypatch.setattr(main, "waves", lambda *_: [[good], [bad]])
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    monkeypatch.setenv("PATH", "/bin")
    assert main.main(["--out", str(tmp_path)]) == 1
    assert main.main(["--out", str(tmp_path), "--steps", "first"]) == 0
    assert main.main(["--out", str(tmp_path), "--seconds", "0"]) == 1
    assert os.environ["PATH"].startswith("/bin:/usr/local/cuda/bin")
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert torch.__version__.startswith(report["versions"]["torch"]) and len(report["steps"]) == 2
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


def test_a_page_that_cannot_be_made_loses_nothing(tmp_path):
    main = load("gpu_report.__main__")
    main.write(tmp_path, {"steps": "of no shape"})
    assert json.loads((tmp_path / "gpu.json").read_text()) == {"steps": "of no shape"}
    said = (tmp_path / "gpu.md").read_text()
    assert "gpu.json has it all" in said and "Traceback" in said


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
    (tmp_path / "test_wants.py").write_text("import a_package_that_is_not_there\n\ndef test_it(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: slow\n")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "benchmarks.gpu_report.shard"]
    command += ["--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), "-p", "no:cacheprovider", str(tmp_path)]
    command += [word for word in load("gpu_report.__main__").waves(1)[-1][0].commands[0] if "collection" in word]
    running = []
    for shard, budget in (("0/2", "60"), ("1/2", "60"), ("0/1", "14")):
        path = tmp_path / f"{shard.replace('/', '-')}.json"
        own = ["--shard", shard, "--budget", budget, "--shard-json", str(path)]
        quiet = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "env": os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}}
        running.append((subprocess.Popen([*command, *own], **quiet), path))
    codes, found = zip(*((one.wait(120), json.loads(path.read_text())) for one, path in running), strict=True)
    halves, late = found[:2], found[2]
    assert codes == (1, 1, 1)
    for one in found:
        assert [name for name in one["failed"] if "test_wants" in name] == [one["failed"][0]]
        assert "a_package_that_is_not_there" in one["why"][one["failed"][0]][-1]
        one["failed"] = one["failed"][1:]
    assert sum(one["selected"] for one in halves) == 13 and abs(halves[0]["selected"] - halves[1]["selected"]) == 1
    assert sum(one["passed"] for one in halves) == 12
    (failed,) = [name for one in halves for name in one["failed"]]
    assert any("assert 5 != 5" in line for one in halves for line in one["why"].get(failed, ()))
    assert failed.endswith("test_many[5]") and all(one["under_way"] is None for one in found)
    assert (late["selected"], late["passed"], late["not_run"], late["failed"]) == (13, 0, 13, [])


# --- the checks ---


@pytest.fixture
def small():
    """On the CPU the cases are of a size that it does in no time."""
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
    assert "1,000 sequences" in checks.many_sequences(small)
    assert "20,480 tokens" in checks.many_tokens(small)
    correct, policy_loss = rc.correct, rc.policy_loss

    def wraps(old, *args, **options):
        out = correct(old, *args, **options)
        if old.numel() > 5000:
            out.weights[-1] = 0.0
        return out

    monkeypatch.setattr(rc, "correct", wraps)
    with pytest.raises(checks.Broken, match="the copy from 16384 on has other bits"):
        checks.many_tokens(small)
    monkeypatch.undo()

    def turns(new, advantages, *args, **options):
        """The last token's advantage is another one, as if it were read from elsewhere."""
        if new.numel() > 5000:
            advantages = torch.cat([advantages[:-1], 1.0 + advantages[-1:]])
        return policy_loss(new, advantages, *args, **options)

    monkeypatch.setattr(rc, "policy_loss", turns)
    with pytest.raises(checks.Broken, match="the gradient of the copy from 16384 on has other bits"):
        checks.many_tokens(small)

    def leans(new, advantages, *args, backend="auto", **options):
        return policy_loss(new, advantages if backend == "torch" else 1.1 * advantages, *args, **options)

    monkeypatch.setattr(rc, "policy_loss", leans)
    with pytest.raises(checks.Broken, match="the gradient of the loss differs from the reference"):
        checks.many_sequences(small)


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
    assert not good and len(saved) == 7 and saved[0] == {}
    assert saved[1]["holds"] == {"what": "It holds. And more.", "held": None, "said": "under way"}
    said = {name: (one["held"], one["said"]) for name, one in saved[-1].items()}
    assert said == {
        "holds": (True, "seen"),
        "breaks": (False, "that was it"),
        "crashes": (False, "RuntimeError: an illegal memory access"),
    }
    assert saved[-1]["crashes"]["traceback"][-1] == "more" and "traceback" not in saved[-1]["breaks"]
    assert checks.run(device, [holds], lambda found: None)
    # The process ended in the first: it goes on behind it.
    left = {"crashes": {"what": "", "held": None, "said": "under way"}}
    assert not checks.run(device, [crashes, holds], lambda found: saved.append(found), left)
    assert saved[-1]["crashes"]["said"] == "the run ended in it" and saved[-1]["holds"]["held"] is True


# --- the page ---


def a_report(**changed):
    checks = {"repeats": {"what": "The same bits.", "held": True, "said": "7 | 8"}}
    shard = {"selected": 10, "passed": 7, "not_run": 2, "failed": ["a::b"], "under_way": None}
    failed = {"found": shard, "status": "failed", "output": ["E   assert 0"]}
    return {
        "report": "gpu", "date": "2026-01-01", "commit": "c" * 40, "dirty": True, "python": "3.12.3",
        "versions": {"torch": "2.11.0", "triton": None},
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
    ended = a_report()
    ended["steps"][0]["status"] = "under way"
    assert "The report ends in the step bits." in load("gpu_report.page").report(ended)
    assert "A rehearsal on a CPU" in load("gpu_report.page").report(a_report(rehearsal=True))


def test_the_parts_are_one_benchmark():
    page = load("gpu_report.page")
    empty = {"measured": [], "traced": [], "scaling": [], "profiled": [], "not_reached": []}
    times, profile = {**empty, "measured": [1], "machine": "a"}, {**empty, "profiled": [2], "machine": "b"}
    steps = [{"name": name, "parts": [{"found": x}]} for name, x in (("benchmark", times), ("profile", profile))]
    assert page.benchmark_of({"steps": steps}) == {**times, "profiled": [2]}
    assert page.benchmark_of({"steps": steps[:1]}) == times
    assert page.benchmark_of({"steps": steps[1:]}) == profile
    for lost in ({"name": "traced", "parts": []}, {"name": "scaling", "parts": [{"found": None}]}):
        assert page.benchmark_of({"steps": [steps[0], lost]}) == times
    assert page.benchmark_of({"steps": []}) is None


def test_page_with_a_benchmark():
    times, said = results_of(), {"status": "passed", "seconds": 1.0}
    profile = {**times, "measured": [], "traced": [], "scaling": []}
    found = a_report()
    found["steps"] += [
        {"name": name, "what": name, **said, "parts": [{"found": x}]}
        for name, x in (("benchmark", {**times, "profiled": []}), ("profile", profile))
    ]
    found["steps"][-2]["parts"][0]["found"]["measured"] += [{"case": "1M", "operation": "x", "problem": "it broke"}]
    found["steps"][-2]["parts"][0]["found"]["not_reached"] = [["64M", "y"]]
    page = load("report").page(None, json.loads(json.dumps(found)))
    assert "a GPU, 132 multiprocessors, L2 50 MiB" in page and "## Promised and reached" in page
    said = "1 timed, 1 beside torch.compile, 1 on curves, 1 with a problem, 1 not reached"
    assert f"| benchmark | benchmark | passed | {said} | 1 |" in page
    assert "| profile | profile | passed | 1 profiled | 1 |" in page
    assert "- 1M, x: not timed: it broke." in page and "- 64M, y: no time was left." in page
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
    measured = {"measured": [], "traced": [], "scaling": [], "not_reached": []}
    assert load("gpu_report.page").pictures(measured) == []

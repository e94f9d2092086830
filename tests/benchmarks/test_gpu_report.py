"""The GPU report without a GPU: its steps end in time and lose nothing, its checks notice what they are for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rollout_corr as rc
from benchmarks import machine, report
from benchmarks.cases.batches import Case, make
from benchmarks.cases.contender import Outcome
from benchmarks.cases.operations import PLAN, XTUNER
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import device as devices
from benchmarks.gpu import tables as gpu_tables
from benchmarks.gpu import trace
from benchmarks.gpu_report import __main__ as main
from benchmarks.gpu_report import checks, page, steps
from benchmarks.machine import ROOT
from builders.benchmark_results import results_of_gpu

# --- steps ------------------------------------------------------------------------------------------------------------

WRITES = "import json, sys; json.dump({'n': 1}, open(sys.argv[1], 'w'))"
SLEEPS = "import time; time.sleep(600)"
# Writes how often it was begun and with what, and ends with an error the first two times.
AGAIN = (
    "import json, os, sys; path = sys.argv[1]; seen = json.load(open(path)) if os.path.exists(path) else [];"
    "json.dump([*seen, sys.argv[2:]], open(path, 'w')); sys.exit(int(os.environ['CODE']) if len(seen) < 2 else 0)"
)


def with_a_child(path, then=SLEEPS):
    """Ignores SIGTERM, writes, starts a child whose number it puts into a file, and goes on."""
    return (
        "import signal, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"{WRITES}; child = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]);"
        f"open({str(path)!r}, 'w').write(str(child.pid)); print('so far', flush=True); {then}"
    )


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(steps, "GRACE", 0.3)
    monkeypatch.setattr(steps, "LOOK", 0.02)


def step(code, name="a-step", **more):
    return steps.Step(name, "something", [sys.executable, "-c", code, "{json}"], **more)


def ran(wanted, folder, seconds=20.0):
    (said,) = steps.run_wave([wanted], folder, time.monotonic() + seconds, lambda _: None)
    return said


def gone(path):
    """Return true if the process of that number ends soon; a zombie has ended."""
    stat = Path("/proc") / path.read_text() / "stat"
    for _ in range(100):
        try:
            if stat.read_text().split()[2] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_step_passes(tmp_path):
    found = ran(step(WRITES, processes=2), tmp_path)
    assert found["status"] == "passed" and found["parts"] == [{"found": {"n": 1}}] * 2
    assert (found["name"], found["what"]) == ("a-step", "something") and 0.0 <= found["seconds"] < 20.0


def test_a_step_fails_and_keeps_what_it_had(tmp_path):
    found = ran(step(f"{WRITES}; [print(i) for i in range(99)]; sys.exit(3)"), tmp_path)
    part = {"found": {"n": 1}, "status": "failed", "output": [str(i) for i in range(59, 99)]}
    assert found["status"] == "failed" and found["parts"] == [part]


@pytest.mark.parametrize(("then", "status"), [(SLEEPS, "out of time"), ("import os; os.abort()", "failed")])
def test_a_step_that_hangs_or_crashes_ends_with_all_that_it_started(then, status, tmp_path):
    """Children too, and processes that ignore SIGTERM; its file and its output are kept."""
    child, start = tmp_path / "child", time.monotonic()
    found = ran(step(with_a_child(child, then)), tmp_path, seconds=2.0)
    assert found["status"] == status and time.monotonic() - start < 15.0 and gone(child)
    assert found["parts"][0]["found"] == {"n": 1} and found["parts"][0]["output"][0] == "so far"


def test_steps_that_cannot_run(tmp_path):
    for found, why in (
        (ran(step("pass"), tmp_path, seconds=0.5), "no time was left"),
        (ran(step("pass", needs="no-such-program"), tmp_path), "no-such-program is not installed"),
    ):
        assert (found["status"], found["why"], found["parts"], found["seconds"]) == ("not run", why, [], 0.0)


@pytest.mark.parametrize(
    ("code", "resumes", "expected"),
    [(1, True, [[], ["--resume"], ["--resume"]]), (1, False, [[]]), (gpu.INCOMPLETE, True, [[]])],
)
def test_a_step_goes_on_after_an_error(code, resumes, expected, tmp_path):
    """With `--resume` and its file, unless it said that running again will not help."""
    found = ran(step(AGAIN, resumes=resumes, environment={"CODE": str(code)}), tmp_path)
    assert found["status"] == ("passed" if len(expected) == 3 else "failed") and found["parts"][0]["found"] == expected


@pytest.mark.parametrize("code", ["import sys; sys.exit(1)", f"{WRITES}; sys.exit(1)"], ids=["nothing", "no more"])
def test_a_step_that_gets_nowhere_is_not_run_for_ever(code, tmp_path):
    found = ran(step(f"print('begun', flush=True); {code}", resumes=True), tmp_path)
    assert found["status"] == "failed" and 1 <= found["parts"][0]["output"].count("begun") <= 2


def test_arguments_and_environment(tmp_path):
    code = "import json, os, sys; json.dump([*sys.argv[2:], os.environ['MINE'], os.getcwd()], open(sys.argv[1], 'w'))"
    command = [sys.executable, "-c", code, "{json}", "{seconds}", "{part}"]
    wanted = steps.Step("x", "", command, processes=2, environment={"MINE": "1"})
    found = ran(wanted, tmp_path, seconds=30.0)
    assert [part["found"] for part in found["parts"]] == [["22", f"{part}/2", "1", str(ROOT)] for part in (0, 1)]


def test_steps_of_a_wave_run_at_the_same_time(tmp_path):
    """Two wait for each other; one crashes and one hangs beside them."""

    def meet(me, other):
        wait = f"while not pathlib.Path({str(tmp_path / other)!r}).exists(): time.sleep(0.02)"
        return f"import pathlib, time; pathlib.Path({str(tmp_path / me)!r}).touch()\n{wait}"

    codes = {"one": meet("a", "b"), "two": meet("b", "a"), "crashes": "import os; os.abort()", "hangs": SLEEPS}
    wave, shown, start = [step(code, name) for name, code in codes.items()], [], time.monotonic()
    said = steps.run_wave(wave, tmp_path, start + 3.0, shown.append)
    assert [one["status"] for one in said] == ["passed", "passed", "failed", "out of time"]
    assert time.monotonic() - start < 10.0 and [one["status"] for one in shown[0]][3] == "under way"


def test_the_report_is_saved_while_steps_run_and_waves_share_their_time(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "SHOW", 0.05)
    saved, left = [], "import json, sys; json.dump(float(sys.argv[2]), open(sys.argv[1], 'w'))"
    second = steps.Step("second", "", [sys.executable, "-c", left, "{json}", "{seconds}"])
    slow = step(f"{WRITES}; import time; time.sleep(1.5)", "first")
    steps.run_all([(60.0, [slow]), (60.0, [second])], {}, tmp_path, lambda r: saved.append(json.loads(json.dumps(r))))
    first = [one["steps"][0] for one in saved]
    assert any(one["status"] == "under way" and one["parts"] == [{"found": {"n": 1}}] for one in first)
    assert [one["status"] for one in saved[-1]["steps"]] == ["passed", "passed"]
    # Almost all of the first minute is left to the second wave.
    assert 90.0 < saved[-1]["steps"][1]["parts"][0]["found"] < 112.0


def test_ending_the_report_ends_its_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "SHOW", 0.05)
    child = tmp_path / "child"

    def show(found):
        if child.exists() and child.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        steps.run_wave([step(with_a_child(child))], tmp_path, time.monotonic() + 60.0, show)
    assert gone(child)


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
    assert "tests/spec/test_correction.py" not in found
    assert all((ROOT / name).exists() for name in main.REHEARSED[1])


def test_without_a_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main.main(["--out", str(tmp_path)]) == main.NO_GPU == 2
    assert "torch sees no GPU here" in capsys.readouterr().out and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="torch sees no GPU here"):
        checks.main(["bits", "--json", "x"])


def test_with_a_gpu(tmp_path, capsys, monkeypatch):
    """The report and its exit status, of steps that need none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    good, bad = step("pass", "first"), step("import sys; sys.exit(1)", "bits")
    monkeypatch.setattr(main, "waves", lambda *_: [(20.0, [good]), (20.0, [bad])])
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    monkeypatch.setenv("PATH", "/bin")
    assert main.main(["--out", str(tmp_path)]) == 1
    assert main.main(["--out", str(tmp_path), "--steps", "first"]) == 0
    assert main.main(["--out", str(tmp_path), "--seconds", "0"]) == 1
    assert os.environ["PATH"].startswith("/bin:/usr/local/cuda/bin")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert torch.__version__.startswith(found["versions"]["torch"]) and len(found["steps"]) == 2
    assert "first: passed" in capsys.readouterr().out
    assert "| bits | something | not run | no time was left | 0 |" in (tmp_path / "gpu.md").read_text()


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


# --- the sample of tests ----------------------------------------------------------------------------------------------

TESTS = """
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


def test_sample(tmp_path):
    """The parts are all tests that the marks select, each once; a failure is named; without time none is run."""
    (tmp_path / "test_sample.py").write_text(TESTS)
    (tmp_path / "test_wants.py").write_text("import a_package_that_is_not_there\n\ndef test_it(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: slow\n")
    (tests,) = (one for one in main.waves(1)[-1][1] if one.name == "tests")
    command = [*tests.command[: tests.command.index("{json}") + 1], "-c", str(tmp_path / "pytest.ini"), str(tmp_path)]
    running = []
    for part, seconds in (("0/2", "60"), ("1/2", "60"), ("0/1", "14")):
        words = {"{part}": part, "{seconds}": seconds, "{json}": str(tmp_path / f"{part[0]}{part[2]}.json")}
        quiet = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "env": os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}}
        how = [words.get(word, "not slow" if word == "gpu" else word) for word in command]
        running.append((subprocess.Popen(how, **quiet), Path(words["{json}"])))
    codes, found = zip(*((one.wait(120), json.loads(path.read_text())) for one, path in running), strict=True)
    assert codes == (1, 1, 1)
    for one in found:
        (broken,) = [name for name in one["failed"] if "test_wants" in name]
        assert "a_package_that_is_not_there" in one["failed"].pop(broken)[-1] and one["under_way"] is None
    *halves, late = found
    assert sum(one["selected"] for one in halves) == 13 and abs(halves[0]["selected"] - halves[1]["selected"]) == 1
    assert sum(one["passed"] for one in halves) == 12
    ((failed, lines),) = [item for one in halves for item in one["failed"].items()]
    assert failed.endswith("test_many[5]") and any("assert 5 != 5" in line for line in lines)
    assert (late["selected"], late["passed"], late["not_run"], late["failed"]) == (13, 0, 13, {})


# --- the checks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small():
    """The CPU, where all cases are tiny."""
    return devices.Host()


def spoiled(monkeypatch, name, change):
    """Replace `correct` or `policy_loss` by a function of the real one and its arguments."""
    real = getattr(rc, name)
    monkeypatch.setattr(rc, name, lambda *args, **options: change(real, *args, **options))


def test_repeats(small, monkeypatch):
    def race(correct, *args, **options):
        out = correct(*args, **options)
        return replace(out, weights=None if out.weights is None else out.weights + 1e-7 * torch.rand_like(out.weights))

    assert "bit by bit" in checks.repeats(small, ("32k in 256",))
    spoiled(monkeypatch, "correct", race)
    with pytest.raises(checks.Broken, match="a second call gave other bits"):
        checks.repeats(small, ("32k in 256",))


def test_packs(small, monkeypatch):
    def depends_on_its_start(correct, *args, cu_seqlens, **options):
        out = correct(*args, cu_seqlens=cu_seqlens, **options)
        return replace(out, weights=out.weights * (1.0 + 1e-6 * int(cu_seqlens[0])))

    assert "8 sequences in 12 packings" in checks.packs(small)
    spoiled(monkeypatch, "correct", depends_on_its_start)
    with pytest.raises(checks.Broken, match="gave other bits"):
        checks.packs(small)


def test_repacked():
    batch = make(Case("", 30, 3))
    other, came = checks.repacked(batch, torch.tensor([2, 0]), 4)
    a, b, c, d = batch.cu_seqlens.tolist()
    assert came.tolist() == [*range(c, d), *range(a, b)]
    assert other.cu_seqlens.tolist() == [4, 4 + d - c, 4 + d - c + b - a]
    assert torch.equal(other.old, torch.cat([torch.ones(4), batch.old[c:d], batch.old[a:b]]))


def test_launches(small, monkeypatch):
    good = {"kernels": 3, "syncs": 0, "whole": 1}

    def counting(**changed):
        known = good | changed

        def counts(call):
            out = call()
            return trace.Counts(known["kernels"], syncs=known["whole" if isinstance(out, Outcome) else "syncs"])

        monkeypatch.setattr(small, "counts", counts)

    counting()
    assert "token weights, rejection: 3 kernels" in checks.launches(small, ("32k in 256", "1M in 1"))
    for changed, words in (
        ({"kernels": 9}, "9 kernels, at most 3 were promised"),
        ({"kernels": 0}, "0 kernels"),
        ({"syncs": 1}, "the host waits 1 times before metrics"),
        ({"whole": 2}, "the host waits 2 times with metrics"),
    ):
        counting(**changed)
        with pytest.raises(checks.Broken, match=words):
            checks.launches(small, ("32k in 256",))
    growing = iter(range(1, 100))
    monkeypatch.setattr(small, "counts", lambda call: call() and trace.Counts(kernels=1 + next(growing) // 6))
    with pytest.raises(checks.Broken, match="the number of sequences decides"):
        checks.launches(small, ("32k in 256", "1M in 1"))
    monkeypatch.setattr(small, "counts", lambda call: None)
    with pytest.raises(checks.Broken, match="the profiler saw no device"):
        checks.launches(small, ("32k in 256",))


def test_no_waits(small, monkeypatch):
    assert "none of which waits" in checks.no_waits(small)
    monkeypatch.setattr(small, "waits", lambda call: True)
    with pytest.raises(checks.Broken, match="the host waits"):
        checks.no_waits(small)


def test_graphs(small, monkeypatch):
    """A replay that knows the numbers that are there now, and one that kept those of its capture."""
    monkeypatch.setattr(small, "graph", lambda calls: lambda: [call() for call in calls])
    assert "bit by bit" in checks.graphs(small)

    def stale(calls):
        kept = [tuple(x.clone() for x in checks.tensors(call())) for call in calls]
        return lambda: kept

    monkeypatch.setattr(small, "graph", stale)
    with pytest.raises(checks.Broken, match="the replay gave other bits"):
        checks.graphs(small)


def test_sizes(small, monkeypatch):
    assert "1,000 sequences" in checks.many_sequences(small)
    assert "20,480 tokens" in checks.many_tokens(small)

    def wraps(correct, old, *args, **options):
        out = correct(old, *args, **options)
        if old.numel() > 5000:
            out.weights[-1] = 0.0
        return out

    def reads_elsewhere(policy_loss, new, advantages, *args, **options):
        if new.numel() > 5000:
            advantages = torch.cat([advantages[:-1], 1.0 + advantages[-1:]])
        return policy_loss(new, advantages, *args, **options)

    def leans(policy_loss, new, advantages, *args, backend="auto", **options):
        return policy_loss(new, advantages if backend == "torch" else 1.1 * advantages, *args, **options)

    for name, change, check, words in (
        ("correct", wraps, checks.many_tokens, "the copy from 16384 on has other bits"),
        ("policy_loss", reads_elsewhere, checks.many_tokens, "the gradient of the copy from 16384 on has other bits"),
        ("policy_loss", leans, checks.many_sequences, "the gradient of the loss differs from the reference"),
    ):
        with monkeypatch.context() as only:
            spoiled(only, name, change)
            with pytest.raises(checks.Broken, match=words):
                check(small)


def test_sanitized(small):
    assert checks.sanitized(small).endswith("calls of the plan, 2 with other offsets")


def test_agrees(small, monkeypatch):
    assert "plain-torch reference" in checks.agrees(small, ("SkyRL's row",))
    with monkeypatch.context() as only:
        spoiled(only, "correct", lambda correct, *args, backend="auto", **options: replace(
            out := correct(*args, backend=backend, **options),
            weights=out.weights if backend == "torch" else 2.0 * out.weights,
        ))  # fmt: skip
        with pytest.raises(checks.Broken, match="weights differ from ours"):
            checks.agrees(small, ("SkyRL's row",))
    monkeypatch.setattr(rc, "backend_for", lambda tensor: rc.Backend("triton", "by mistake"))
    with pytest.raises(checks.Broken, match="by mistake"):
        checks.agrees(small, ())


def test_checks_are_saved_one_by_one(small):
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

    good = checks.run(small, [holds, breaks, crashes], lambda found: saved.append(json.loads(json.dumps(found))))
    assert not good and len(saved) == 7 and saved[0] == {}
    assert saved[1]["holds"] == {"what": "It holds. And more.", "held": None, "said": "under way"}
    assert {name: (one["held"], one["said"]) for name, one in saved[-1].items()} == {
        "holds": (True, "seen"),
        "breaks": (False, "that was it"),
        "crashes": (False, "RuntimeError: an illegal memory access"),
    }
    assert saved[-1]["crashes"]["traceback"][-1] == "more" and "traceback" not in saved[-1]["breaks"]
    assert checks.run(small, [holds], lambda found: None)
    # The process died in the first check: the next run goes on behind it.
    left = {"crashes": {"what": "", "held": None, "said": "under way"}}
    assert not checks.run(small, [crashes, holds], saved.append, left)
    assert saved[-1]["crashes"]["said"] == "the run ended in it" and saved[-1]["holds"]["held"] is True


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

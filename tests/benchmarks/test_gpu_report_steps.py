"""Steps of the GPU report: whatever one of them does, the rest goes on in time, and nothing written is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from builders.benchmark_folder import ROOT, load

pytestmark = pytest.mark.usefixtures("benchmarks")

WRITES = "import json, sys; json.dump({'n': 1}, open(sys.argv[1], 'w'))"
SLEEPS = "import time; time.sleep(600)"
# Writes down how often it was begun and with what, and ends with an error the first two times.
AGAIN = (
    "import json, os, sys; path = sys.argv[1]; seen = json.load(open(path)) if os.path.exists(path) else [];"
    "json.dump([*seen, sys.argv[2:]], open(path, 'w')); sys.exit(int(os.environ['CODE']) if len(seen) < 2 else 0)"
)


def with_a_child(path, then=SLEEPS):
    """Does not listen to SIGTERM, writes, starts a child whose number it puts into a file, and goes on."""
    return (
        "import signal, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"{WRITES}; child = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]);"
        f"open({str(path)!r}, 'w').write(str(child.pid)); print('so far', flush=True); {then}"
    )


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    steps = load("gpu_report.steps")
    monkeypatch.setattr(steps, "GRACE", 0.3)
    monkeypatch.setattr(steps, "LOOK", 0.02)


def step(*codes, name="a step", limit=20.0, **more):
    commands = [[sys.executable, "-c", code, "{json}"] for code in codes]
    return load("gpu_report.steps").Step(name, "something", commands, limit, **more)


def ran(wanted, folder, seconds=60.0):
    (said,) = load("gpu_report.steps").run_wave([wanted], folder, seconds, lambda _: None)
    return said


def gone(path):
    """Whether the process of that number ends soon; one that has ended and waits to be asked about has."""
    stat = Path("/proc") / path.read_text() / "stat"
    for _ in range(100):
        try:
            if stat.read_text().split()[2] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


# --- one step ---


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
    child, start = tmp_path / "child", time.monotonic()
    found = ran(step(with_a_child(child), limit=2.0), tmp_path)
    assert found["status"] == "out of time" and time.monotonic() - start < 15.0
    assert found["parts"][0]["found"] == {"n": 1} and found["parts"][0]["output"] == ["so far"]
    assert gone(child)


def test_a_step_that_crashes_takes_its_children_with_it(tmp_path):
    child = tmp_path / "child"
    found = ran(step(with_a_child(child, "import os; os.abort()")), tmp_path)
    assert found["status"] == "failed" and found["parts"][0]["found"] == {"n": 1} and gone(child)


def test_what_is_left_limits_a_step(tmp_path):
    assert ran(step(SLEEPS, limit=600.0), tmp_path, seconds=1.5)["status"] == "out of time"
    found = ran(step("pass"), tmp_path, seconds=0.5)
    assert (found["status"], found["why"], found["seconds"]) == ("not run", "no time was left", 0.0)


def test_a_missing_program(tmp_path):
    found = ran(step("pass", program="no-such-program"), tmp_path)
    assert (found["status"], found["why"], found["parts"]) == ("not run", "no-such-program is not installed", [])
    nothing = load("gpu_report.steps").Step("x", "", [["/no/such/program"]], 5.0)
    found = ran(nothing, tmp_path)
    assert found["status"] == "failed" and "/no/such/program" in found["parts"][0]["output"][0]


def test_a_step_goes_on_after_an_error(tmp_path):
    """With an argument more, and what it wrote before; as long as there is time, and it gets on."""
    found = ran(step(AGAIN, again="--resume", environment={"CODE": "1"}), tmp_path)
    assert found["status"] == "passed" and found["parts"][0]["found"] == [[], ["--resume"], ["--resume"]]
    assert ran(step(AGAIN, environment={"CODE": "1"}), tmp_path)["parts"][0]["found"] == [[]]
    said = {"CODE": str(load("gpu_report.steps").DOES_NOT_HOLD)}
    found = ran(step(AGAIN, again="--resume", environment=said), tmp_path)
    assert found["status"] == "failed" and found["parts"][0]["found"] == [[]]


@pytest.mark.parametrize("code", ["import sys; sys.exit(1)", f"{WRITES}; sys.exit(1)"], ids=["nothing", "the same"])
def test_a_step_that_gets_nowhere_is_not_run_for_ever(code, tmp_path):
    found = ran(step(f"print('begun', flush=True); {code}", again="--resume"), tmp_path)
    assert found["status"] == "failed" and 1 <= found["parts"][0]["output"].count("begun") <= 2


def test_a_step_that_stops_writing_is_run_again(tmp_path):
    """The first run writes and then hangs; the second one goes on behind that."""
    code = (
        "import json, sys, time; json.dump(sys.argv[2:], open(sys.argv[1], 'w'));time.sleep(0 if sys.argv[2:] else 600)"
    )
    start = time.monotonic()
    found = ran(step(code, again="--resume", patience=2.0), tmp_path)
    assert found["status"] == "passed" and found["parts"][0]["found"] == ["--resume"]
    assert 2.0 <= time.monotonic() - start < 15.0
    # Nothing to go on from, and nobody who could.
    assert ran(step(SLEEPS, again="--resume", patience=0.5), tmp_path)["status"] == "failed"
    assert ran(step("import time; time.sleep(1.5)", patience=0.5), tmp_path)["status"] == "passed"


def test_arguments_and_environment(tmp_path):
    code = "import json, os, sys; json.dump([sys.argv[2], os.environ['MINE'], os.getcwd()], open(sys.argv[1], 'w'))"
    command = [sys.executable, "-c", code, "{json}", "{seconds}"]
    wanted = load("gpu_report.steps").Step("x", "", [command], 30.0, environment={"MINE": "1"})
    assert ran(wanted, tmp_path)["parts"][0]["found"] == ["22", "1", str(ROOT)]


# --- waves ---


def test_steps_of_a_wave_run_at_the_same_time(tmp_path):
    """Two wait for each other; one crashes and one hangs beside them."""

    def meet(me, other):
        """Leaves a file and waits for the other's."""
        wait = f"while not pathlib.Path({str(tmp_path / other)!r}).exists(): time.sleep(0.02)"
        return f"import pathlib, time; pathlib.Path({str(tmp_path / me)!r}).touch()\n{wait}"

    wave = [
        step(meet("a", "b"), name="one"),
        step(meet("b", "a"), name="two"),
        step("import os; os.abort()", name="crashes"),
        step(SLEEPS, name="hangs", limit=2.5),
    ]
    shown = []
    start = time.monotonic()
    said = load("gpu_report.steps").run_wave(wave, tmp_path, 60.0, lambda found: shown.append(found))
    assert [one["status"] for one in said] == ["passed", "passed", "failed", "out of time"]
    assert time.monotonic() - start < 10.0
    assert shown[0][3]["status"] == "under way" and shown[-1] == said


def test_what_is_written_is_reported_while_a_step_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(load("gpu_report.steps"), "SHOW", 0.05)
    shown = []
    code = f"{WRITES}; import time; time.sleep(1.5)"
    load("gpu_report.steps").run_wave([step(code)], tmp_path, 60.0, lambda found: shown.append(found[0]))
    assert any(one["status"] == "under way" and one["parts"] == [{"found": {"n": 1}}] for one in shown)


def test_whoever_ends_the_report_ends_its_steps(tmp_path):
    child = tmp_path / "child"

    def show(found):
        if child.exists() and child.read_text():
            raise KeyboardInterrupt

    steps = load("gpu_report.steps")
    before, steps.SHOW = steps.SHOW, 0.05
    try:
        with pytest.raises(KeyboardInterrupt):
            steps.run_wave([step(with_a_child(child))], tmp_path, 60.0, show)
    finally:
        steps.SHOW = before
    assert gone(child)


def test_the_report_is_saved_as_it_goes_on(tmp_path):
    steps, measure = load("gpu_report.steps"), load("measure")
    saved, given = [], []

    def run(wave, folder, seconds, show):
        given.append(seconds)
        show([{"name": one.name, "status": "under way"} for one in wave])
        return [{"name": one.name, "status": "passed"} for one in wave]

    report = {"steps": []}
    wanted = [[step("pass", name=name) for name in names] for names in ("ab", "c")]
    budget = measure.Budget(50.0, lambda: 0.0)
    steps.run_all(wanted, report, tmp_path, budget, lambda r: saved.append(json.loads(json.dumps(r))), run)
    said = ["".join(one["name"] + one["status"][0] for one in each["steps"]) for each in saved]
    assert said == ["aubu", "apbpcu", "apbpcp"] and given == [50.0, 50.0]


def test_what_a_wave_does_not_use_the_next_ones_have(tmp_path):
    steps, measure = load("gpu_report.steps"), load("measure")
    now, limits, taken = [0.0], [], iter([4.0, 25.0, 30.0])

    def run(wave, *_):
        limits.append([one.limit for one in wave])
        now[0] += next(taken)
        return []

    waves = [
        [step("pass", limit=10.0)],
        [step("pass", limit=20.0), step("pass", limit=5.0)],
        [step("pass", limit=30.0)],
    ]
    steps.run_all(waves, {}, tmp_path, measure.Budget(60.0, lambda: now[0]), lambda _: None, run)
    assert limits == [[10.0], [26.0, 11.0], [31.0]]


# --- the whole command ---


def rehearsal(folder, *steps, environment=None, **how):
    command = [sys.executable, "-m", "benchmarks.gpu_report", "--rehearse", "--out", str(folder), "--processes", "2"]
    return subprocess.Popen(
        [*command, *how.pop("more", ()), "--steps", *steps],
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_what_there_is_outlives_a_report_that_is_ended(tmp_path):
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


def test_what_is_written_does_not_say_where_things_lie(tmp_path):
    """Whatever a traceback names: the files are meant to be committed."""
    main, machine = load("gpu_report.__main__"), load("machine")
    lines = [f'File "{ROOT}/benchmarks/x.py"', f'File "{sys.prefix}/lib/y.py"', str(tmp_path), "/usr/lib/z.py"]
    part = {"found": None, "status": "failed", "output": lines}
    failed = {"name": "bits", "what": "", "status": "failed", "seconds": 1.0, "parts": [part]}
    main.write(tmp_path, main.head("c" * 40) | {"steps": [failed]})
    for name in ("gpu.json", "gpu.md"):
        text = (tmp_path / name).read_text()
        assert "./benchmarks/x.py" in text and "<python>/lib/y.py" in text and "/usr/lib/z.py" in text
        assert not any(place in text for place in (str(ROOT), sys.prefix, str(tmp_path)))
    assert machine.without_places("nothing") == "nothing"


def test_a_page_that_cannot_be_made_costs_nothing(tmp_path, monkeypatch):
    main = load("gpu_report.__main__")

    def breaks(found):
        raise KeyError("steps")

    monkeypatch.setattr(main.page, "report", breaks)
    main.write(tmp_path, {"steps": [1]})
    assert json.loads((tmp_path / "gpu.json").read_text()) == {"steps": [1]}
    assert "KeyError: 'steps'" in (tmp_path / "gpu.md").read_text()


# Runs what it is given, and then has found an error.
SANITIZER = """#!/bin/sh
while [ "$1" != -m ]; do python=$1; shift; done
"$python" "$@"
exit 9
"""


@pytest.mark.slow
def test_rehearsal(tmp_path):
    """Every kind of step from end to end on the CPU, with a sanitizer of paper that finds an error at its end."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "compute-sanitizer"
    program.write_text(SANITIZER)
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    wanted = ("first", "benchmark", "scaling", "profile", "tests", "bits", "sizes", "memcheck")
    running = rehearsal(tmp_path, *wanted, environment=path)
    output, _ = running.communicate(timeout=600)
    report = json.loads((tmp_path / "gpu.json").read_text())
    said = {one["name"]: one for one in report["steps"]}
    assert list(said) == list(wanted) and running.returncode == 1, output
    good = {name: one["status"] for name, one in said.items() if name != "memcheck"}
    assert set(good.values()) == {"passed"}, output
    assert said["memcheck"]["status"] == "failed" and said["memcheck"]["parts"][0]["found"]["sanitized"]["held"]
    page = (tmp_path / "gpu.md").read_text()
    for title in ("Steps", "Checks", "rollout-corr", "Cases and the bytes that they require", "Scaling"):
        assert f"## {title}" in page
    assert "A rehearsal on a CPU" in page and "Tiny sizes" not in output
    tests = load("gpu_report.page").tests_of(said["tests"])
    assert tests["passed"] == tests["selected"] > 0 and tests["not_run"] == 0


@pytest.mark.slow
def test_rehearsal_without_what_may_be_missing(tmp_path):
    """No compute-sanitizer, no hypothesis and no rich: what needs them says so, the rest runs."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('hypothesis', 'rich', 'matplotlib', 'pyarrow'): sys.modules[name] = None\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    running = rehearsal(tmp_path, "profile", "tests", "bits", "racecheck", environment=environment)
    output, _ = running.communicate(timeout=600)
    said = {one["name"]: one for one in json.loads((tmp_path / "gpu.json").read_text())["steps"]}
    assert said["profile"]["status"] == said["bits"]["status"] == "passed", output
    assert said["tests"]["status"] == "failed" and "hypothesis" in " ".join(said["tests"]["parts"][0]["output"])
    assert said["racecheck"]["why"] == "compute-sanitizer is not installed"

"""The steps of the GPU report without a GPU: they end in time and lose nothing."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu_report import __main__ as main
from benchmarks.gpu_report import steps
from benchmarks.machine import ROOT

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

"""The checks of the GPU report without a GPU notice what they are for, and its sample of the tests is one."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rollout_corr as rc
from benchmarks.cases.batches import Case, make
from benchmarks.cases.contender import Outcome
from benchmarks.gpu import device as devices
from benchmarks.gpu import trace
from benchmarks.gpu_report import __main__ as main
from benchmarks.gpu_report import checks
from benchmarks.machine import ROOT

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
    assert "tensors on cpu run on the definition" in checks.agrees(small, ("SkyRL's row",))
    with monkeypatch.context() as only:
        spoiled(only, "correct", lambda correct, *args, backend="auto", **options: replace(
            out := correct(*args, backend=backend, **options),
            weights=out.weights if backend == "torch" else 2.0 * out.weights,
        ))  # fmt: skip
        with pytest.raises(checks.Broken, match="weights differ from ours"):
            checks.agrees(small, ("SkyRL's row",))
    monkeypatch.setattr(rc, "backend_for", lambda tensor: rc.Backend("triton", "kernels", "by mistake"))
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

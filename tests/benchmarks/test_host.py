"""The benchmark of the host: what it counts, what it says without a C compiler, and, slow, a run over its driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks import machine
from benchmarks.host import driver
from benchmarks.host.calls import calls
from builders.kernel_cases import unchecked
from builders.launched import dispatched


def test_without_a_compiler_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(driver.NoCompiler, match="expected a C compiler"):
        driver.library(tmp_path / "built")


# Kernel launches of a call.
LAUNCHES = {
    "correct: metrics": 2,
    "correct: weights": 2,
    "correct: weights + geometric + veto + verl's report": 2,
    "metrics() of a copied vector": 0,
    "policy_loss: PPO + KL, forward and backward": 3,
    "policy_loss: GSPO, forward and backward": 3,
}


def test_a_call_has_its_launches_and_compiles_nothing():
    """The calls of the benchmark, over a driver made of Python; every launch is by a kept kernel."""
    found = {}
    with unchecked(), dispatched() as driver:
        for call in calls():
            if not call.part:
                compiled, launched = len(driver.compiled), len(driver.launched)
                call.run()
                assert len(driver.compiled) == compiled
                found[call.name] = len(driver.launched) - launched
    assert found == LAUNCHES


@pytest.mark.slow
def test_a_run(tmp_path):
    """Every call is timed over Triton's launcher, in a process of its own."""
    found = tmp_path / "host.json"
    command = [sys.executable, "-m", "benchmarks.host", "--rounds", "1", "--json", str(found)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=machine.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = json.loads(found.read_text())["calls"]
    assert {call["name"].partition(":")[0] for call in calls if not call["part"]} == {
        "correct",
        "policy_loss",
        "metrics() of a copied vector",
    }
    assert all(call["microseconds"] > 0.0 for call in calls)

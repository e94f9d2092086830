"""Workflows of the project's own machines: pinned by commit, with the least rights, from one index."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
# The commit, and the version for whoever reads it. A tag can be moved, a commit cannot.
PINNED = re.compile(r"uses: +[\w.-]+/[\w./-]+@[0-9a-f]{40} +# v\d+\.\d+\.\d+$")


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.name)
def workflow(request):
    """Text and content of each workflow."""
    text = request.param.read_text(encoding="utf-8")
    return text, yaml.safe_load(text)


def test_there_are_workflows():
    assert WORKFLOWS


def test_actions_are_pinned_by_commit(workflow):
    used = [line.strip(" -") for line in workflow[0].splitlines() if "uses:" in line]
    assert used and not [line for line in used if not PINNED.fullmatch(line)]


def test_one_commit_for_an_action():
    used = {tuple(one.split("@")) for path in WORKFLOWS for one in re.findall(r"uses: *(\S+)", path.read_text("utf-8"))}
    assert len({action for action, _ in used}) == len(used), used


def test_rights_are_to_read(workflow):
    """One job may do more, publish: it waits for a person, has no checkout and runs no command."""
    assert workflow[1]["permissions"] == {"contents": "read"}
    for name, job in workflow[1]["jobs"].items():
        if name == "publish":
            assert job["permissions"] == {"id-token": "write", "attestations": "write"} and job["environment"]
            assert not [step for step in job["steps"] if "run" in step or "actions/checkout" in step["uses"]]
            assert list(workflow[1][True]) == ["push"] and list(workflow[1][True]["push"]) == ["tags"]
        else:
            assert job.get("permissions", {}) in ({}, {"contents": "read"}), name


def test_the_token_is_not_left_in_the_checkout(workflow):
    steps = [step for job in workflow[1]["jobs"].values() for step in job["steps"]]
    checkouts = [step for step in steps if "actions/checkout" in step.get("uses", "")]
    assert checkouts and all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_a_release_is_tried_under_every_python(monkeypatch):
    """Where `make release` runs here, a Python may be missing; on the machine that publishes none is."""
    monkeypatch.syspath_prepend(ROOT / ".ci" / "release")
    monkeypatch.chdir(ROOT)
    environments = importlib.import_module("environments")
    steps = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text("utf-8"))["jobs"]["build"]["steps"]
    (installed,) = [step["with"]["python-version"].split() for step in steps if "setup-python" in step.get("uses", "")]
    assert {f"python{version}" for version in installed} == set(environments.PYTHONS)
    assert f"python{installed[-1]}" == environments.PYTHONS[0], "the last one is `python3`"


def test_strangers_run_nothing_with_rights_or_on_our_machines(workflow):
    """A pull request may change what `make` does. YAML reads the key `on` as True."""
    assert "pull_request_target" not in workflow[1][True] and "workflow_run" not in workflow[1][True]
    for name, job in workflow[1]["jobs"].items():
        if "self-hosted" in job["runs-on"]:
            assert job["if"] == "github.event_name == 'schedule' || github.event_name == 'workflow_dispatch'", name
    # What a stranger names, a branch or a title, never becomes part of a command.
    commands = [step.get("run", "") for job in workflow[1]["jobs"].values() for step in job["steps"]]
    assert not [command for command in commands if "${{" in command]


def test_every_job_ends(workflow):
    assert all(job["timeout-minutes"] <= 120 for job in workflow[1]["jobs"].values())


def test_no_index_beside_the_main_one():
    """With two, pip takes a name from whichever has the higher version of it."""
    files = [*WORKFLOWS, ROOT / "Makefile", ROOT / "setup.py", ROOT / "constraints.txt", *(ROOT / ".ci").iterdir()]
    beside = re.compile("extra[-_]index|find-links", re.IGNORECASE)
    assert not [path.name for path in files if path.is_file() and beside.search(path.read_text(encoding="utf-8"))]


@pytest.mark.slow
def test_tests_for_a_gpu_take_no_tensors_of_the_cpu():
    """What `make test-gpu` selects, in a process of its own: the fixture `device` refuses "cpu" there."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-m", "gpu", "--collect-only", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    selected = [line for line in done.stdout.splitlines() if "::" in line and line.startswith("tests/")]
    assert done.returncode == 0 and len(selected) > 500
    assert not [line for line in selected if re.search(r"\bcpu\b", line.partition("[")[2])]

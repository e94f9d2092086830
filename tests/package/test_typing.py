"""Type checkers refuse what the package would refuse when it runs: a misspelled choice is an error in the editor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import rollout_corr
from rollout_corr.specs.choices import STATS
from rollout_corr.specs.statistics import STATISTICS, Stat

CASES = Path(__file__).with_name("typing_cases.py")
ROOT = Path(rollout_corr.__file__).parents[1]
WRONG = [number for number, line in enumerate(CASES.read_text().splitlines(), 1) if line.endswith("# wrong")]


def lines_by_mypy() -> list[int]:
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports", "silent", str(CASES)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not run.stderr, run.stderr
    return [int(line) for line in re.findall(r"typing_cases\.py:(\d+): error", run.stdout)]


def lines_by_pyright() -> list[int]:
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(CASES)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = json.loads(run.stdout)["generalDiagnostics"]
    return [one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"]


def test_pyright_finds_the_wrong_lines_and_no_other():
    assert len(WRONG) > 10
    assert sorted(set(lines_by_pyright())) == WRONG


@pytest.mark.slow
def test_mypy_finds_the_wrong_lines_and_no_other():
    assert sorted(set(lines_by_mypy())) == WRONG


def test_the_type_of_a_statistic_names_every_row():
    assert get_args(Stat) == STATS == tuple(STATISTICS)

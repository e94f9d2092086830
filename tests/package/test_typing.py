"""Type checkers take the code of every page and example, and refuse what the package would refuse when it runs.

They run with their default settings, as in an editor, on the modules that builders/pages.py writes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from builders.pages import ROOT, write_modules
from rollout_corr.specs.choices import STATS
from rollout_corr.specs.statistics import STATISTICS, Stat

CASES = Path(__file__).with_name("typing_cases.py")
WRONG = [number for number, line in enumerate(CASES.read_text().splitlines(), 1) if line.endswith("# wrong")]

# A file, a line and what is wrong there.
Error = tuple[str, int, str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The modules of pages and examples, and the cases."""
    assert write_modules(tmp_path) > 50
    (tmp_path / CASES.name).write_text(CASES.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def said_by(checker: str, folder: Path, *options: str, **environment: str) -> str:
    """The standard output of a checker that has run through."""
    if find_spec(checker) is None:
        pytest.fail(f"{checker} is missing: pip install -c constraints.txt -e '.[test]'")
    command = [sys.executable, "-m", checker, *options, str(folder)]
    variables = {**os.environ, **environment}
    run = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert run.returncode == 1 and not run.stderr, run.stdout + run.stderr
    return run.stdout


def errors_by_pyright(folder: Path) -> Iterator[Error]:
    (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    options = "--outputjson", "--pythonpath", sys.executable, "--project"
    for found in json.loads(said_by("pyright", folder, *options, PYRIGHT_PYTHON_IGNORE_WARNINGS="1"))[
        "generalDiagnostics"
    ]:
        if found["severity"] == "error":
            yield Path(found["file"]).name, found["range"]["start"]["line"] + 1, found["message"]


def errors_by_mypy(folder: Path) -> Iterator[Error]:
    # Of the checkout's own files nothing is reported, as of an installed package.
    options = "--config-file=", "--output=json", "--follow-imports=silent", f"--cache-dir={os.devnull}"
    path = os.pathsep.join((str(ROOT), str(folder / "typings")))
    for line in said_by("mypy", folder, *options, MYPYPATH=path).splitlines():
        found = json.loads(line)
        if found["severity"] == "error":
            yield Path(found["file"]).name, found["line"], found["message"]


# mypy reads torch anew for every run, which takes the time of a hundred other tests.
@pytest.mark.parametrize("checker", [errors_by_pyright, pytest.param(errors_by_mypy, marks=pytest.mark.slow)])
def test_a_checker_finds_the_wrong_lines_and_no_other(checker, folder):
    assert len(WRONG) > 70
    errors = list(checker(folder))
    elsewhere = [f"{name}:{line}: {message}" for name, line, message in errors if name != CASES.name]
    assert not elsewhere, "\n".join(elsewhere)
    assert sorted({line for name, line, _ in errors if name == CASES.name}) == WRONG


def test_the_type_of_a_statistic_names_every_row():
    assert get_args(Stat) == STATS == tuple(STATISTICS)

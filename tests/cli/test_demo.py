"""`rollout-corr demo`, as somebody meets it who has just installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_corr.cli.demo import SPECS
from rollout_corr.cli.main import main

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parents[2]


def test_it_shows_a_bug_its_cause_three_specs_a_page_and_what_comes_next(tmp_path, capsys, monkeypatch):
    """No name is cut at 80 columns, no time is printed, and commands to copy are not wrapped."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "executable", f"/{'x' * 70}/python")
    assert main(["demo"]) == 0
    out = capsys.readouterr()
    said = out.out.replace(f"{sys.executable} -m rollout_corr", "rollout-corr")
    assert out.err == "" and max(map(len, said.splitlines())) <= 80
    assert "1 token late in 12.5 % of the sequences" in " ".join(said.split()) and "[shifted]" in said
    for name in SPECS:
        assert re.search(rf"^{re.escape(name)} +\d+ % +\d+ % +\d+ % +\d+ %", said, re.MULTILINE), name
    assert not re.search(r"\d+(\.\d+)?x|ms\b|seconds", said)
    folder = tmp_path / "rollout_corr_demo"
    assert (folder / "report.html").stat().st_size > 10_000 and "rollout_corr_demo/report.html" in said
    commands = re.findall(r"^  rollout-corr (.*)$", said.partition("Next:")[2], re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["what-if", "explain", "doctor"]
    # They run as they stand.
    assert main([*commands[1].split()]) == 0
    assert main(["doctor", "rollout_corr_demo/broken.jsonl"]) == 1


def test_it_writes_where_it_is_told_and_says_where_it_cannot(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["demo", "--out", str(tmp_path / "file" / "x")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_torch_without_numpy_is_silent():
    """torch's "Failed to initialize NumPy" is not printed."""
    code = "import sys; sys.modules['numpy'] = None; import rollout_corr as rc; rc.Spec()"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stderr == ""

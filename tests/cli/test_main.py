"""The table of commands: every command loads, parses its own arguments, and returns an exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rollout_corr as rc
from rollout_corr.cli.main import COMMANDS, main

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: rollout-corr {name} ")


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_the_commands_are_listed(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(command.about in said for command in COMMANDS.values())


@pytest.mark.parametrize("arguments", [["unknown"], ["specs", "--more"], ["explain"], ["demo", "--fast"]])
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and "usage: rollout-corr" in capsys.readouterr().err


def test_explain_needs_a_name_alone(capsys):
    """Settings have defaults, so the error does not ask for them."""
    with pytest.raises(SystemExit):
        main(["explain"])
    assert capsys.readouterr().err.endswith("error: the following arguments are required: name\n")


@pytest.mark.parametrize("arguments", [["explain", "verl.decoupled_geo_rs_token_tis"], ["specs", "verl", "geo"]])
def test_lines_are_folded_at_the_width_of_the_terminal(arguments, capsys, monkeypatch):
    """No word is lost or cut; what follows on the next line is indented as the text before it."""
    printed = {}
    for width in (80, 1000):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(arguments) == 0
        printed[width] = capsys.readouterr().out
    folded, whole = printed[80].splitlines(), printed[1000].splitlines()
    assert len(folded) > len(whole) > 2 and max(map(len, folded)) <= 80 < max(map(len, whole))
    assert printed[80].replace("-", "").split() == printed[1000].replace("-", "").split()
    assert sum(line.startswith("   ") for line in folded) == len(folded) - len(whole)


def test_specs_and_explain(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(["specs"]) == 0
    names = capsys.readouterr().out.split()
    assert "verl.decoupled_token_is" in names
    assert main(["explain", "verl.decoupled_token_is"]) == 0
    assert capsys.readouterr().out == rc.spec("verl.decoupled_token_is").explain() + "\n"
    assert main(["explain", "verl.decoupled_token_is", "upper=3.0"]) == 0
    assert capsys.readouterr().out == rc.spec("verl.decoupled_token_is", upper=3.0).explain() + "\n"
    assert main(["explain", "trl.dapo", "epsilon_high=0.3"]) == 0
    said, wanted = capsys.readouterr().out, rc.recipe("trl.dapo", epsilon_high=0.3)
    assert said == f"spec:\n{wanted.spec.explain()}\nloss:\n{wanted.loss.explain()}\n"
    assert main(["explain", "nemo.truncated_importance_sampling_ratio"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "nemo: truncated_importance_sampling_ratio",
        "  default: null",
        "  takes: null or a number",
        "  sets: weight.upper, criteria.upper",
    ]
    # By the place in a configuration too, whose blocks the table does not name.
    assert main(["explain", "axolotl.trl.vllm_importance_sampling_cap"]) == 0
    assert capsys.readouterr().out.startswith("axolotl: vllm_importance_sampling_cap\n  default: 3.0\n")
    for wrong, why in (("uper=3.0", "did you mean upper=?"), ("3.0", "expected a setting NAME=VALUE, got '3.0'")):
        assert main(["explain", "verl.decoupled_token_is", wrong]) == 2
        assert why in capsys.readouterr().err
    assert main(["explain", "verl.decoupled_token"]) == 2
    out = capsys.readouterr()
    assert out.out == "" and "verl.decoupled_token_is" in out.err


def test_specs_are_searched_by_name_and_description(capsys, monkeypatch):
    """Every spec has a line of its own, with what it does, where no terminal has a width."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["specs"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == rc.spec_names()
    assert main(["specs", "VERL", "geo"]) == 0
    found = capsys.readouterr().out.splitlines()
    assert 0 < len(found) < len(lines) and all("verl" in line.lower() and "geo" in line.lower() for line in found)
    assert main(["specs", "no such word"]) == 2
    assert capsys.readouterr().err == ("rollout-corr specs: no spec has 'no such word' in its name or description\n")


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_the_version_and_the_list_of_commands_need_no_torch(argument):
    """torch takes a second and more to import; the version is the package's own."""
    code = f"""
import sys
from rollout_corr.cli.main import main
try:
    main([{argument!r}])
finally:
    assert "torch" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == f"rollout-corr {rc.__version__}\n" or ran.stdout.startswith("usage: rollout-corr")

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


ABOUT = [command.about for command in COMMANDS.values()]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, ABOUT),
        ([], 0, ABOUT),
        (["unknown"], 2, ["usage: rollout-corr"]),
        (["specs", "--more"], 2, ["usage: rollout-corr"]),
        (["demo", "--fast"], 2, ["usage: rollout-corr"]),
        # Settings have defaults, so the error does not ask for them.
        (["explain"], 2, ["usage: rollout-corr", "error: the following arguments are required: name "]),
    ],
)
def test_arguments_of_no_command(arguments, code, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    shown = " ".join((*capsys.readouterr()[code > 0].split(), ""))
    assert caught.value.code == code and all(words in shown for words in said), shown


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


UPPER = rc.spec("verl.decoupled_token_is", upper=3.0).explain()
DAPO = rc.recipe("trl.dapo", epsilon_high=0.3)
RATIO = "nemo: truncated_importance_sampling_ratio\n  default: null\n  takes: null or a number\n  sets: weight.upper, "


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("verl.decoupled_token_is", rc.spec("verl.decoupled_token_is").explain()),
        ("verl.decoupled_token_is upper=3.0", UPPER),
        ("trl.dapo epsilon_high=0.3", f"spec:\n{DAPO.spec.explain()}\nloss:\n{DAPO.loss.explain()}"),
        ("nemo.truncated_importance_sampling_ratio", f"{RATIO}criteria.upper"),
        # By the place in a configuration too, whose blocks the table does not name.
        ("axolotl.trl.vllm_importance_sampling_cap", "axolotl: vllm_importance_sampling_cap\n  default: 3.0\n ..."),
        ("verl.decoupled_token_is uper=3.0", "did you mean upper=?"),
        ("verl.decoupled_token_is 3.0", "expected a setting NAME=VALUE, got '3.0'"),
        ("verl.decoupled_token", "verl.decoupled_token_is"),
    ],
)
def test_explain(arguments, said, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    code = main(["explain", *arguments.split()])
    out, err = capsys.readouterr()
    if code == 0:
        assert out.startswith(said.removesuffix(" ...")) and (said.endswith("...") or out == f"{said}\n")
    else:
        assert code == 2 and out == "" and said in err


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

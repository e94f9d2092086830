"""Under `python -W error` a command does what it does without, and closes every file that it opens."""

from __future__ import annotations

import sys
import warnings

import pytest

from builders.dumps import WRITERS, packed, write
from rollout_corr.cli.main import main

pytestmark = pytest.mark.usefixtures("one_thread")

# To write a jagged tensor imports half of torch, which takes 2 s; its file is read like the other .pt files.
KINDS = [kind for kind in WRITERS if kind != "pt jagged"]


@pytest.fixture
def strictly(monkeypatch, capsys):
    """Run a command with every warning as an error; return its exit code and all that it complained about."""

    def run(*arguments):
        # A file that is left open complains when it is collected, where nobody can catch it.
        unraised = []
        monkeypatch.setattr(sys, "unraisablehook", unraised.append)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            code = main([*map(str, arguments)])
        return code, [str(one.exc_value) for one in unraised], capsys.readouterr().err

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_report_of_every_kind(kind, tmp_path, strictly):
    path = write(kind, tmp_path, packed())
    assert strictly("report", path, "--json") == (0, [], "")
    # The rest of the file stays unread.
    assert strictly("report", path, "--json", "--limit", "2") == (0, [], "")


@pytest.mark.parametrize("command", ["report", "what-if"])
def test_a_page_of_every_command(command, tmp_path, strictly):
    path = write("safetensors padded", tmp_path, packed())
    code, unraised, said = strictly(command, path, "--page", tmp_path / "page.html")
    assert code in (0, 1) and not unraised and not said


@pytest.mark.parametrize(
    "kind", ["pt packed", "npz packed", "safetensors packed", "parquet", "jsonl gz", "json records"]
)
def test_a_file_that_is_refused(kind, tmp_path, strictly):
    path = write(kind, tmp_path, packed())
    path.write_bytes(path.read_bytes()[:30])
    code, unraised, said = strictly("report", path)
    assert (code, unraised, said.count("\n")) == (2, [], 1)

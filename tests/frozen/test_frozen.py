"""The program that freezes numbers: a record equals itself, and a changed formula is found by name."""

from __future__ import annotations

from unittest import mock

import pytest
from frozen import __main__ as program
from frozen import batches, records

from rollout_corr.definition import correction

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = ["--seeds=4", "--large=0", "--only=preset/skyrl.token_"]


def recorded(folder, name, *more):
    file = folder / name
    assert program.main(["record", str(file), *FEW, *more]) == 0
    return str(file)


@pytest.mark.parametrize("path", ["blocks", "whole"])
def test_a_record_equals_a_second_one(path, tmp_path, capsys):
    a, b = (recorded(tmp_path, name, f"--paths={path}") for name in "ab")
    assert program.main(["compare", a, b]) == 0
    assert "8 equal" in capsys.readouterr().out

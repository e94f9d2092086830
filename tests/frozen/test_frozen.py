"""The program that freezes numbers: a record equals itself, and a changed formula is found by name."""

from __future__ import annotations

from unittest import mock

import pytest

from frozen import __main__ as program
from frozen import comparison, records
from rollout_corr.definition import tokens

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


def test_a_changed_formula_is_found_by_name(tmp_path, capsys):
    before, k3 = recorded(tmp_path, "before", "--paths=whole"), tokens.k3
    with mock.patch.object(tokens, "k3", lambda d: k3(d) * (1.0 + 1e-6)):
        after = recorded(tmp_path, "after", "--paths=whole")
    assert program.main(["compare", before, after]) == 1
    said = capsys.readouterr().out
    assert "8 x statistics k3, by " in said and ", relative " in said
    assert "weights" not in said and "keep" not in said
    assert program.main(["compare", before, after, "--allow=statistics:1e-4", "--allow=metrics"]) == 0
    assert program.main(["compare", before, after, "--allow=statistics:1e-8", "--allow=metrics"]) == 1


def test_numbers_come_back_to_the_bit():
    values = (0.0, -0.0, 1.0 / 3.0, float("inf"), 5e-324)
    assert [x.hex() for x in records.unpacked(records.packed(list(values)))] == [x.hex() for x in values]
    assert comparison.bits(-0.0) + 1 == comparison.bits(0.0) and comparison.bits(-1.0) < comparison.bits(-0.5)

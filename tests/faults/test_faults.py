"""The command that plants faults: one is red, one is seen by nobody, and nothing stays of either."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.plant import copied, planted, run
from faults.table import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]


def test_a_fault_is_red_where_a_test_notices_it(tmp_path):
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n", encoding="utf-8")
    (tmp_path / "test_sums.py").write_text("import sums\n\ndef test_add():\n    assert sums.add(2, 2) == 4\n")
    with copied(tmp_path) as copy:
        found = []
        for wrong in ("a - b", "a * b", "a +"):
            with planted(Fault("sums.py", "a + b", wrong, ()), copy):
                found.append(run(("test_sums.py",), copy))
        assert [code for code, _ in found] == [1, 0, 2] and found[0][1] == "test_sums.py::test_add"
        with (
            pytest.raises(ValueError, match="expected its line once in the file, found it 0 times"),
            planted(Fault("sums.py", "a - b", "", ()), copy),
        ):
            pass
        assert (copy / "sums.py").read_text(encoding="utf-8") == (tmp_path / "sums.py").read_text(encoding="utf-8")


def test_the_line_of_a_fault_stands_once_in_its_file():
    assert len({(fault.file, fault.right) for fault in FAULTS}) == len(FAULTS)
    moved = [str(fault) for fault in FAULTS if (ROOT / fault.file).read_text(encoding="utf-8").count(fault.right) != 1]
    assert not moved, "a change that moves a line takes its row along"


def test_the_tests_of_a_fault_are_there():
    named = sorted({test for fault in FAULTS for test in fault.tests})
    for path, _, name in (test.partition("::") for test in named):
        assert (ROOT / path).exists(), path
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), (path, name)

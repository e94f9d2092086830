"""The benchmark of imports prints what it measured. Nothing here depends on a time."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks import imports


def test_it_prints_both_imports_and_counts_modules(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["imports", "--processes", "1"])
    imports.main()
    torchs, ours = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"import torch: \d+ ms", torchs)
    found = re.fullmatch(r"import rollout_corr: \d+\.\d ms, (\d+) modules", ours)
    assert found is not None and int(found[1]) > 10


def test_what_fails_in_a_process_is_raised(monkeypatch):
    monkeypatch.setattr(imports, "CHILD", "raise SystemExit(3)")
    with pytest.raises(imports.subprocess.CalledProcessError):
        imports.measured(1)

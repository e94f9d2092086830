"""docs/mismatch.md and the notebook show what is printed: doctor of a broken run, and each cell of the ten minutes."""

from __future__ import annotations

import json
import re

from builders.shown import DOCTOR, MISMATCH, NOTEBOOK, doctors_words, run_cells

REFRESH = "PYTHONPATH=tests python -m builders.shown"


def words(text: str) -> list[str]:
    """The words of a text; numbers differ in their last digits from machine to machine."""
    return re.sub(r"\d[\d.,e+-]*", "0", text).split()


def test_the_page_shows_what_doctor_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (shown,) = DOCTOR.findall(MISMATCH.read_text(encoding="utf-8"))
    assert words(shown) == words(doctors_words()), REFRESH


def test_the_notebook_runs_and_shows_what_it_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = 0
    for cell, printed in run_cells(json.loads(NOTEBOOK.read_text(encoding="utf-8"))):
        stored = "".join("".join(output["text"]) for output in cell["outputs"])
        assert words(stored) == words(printed), REFRESH
        cells += 1
    assert cells > 8

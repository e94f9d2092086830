"""The notebook of ten minutes: its cells run in order, and print the words that are stored with them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "ten_minutes.ipynb"


def words(text: str) -> list[str]:
    """The words of a text; numbers differ in their last digits from machine to machine."""
    return re.sub(r"\d[\d.,e+-]*", "0", text).split()


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "notebook"}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 8
    with torch.random.fork_rng(devices=[]):
        for number, cell in enumerate(cells, 1):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
            stored = "".join("".join(output.get("text", "")) for output in cell["outputs"])
            printed = capsys.readouterr().out
            assert words(stored) == words(printed), f"cell {number} prints:\n{printed}"

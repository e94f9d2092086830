"""README's first screen: what doctor prints of a broken run is what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from builders.planted_dumps import temperature
from rollout_corr.cli.main import main

README = Path(__file__).resolve().parents[2] / "README.md"


def test_doctor_says_what_the_readme_shows(tmp_path, monkeypatch, capsys):
    """Sampled at temperature 0.7, of which the trainer does not know; the lines of README are broken elsewhere."""
    monkeypatch.chdir(tmp_path)
    torch.save(temperature(0, 0.7, 0.7, 1.0), "dump.pt")
    assert main(["doctor", "dump.pt"]) == 1
    printed = capsys.readouterr().out
    shown = re.search(r"\$ rollout-corr doctor dump.pt\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    assert shown.split() == printed.split(), f"README.md shows another text than this:\n{printed}"

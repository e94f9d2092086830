"""What docs/mismatch.md and the notebook show, made again: `PYTHONPATH=tests python -m builders.shown` writes both."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import rollout_corr as rc
from builders.planted_dumps import temperature
from rollout_corr.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
MISMATCH = ROOT / "docs" / "mismatch.md"
NOTEBOOK = ROOT / "examples" / "ten_minutes.ipynb"
# The part of the page between the command and the end of the block.
DOCTOR = re.compile(r"(?<=\$ rollout-corr doctor dump.jsonl\n).*?(?=```)", re.DOTALL)


def doctors_words() -> str:
    """Return what doctor prints, in this folder, of tokens sampled at a temperature that the trainer ignores."""
    columns = temperature(0, 0.7, 0.7, 1.0)
    logps = columns.pop("train_logp"), columns.pop("rollout_logp")
    rc.dump("dump.jsonl", *logps, sequences=None, **columns).result()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["doctor", "dump.jsonl"])
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def run_cells(notebook: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Run the code of a notebook in this folder: each cell, and what it prints."""
    names: dict[str, object] = {"__name__": "notebook"}
    with torch.random.fork_rng(devices=[]):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
                yield cell, out.getvalue()


def write() -> None:
    """Write what both show."""
    os.environ["COLUMNS"] = "88"
    page, words = MISMATCH.read_text(encoding="utf-8"), doctors_words()
    MISMATCH.write_text(DOCTOR.sub(lambda _: words, page), encoding="utf-8")
    os.environ["COLUMNS"] = "80"
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for number, (cell, printed) in enumerate(run_cells(notebook), 1):
        text = printed.splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        write()

"""Choose the mismatch of mismatch_rl.py: its runs with other bits and other ages of the weights.

    pip install /path/to/rollout-corr matplotlib rich
    python mismatch_sweep.py         # mismatch_rl.py and mismatch_results.py beside it; minutes on one CPU core

It uses other seeds than mismatch_rl.py, because results on the seeds of a choice would be biased.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from mismatch_results import about, at_end, markdown, standard_error, write
from mismatch_rl import ARMS, TINY, Setting, run

# Bits and age in steps: almost only age, only rounding, both, older, coarser.
CELLS = [(8, 4), (4, 0), (4, 4), (4, 8), (3, 4)]
WITH_MISMATCH = [name for name in ARMS if name != "no mismatch"]


def table_of(found: Mapping[str, Any]) -> str:
    """Return sweep.md from sweep.json."""
    rows = []
    for cell in found["cells"]:
        curves = cell["curves"]
        mismatch = [f"{fmean(at_end(x, name) for x in curves['uncorrected']):.3f}" for name in ("kl", "ess")]
        rewards = [f"{fmean(at_end(x, 'reward') for x in curves[arm]):.3f}" for arm in WITH_MISMATCH]
        rows.append([f"int{cell['bits']}", str(cell["stale"]), *mismatch, *rewards])
    made, ceiling = found["about"], [at_end(x, "reward") for x in found["curves"]["no mismatch"]]
    note = (
        f"Reward at the end; without a mismatch {fmean(ceiling):.3f} +- {standard_error(ceiling):.3f}. Seeds "
        f"{made['seeds'][0]} to {made['seeds'][-1]}; {made['cpu']}, one thread, torch {made['torch']}, {made['date']}, "
        f"{made['version']}."
    )
    return markdown(["weights", "steps old", "mismatch KL", "ESS", *WITH_MISMATCH], rows, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("mismatch_rl"), help="folder to write to (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="try everything in seconds; the numbers mean nothing")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    began, setting, seeds = time.monotonic(), TINY if asked.tiny else Setting(), range(100, 100 + asked.seeds)
    ceiling = run(["no mismatch"], seeds, setting)
    cells = []
    for bits, stale in CELLS:
        curves = run(WITH_MISMATCH, seeds, replace(setting, bits=bits, stale=stale))
        cells.append({"bits": bits, "stale": stale, "curves": curves})
    found = {"about": about(setting, seeds, time.monotonic() - began), "curves": ceiling, "cells": cells}
    write(asked.out, "sweep", found, table_of(found))


if __name__ == "__main__":
    main()

"""Attack the readers of dumps: good files, cut ones, ones with flipped bits, and crafted ones, through the command.

A good file is read right. A damaged one is refused with exit code 2, one line and nothing else, or the damage is named
and the rest is read; where a format has checksums, what is read without a word is what was written. A crafted file is
read or refused in the same way, in little memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import resource
import tempfile
import warnings
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from builders.dumps import WRITERS, one_row, packed, padded, with_lengths, write
from lab.attack import crafted_records, crafted_tensors
from lab.attack.campaign import Area, Outcome
from rollout_corr.cli.main import main

# MiB by which an attempt may grow the process. The files are small; the largest that is crafted unpacks to 8 MiB.
GROWTH = 500
LAYOUTS = {"packed": dict, "padded": padded, "lengths": with_lengths, "one row": one_row}
CRAFTS = {**crafted_tensors.CRAFTS, **crafted_records.CRAFTS}
KINDS = (*WRITERS,)
# The others have no checksums, or none of what is not compressed.
CHECKED = (".pt", ".gz")


class Counts(NamedTuple):
    """The numbers of a report that are compared: valid tokens, sequences, and the mean of the finite D."""

    tokens: int
    sequences: int
    d_mean: float

    def agrees(self, other):
        return self[:2] == other[:2] and math.isclose(self.d_mean, other.d_mean, rel_tol=1e-3, abs_tol=1e-4)


def counts_of(columns):
    """Count packed columns in plain Python."""
    train, rollout, mask = (columns[name].tolist() for name in ("train_logp", "rollout_logp", "mask"))
    found = [t - r for t, r, valid in zip(train, rollout, mask, strict=True) if valid]
    bounds = columns["cu_seqlens"].tolist()
    filled = sum(any(mask[a:b]) for a, b in pairwise(bounds))
    return Counts(len(found), filled, math.fsum(found) / len(found))


def damaged(path, rng):
    """Cut a file, or flip some of its bits; return in words what was done."""
    data = bytearray(path.read_bytes())
    if rng.random() < 0.4:
        size = rng.randrange(len(data))
        path.write_bytes(data[:size])
        return f"cut to {size} of {len(data)} bytes"
    flips = rng.choice((1, 1, 1, 2, 8, 64))
    # Half of the damage hits the ends, where formats keep their indices.
    edge = min(len(data), 600)
    for _ in range(flips):
        at = rng.choice((rng.randrange(len(data)), rng.randrange(edge), len(data) - 1 - rng.randrange(edge)))
        data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"{flips} bits flipped"


def attempt(seed):
    """Write a file, damage it or not, and ask the command for a report on it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kind = rng.choice(KINDS)
    columns = packed(rng.randint(1, 12), seed, rng.choice((4, 20)))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # torch and numpy warn while odd tensors are written.
        warnings.simplefilter("ignore")
        path = write(kind, Path(folder), columns)
        action, did = rng.choice(("nothing", "damage", "damage", "craft", "craft")), "as written"
        wanted = counts_of(columns) if action == "nothing" or path.suffix in CHECKED else None
        if action == "damage":
            did = damaged(path, rng)
        elif action == "craft":
            layout, wanted = rng.choice(sorted(LAYOUTS)), None
            CRAFTS[path.suffix](path, LAYOUTS[layout](columns), rng)
            did = f"crafted, {layout}"
        outcome = judge(path, wanted, untouched=action == "nothing", command=rng.choice(("report", "doctor")))
    return Outcome(outcome.verdict, f"{kind}, {did}: {outcome.detail}")


def judge(path, wanted, untouched=False, command="report"):
    """Run a command on a file and judge the answer.

    Args:
        path: The file.
        wanted: The counts that an answer without problems has to have, if they are known.
        untouched: The file is good, and has to be read.
        command: The command that is run.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, out, err = run([command, str(path), "--json"])
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    if growth > GROWTH:
        return Outcome("wrong", f"{growth:.0f} MiB of memory")
    if code == 2 and not out:
        one_line = err.count("\n") == 1 and err.endswith("\n") and str(path) in err and "Traceback" not in err
        if not one_line or "more memory than there is" in err:
            return Outcome("wrong", f"exit code 2 with {err!r} and {out[:80]!r}")
        return Outcome("wrong" if untouched else "refused", err.strip())
    if code not in (0, 1, 2) or err:
        return Outcome("wrong", f"exit code {code} with {err!r}")
    found = json.loads(out)
    metrics = found["metrics"]
    # The doctor calls nothing neither healthy nor ill, and says what it has not read.
    if (code == 2) != (command == "doctor" and not metrics["tokens"]):
        return Outcome("wrong", f"exit code {code} with {metrics['tokens']} tokens")
    if found["problems"]["count"]:
        line = found["problems"]["shown"][0]
        return Outcome("wrong" if untouched else "refused", f"{line['file']}: {line['what']}")
    counts = Counts(metrics["tokens"], metrics["sequences"], metrics["logratio_mean"] or 0.0)
    if wanted is not None and not counts.agrees(wanted):
        return Outcome("wrong", f"{counts} where {wanted} is there")
    return Outcome("right")


def run(arguments):
    """Run a command in this process; return exit code, and stdout and stderr as they are encoded."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
    out.flush()
    err.flush()
    return code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()


AREA = Area(name="files", unit="files", attempt=attempt, count=20_000, few=6)

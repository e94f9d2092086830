"""Attack the readers of dumps: good files, cut ones, ones with flipped bits, and crafted ones, through the command.

The answer is right if it counts what the format's own package finds in the file, or what was in it before the damage.
It is refused if there is exit code 2, one line and nothing else, or if the damage is named and the rest was read.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import tempfile
import warnings
from pathlib import Path

import torch

from attack import crafted_records, crafted_tensors
from attack.campaign import Area, Outcome
from attack.standard_readers import Counts, counts_of
from builders.dumps import WRITERS, one_row, packed, padded, with_lengths, write
from rollout_corr.cli.main import main

# MiB by which an attempt may grow the process. The files are small; the largest that is crafted unpacks to 8 MiB.
GROWTH = 500


LAYOUTS = {"packed": dict, "padded": padded, "lengths": with_lengths, "one row": one_row}
CRAFTS = {**crafted_tensors.CRAFTS, **crafted_records.CRAFTS}
KINDS = (*WRITERS,)


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
        before = counts_of(path)
        action = rng.choice(("nothing", "damage", "damage", "craft", "craft"))
        did = "as written"
        if action == "damage":
            did = damaged(path, rng)
        elif action == "craft" and path.suffix in CRAFTS:
            layout = rng.choice(sorted(LAYOUTS))
            CRAFTS[path.suffix](path, LAYOUTS[layout](columns), rng)
            did = f"crafted, {layout}"
        outcome = judge(path, before, untouched=did == "as written", command=rng.choice(("report", "doctor")))
    return Outcome(outcome.verdict, f"{kind}, {did}: {outcome.detail}")


def judge(path, before, untouched=False, command="report"):
    """Run a command on a file and judge the answer.

    Args:
        path: The file.
        before: The counts before it was damaged, if they are known.
        untouched: The file is good, and has to be read.
        command: The command that is run.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, out, err = run([command, str(path), "--json"])
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    if growth > GROWTH:
        return Outcome("wrong", f"{growth:.0f} MiB of memory")
    if code == 2 and not out:
        if err.count("\n") != 1 or not err.endswith("\n") or str(path) not in err or "Traceback" in err:
            return Outcome("wrong", f"exit code 2 with {err!r} and {out[:80]!r}")
        if "more memory than there is" in err:
            return Outcome("wrong", err.strip())
        return Outcome("wrong" if untouched else "refused", err.strip())
    if code not in (0, 1, 2) or err:
        return Outcome("wrong", f"exit code {code} with {err!r}")
    found = json.loads(out)
    metrics = found["metrics"]
    # The doctor calls nothing neither healthy nor ill, and says what it has not read.
    if (code == 2) != (command == "doctor" and not metrics["tokens"]):
        return Outcome("wrong", f"exit code {code} with {metrics['tokens']} tokens")
    if not metrics["tokens"] and code == 1:
        return Outcome("wrong", "exit code 1 and no token was read")
    counts = Counts(metrics["tokens"], metrics["sequences"], metrics["logratio_mean"] or 0.0)
    if found["problems"]["count"]:
        line = found["problems"]["shown"][0]
        return Outcome("wrong" if untouched else "refused", f"{line['file']}: {line['what']}")
    if before is not None and counts.agrees(before):
        return Outcome("right")
    after = counts_of(path)
    if after is not None and counts.agrees(after):
        return Outcome("right")
    return Outcome("wrong", f"{counts} where {after or before} is there")


def run(arguments):
    """Run a command in this process; return exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


AREA = Area(name="files", unit="files", attempt=attempt, count=20_000, few=10)

"""Time and memory of `report` and `doctor` on large dumps: `python -m benchmarks.reading` from the root of a checkout.

Files of one size in two formats, and a run of many steps, as one .jsonl file and as a folder of .pt files. Every
command runs in a process of its own, which measures its peak of resident memory above what it has after its imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine

# Tokens of a sequence; sequences of a step of the run of many steps, and tokens of each of these.
TOKENS, STEP_SEQUENCES, STEP_TOKENS = 1024, 8, 128
ROW_BYTES = 41 * TOKENS

# Prints seconds of the processor, which other work on the machine hardly changes, and MiB. Linux keeps the peak of a
# process itself, so nothing has to be sampled.
CHILD = """
import contextlib, io, json, sys, time
import torch
from rollout_corr.cli import dump_commands
from rollout_corr.diagnose.read import dump

def mib(name):
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines[name].split()[0]) / 1024

torch.set_num_threads(1)
before, start = mib("VmRSS"), time.process_time()
with contextlib.redirect_stdout(io.StringIO()) as out:
    code = getattr(dump_commands, sys.argv[1])([sys.argv[2], "--json"])
seconds = time.process_time() - start
metrics = json.loads(out.getvalue())["metrics"]
print(json.dumps({"code": code, "seconds": seconds, "mib": mib("VmHWM") - before, "tokens": metrics["tokens"]}))
"""


def columns_of(rows: int, tokens: int, step: int = 0) -> dict[str, Tensor]:
    """Make rows of log-probs that differ a little, with what else a training loop dumps: 41 bytes a token.

    Half of the tokens are padding, as in a batch of sequences of any length.
    """
    generator = torch.Generator().manual_seed(step)
    rollout = -torch.empty(rows, tokens, dtype=torch.float64).exponential_(1.0, generator=generator)
    return {
        "train_logp": rollout + 0.02 * torch.randn(rows, tokens, generator=generator, dtype=torch.float64),
        "rollout_logp": rollout,
        "mask": torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1), generator=generator),
        "token_ids": torch.randint(0, 150_000, (rows, tokens), generator=generator),
        "advantages": torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, tokens).contiguous(),
        "versions": torch.full((rows, tokens), step),
    }


def records(columns: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    """Cut columns into records."""
    lists = {name: x.tolist() for name, x in columns.items()}
    for i in range(len(lists["train_logp"])):
        yield {name: values[i] for name, values in lists.items()}


def write_pt(path: Path, mib: float) -> None:
    """Write a file of tensors."""
    torch.save(columns_of(int(mib * 2**20) // ROW_BYTES, TOKENS), path)


def write_jsonl(path: Path, mib: float) -> None:
    """Write a file of records: the same lines again and again, since to make them takes longer than to read them."""
    lines = [json.dumps(record).encode() + b"\n" for record in records(columns_of(64, TOKENS))]
    count = max(1, int(mib * 2**20) // (sum(map(len, lines)) // len(lines)))
    with path.open("wb") as file:
        file.writelines(islice(cycle(lines), count))


def write_lines(path: Path, steps: int) -> None:
    """Write a run as `rollout_corr.dump` does, a line a sequence."""
    with path.open("w", encoding="utf-8") as file:
        for step in range(steps):
            made = columns_of(STEP_SEQUENCES, STEP_TOKENS, step)
            file.writelines(json.dumps(record | {"step": step}) + "\n" for record in records(made))


def write_files(path: Path, steps: int) -> None:
    """Write a run as `rollout_corr.dump` does, a file a step."""
    path.mkdir()
    for step in range(steps):
        made = columns_of(STEP_SEQUENCES, STEP_TOKENS, step) | {"step": torch.full((STEP_SEQUENCES,), step)}
        torch.save(made, path / f"{step:08d}.pt")


# The name in the table, the name on the disk, what writes it, and which size that takes: MiB or steps.
DUMPS: dict[str, tuple[str, Callable[[Path, Any], None], str]] = {
    "`.pt`": ("dump.pt", write_pt, "mib"),
    "`.jsonl`": ("dump.jsonl", write_jsonl, "mib"),
    "steps in one `.jsonl`": ("steps.jsonl", write_lines, "steps"),
    "steps, a `.pt` each": ("steps", write_files, "steps"),
}
COMMANDS = ("report", "doctor")


def measure(path: Path, command: str) -> dict[str, float]:
    """Run a command on a dump in a process of its own."""
    arguments = [sys.executable, "-c", CHILD, command, str(path)]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=machine.ROOT, check=False)
    found: dict[str, float] = json.loads(done.stdout) if done.returncode == 0 else {}
    if not found or found["code"] == 2 or not found["tokens"]:
        raise RuntimeError(f"{command} {path.name}: {done.stderr or done.stdout}")
    return found


def row(name: str, command: str, path: Path, found: dict[str, float]) -> str:
    """Format a result as a line of a Markdown table."""
    size = sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]))
    return (
        f"| {name} | {command} | {size / 2**20:,.0f} | {found['tokens'] / 1e6:.1f} | {found['seconds']:.0f} | "
        f"{found['mib']:.0f} |"
    )


def main(arguments: list[str] | None = None) -> int:
    """Write dumps, measure and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.reading", description=__doc__)
    parser.add_argument("--mib", type=float, default=1024.0, help="size of a file of each format")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the run of many steps")
    chosen = parser.parse_args(arguments)
    told = machine.describe()
    print(f"{told['cpu']}, one thread; Python {told['python']}, torch {told['torch']}; {machine.head()['date']}\n")
    print("| dump | command | MiB on disk | million tokens | s of one core | peak MiB above import |")
    print("|---|---|---|---|---|---|")
    for name, (file, write, size) in DUMPS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / file
            write(path, getattr(chosen, size))
            for command in COMMANDS:
                print(row(name, command, path, measure(path, command)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

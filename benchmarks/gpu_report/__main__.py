"""Everything that a GPU has to say about a commit, in one command and at most nine minutes.

`make gpu-report` from the root of a checkout, or, where the package is installed, `python -m benchmarks.gpu_report`. It
needs torch with CUDA, Triton, pytest and hypothesis, and no network. The report is written after every step.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu, machine
from benchmarks.gpu_report import page
from benchmarks.gpu_report.steps import PASSED, ROOT, Step, run_all
from benchmarks.measure import Budget

SECONDS = 525.0
# Where CUDA's tools lie when nobody put them on PATH.
TOOLS = "/usr/local/cuda/bin"
NO_GPU = 2

PYTHON = sys.executable
# The kernels are compiled, whatever the environment of the caller says.
COMPILED = {"TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1"}
# Every tensor its own allocation, so that a step beyond one is seen.
UNCACHED = {**COMPILED, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

USES_A_DEVICE = re.compile(r"def test_\w+\([^)]*\bdevice\b|mark\.gpu\b")


def gpu_tests() -> list[str]:
    """The files with tests that run on a GPU, from the root of the checkout."""
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if USES_A_DEVICE.search(path.read_text(encoding="utf-8"))]


def _module(name: str, *arguments: str) -> list[str]:
    return [PYTHON, "-m", f"benchmarks.{name}", *arguments]


def _checks(group: str) -> list[list[str]]:
    return [_module("gpu_report.checks", group, "--json", "{json}")]


def _sanitizer(tool: str) -> list[list[str]]:
    watch = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    return [[*watch, *command] for command in _checks("sanitized")]


def steps(processes: int) -> list[Step]:
    """What is done, in order; the limits together are the budget.

    Args:
        processes: How many may compile at the same time.
    """
    shards = [f"{i}/{processes}" for i in range(processes)]
    tests = [PYTHON, "-m", "pytest", "-q", "-m", "gpu", "-p", "benchmarks.gpu_report.shard", "-p", "no:cacheprovider"]
    parity = [
        [*tests, "--shard", shard, "--budget", "{seconds}", "--shard-json", "{json}", *gpu_tests()] for shard in shards
    ]
    warm = [_module("gpu_report.warm", "--shard", shard) for shard in shards]
    some = ["--seconds", "{seconds}", "--json", "{json}", "--parts"]
    times = _module("gpu", "--rounds", "1.5", *some, "times", "scaling")
    profile = _module("gpu", *some, "profile")
    watched = {"program": "compute-sanitizer"}
    return [
        Step("compile", "what is run below, compiled by several at a time", warm, 75, environment=COMPILED),
        Step("first", "the kernels run and equal the reference", _checks("first"), 30, environment=COMPILED),
        Step("benchmark", "times, bytes, memory", [times], 130, again="--resume", environment=COMPILED),
        Step("profile", "launches, copies, waits", [profile], 35, again="--resume", environment=COMPILED),
        Step("tests", "the tests that run on a GPU, a sample", parity, 95, environment=COMPILED),
        Step("bits", "the same bits in every call and packing", _checks("bits"), 25, environment=COMPILED),
        Step("calls", "launches, waits, graphs, torch.compile", _checks("calls"), 35, environment=COMPILED),
        Step("sizes", "a million sequences, more than 2^31 tokens", _checks("sizes"), 25, environment=COMPILED),
        Step("memcheck", "no access out of bounds", _sanitizer("memcheck"), 45, environment=UNCACHED, **watched),
        Step("racecheck", "no race in shared memory", _sanitizer("racecheck"), 30, environment=COMPILED, **watched),
    ]


def head(said: str | None) -> dict[str, Any]:
    """What stands at the top of a report.

    Args:
        said: The commit, as the caller says; for a copy that git knows nothing of, whose `dirty` is then None.
    """
    dirty: bool | None
    commit, dirty = machine.commit()
    if commit == "unknown" and said is not None:
        commit, dirty = said, None
    versions = {name: machine.version(name) for name in ("torch", "triton", "numpy", "pytest", "hypothesis")}
    return {
        "report": "gpu",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "versions": versions,
        "under_way": None,
        "steps": [],
    }


def chosen(everything: Sequence[Step], names: Sequence[str] | None, seconds: float) -> list[Step]:
    """The steps of these names, or all; given more seconds than they ask for, each has its share of them."""
    some = [step for step in everything if names is None or step.name in names]
    share = max(1.0, seconds / sum(step.limit for step in some))
    return [replace(step, limit=share * step.limit) for step in some]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    names = [step.name for step in steps(1)]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(), help="folder for gpu.json and gpu.md; default: this one")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole run, default %(default)s")
    parser.add_argument("--steps", nargs="+", choices=names, metavar="STEP", help=f"some of {', '.join(names)}")
    parser.add_argument("--commit", help="what this is a copy of, where there is no git to ask")
    parser.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, writes, and gives the exit status: 0 if every step passed, 1 if not, 2 where there is no GPU."""
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("gpu-report: torch sees no GPU here, so there is nothing to report and nothing was written")
        return NO_GPU
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), TOOLS])
    report = head(options.commit)

    def save(found: dict[str, Any]) -> None:
        gpu.write(options.out / "gpu.json", found)
        (options.out / "gpu.md").write_text(page.report(found), encoding="utf-8")
        if found["steps"] and found["under_way"] is None:
            print(page.one_line(found["steps"][-1]), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        run_all(
            chosen(steps(options.processes), options.steps, options.seconds),
            report,
            Path(folder),
            Budget(options.seconds),
            save,
        )
    print(f"gpu-report: {options.out / 'gpu.json'} and {options.out / 'gpu.md'}")
    return 0 if all(step["status"] == PASSED for step in report["steps"]) else 1


if __name__ == "__main__":
    sys.exit(main())

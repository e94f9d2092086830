"""Everything that a GPU has to say about a commit, in one command and at most nine minutes.

`make gpu-report` from the root of a checkout, or, where the package is installed, `python -m benchmarks.gpu_report`. It
needs torch with CUDA, Triton, pytest and hypothesis, and no network. The report is written while the steps run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu, machine
from benchmarks.gpu_report import page
from benchmarks.gpu_report.steps import PASSED, ROOT, UNDER_WAY, Step, run_all
from benchmarks.measure import Budget

# Of the whole run; with the installation before it and what ends processes behind it, less than nine minutes.
SECONDS = 515.0
# Where CUDA's tools lie when nobody put them on PATH.
TOOLS = "/usr/local/cuda/bin"
NO_GPU = 2

PYTHON = sys.executable
# The kernels are compiled, whatever the environment of the caller says.
COMPILED = {"TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1"}
# Where as many processes run as there are cores.
ONE_OF_MANY = {**COMPILED, "OMP_NUM_THREADS": "1"}
# Every tensor its own allocation, so that a step beyond one is seen.
UNCACHED = {**COMPILED, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# Seconds in which an operation is compiled and measured, and in which torch.compile is done with one.
HUNG, HUNG_TRACING = 45.0, 90.0

USES_A_DEVICE = re.compile(r"def test_\w+\([^)]*\bdevice\b|mark\.gpu\b")
# What is run in place of the tests that need a GPU when the report is rehearsed.
REHEARSED = ("not gpu and not slow and not peers and not browser", ("tests/definition/test_numerics.py",))


def gpu_tests() -> list[str]:
    """The files with tests that run on a GPU, from the root of the checkout."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if USES_A_DEVICE.search(path.read_text(encoding="utf-8"))]


def waves(processes: int, rehearsal: bool = False) -> list[list[Step]]:
    """What is done: waves of steps at the same time, in order; the longest limits together are the budget.

    What is promised comes first: that the kernels are right, then the figures. Whoever measures a time is alone on the
    GPU. What measures none comes last, all at once.

    What the limits are made of, with some 10 s in each for Python, torch and the driver to start. compile: 67 kernels
    of 1.4 s of a core and four graphs of the reference of half a minute or more, on twelve processes. benchmark: 36
    operations of 1.5 s of rounds and about 1 s of gate, memory and capture. traced: four operations, whose graphs are
    traced again in 5 to 10 s each and whose code is on disk by then. scaling: 20 points of 0.7 s and about as much
    beside it. profile: about a hundred profiles of a third of a second. The last wave is as long as what remains: the
    tests compile some thousand kernels and are a sample whatever they are given.

    Args:
        processes: How many may compile, or test, at the same time.
        rehearsal: On the CPU, in sizes that show nothing.
    """
    on = ["--device", "cpu"] if rehearsal else []
    # With less time than a compiler needs, nobody compiles.
    how = ["--tiny", "--seconds", "25"] if rehearsal else ["--seconds", "{seconds}"]
    shards = [f"{i}/{processes}" for i in range(processes)]
    marks, files = REHEARSED if rehearsal else ("gpu", gpu_tests())

    def module(name: str, *arguments: str) -> list[str]:
        return [PYTHON, "-m", f"benchmarks.{name}", *arguments, *on]

    def benchmark(name: str, what: str, limit: float, part: str, patience: float = HUNG) -> Step:
        command = module("gpu", "--json", "{json}", *how, "--rounds", "1.5", "--parts", part)
        return Step(name, what, [command], limit, again="--resume", patience=patience, environment=COMPILED)

    def checks(name: str, what: str, limit: float, *before: str, **more: Any) -> Step:
        command = [*before, *module("gpu_report.checks", more.pop("group", name), "--json", "{json}")]
        return Step(name, what, [command], limit, **{"again": "--resume", "environment": COMPILED, **more})

    def watched(tool: str, what: str, limit: float, **more: Any) -> Step:
        watch = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
        # Never again: a second run would leave out what the first one found an error in.
        more |= {"group": "sanitized", "program": "compute-sanitizer", "again": None}
        return checks(tool, what, limit, *watch, **more)

    tests = [PYTHON, "-m", "pytest", "-q", "-m", marks, "-p", "benchmarks.gpu_report.shard", "-p", "no:cacheprovider"]
    # A file that cannot be imported, for want of a package, is a failure and keeps none of the others from running.
    own = ["--continue-on-collection-errors", "--budget", "{seconds}", "--shard-json", "{json}"]
    parity = [[*tests, "--shard", shard, *own, *files] for shard in shards]
    warm = [module("gpu_report.warm", "--shard", shard) for shard in shards]
    return [
        [Step("compile", "what is run below, compiled by several at a time", warm, 75.0, environment=ONE_OF_MANY)],
        [checks("first", "the kernels run and equal the reference", 25.0)],
        [benchmark("benchmark", "times, bytes, memory", 130.0, "times")],
        [benchmark("traced", "times beside torch.compile", 60.0, "traced", patience=HUNG_TRACING)],
        [benchmark("scaling", "times by tokens, sequences, skew", 40.0, "scaling")],
        [benchmark("profile", "launches, copies, waits", 40.0, "profile")],
        [
            Step("tests", "the tests that run on a GPU, a sample", parity, 145.0, environment=ONE_OF_MANY),
            checks("bits", "the same bits in every call and packing", 145.0),
            checks("calls", "launches, waits, graphs, torch.compile", 145.0),
            checks("sizes", "a million sequences, more than 2^31 tokens", 145.0),
            watched("memcheck", "no access out of bounds", 145.0, environment=UNCACHED),
            watched("racecheck", "no race in shared memory", 145.0),
        ],
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
        "steps": [],
    }


def chosen(everything: Sequence[Sequence[Step]], names: Sequence[str] | None, seconds: float) -> list[list[Step]]:
    """The steps of these names, or all; given more seconds than they ask for, each has its share of them."""
    some = [[step for step in wave if names is None or step.name in names] for wave in everything]
    some = [wave for wave in some if wave]
    share = max(1.0, seconds / sum(max(step.limit for step in wave) for wave in some))
    return [[replace(step, limit=share * step.limit) for step in wave] for wave in some]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    names = [step.name for wave in waves(1) for step in wave]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(), help="folder for gpu.json and gpu.md; default: this one")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole run, default %(default)s")
    parser.add_argument("--steps", nargs="+", choices=names, metavar="STEP", help=f"some of {', '.join(names)}")
    parser.add_argument("--commit", help="what this is a copy of, where there is no git to ask")
    parser.add_argument("--processes", type=int, default=max(1, min(12, (os.cpu_count() or 2) * 3 // 4)))
    parser.add_argument("--rehearse", action="store_true", help="on the CPU: shows only how the steps play together")
    return parser.parse_args(arguments)


def write(folder: Path, found: dict[str, Any]) -> None:
    """gpu.json, and then gpu.md: whatever the second cannot show is in the first."""
    gpu.write(folder / "gpu.json", found)
    try:
        text = page.report(found)
    except Exception:  # noqa: BLE001  (said below)
        # What steps wrote before they were ended may have any shape, and a page that cannot show it must not lose the
        # steps that are still to come: gpu.json is written already, and the traceback stands where the page would.
        text = f"# A commit on a GPU\n\nThis page could not be made; gpu.json has it all.\n\n{traceback.format_exc()}"
    (folder / "gpu.md").write_text(machine.without_places(text), encoding="utf-8")


def stop(*_: object) -> None:
    """Whoever ends the report ends its steps, and what they wrote so far is kept."""
    sys.exit("gpu-report: ended from outside; what was there by then is written")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, writes, and gives the exit status: 0 if every step passed, 1 if not, 2 where there is no GPU."""
    options = parse(arguments)
    if not options.rehearse and not torch.cuda.is_available():
        print("gpu-report: torch sees no GPU here, so there is nothing to report and nothing was written")
        return NO_GPU
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), TOOLS])
    report = head(options.commit) | ({"rehearsal": True} if options.rehearse else {})
    told: set[str] = set()

    def save(found: dict[str, Any]) -> None:
        write(options.out, found)
        for step in found["steps"]:
            if step["status"] != UNDER_WAY and step["name"] not in told:
                told.add(step["name"])
                print(page.one_line(step), flush=True)

    signal.signal(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory() as folder:
        plan = chosen(waves(options.processes, options.rehearse), options.steps, options.seconds)
        run_all(plan, report, Path(folder), Budget(options.seconds), save)
    print(f"gpu-report: {options.out / 'gpu.json'} and {options.out / 'gpu.md'}")
    return 0 if all(step["status"] == PASSED for step in report["steps"]) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Everything that a GPU can tell about a commit, in one command and at most nine minutes.

`make gpu-report` from the root of a checkout, or, where the package is installed, `python -m benchmarks.gpu_report`. It
needs torch with CUDA, Triton, pytest and hypothesis, and no network. The report is written while the steps run.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.gpu_report import page
from benchmarks.gpu_report.steps import PASSED, ROOT, UNDER_WAY, Step, Wave, run_all

# Of the whole run; with the installation before it and the end of its processes less than nine minutes.
SECONDS = 515.0
# Where CUDA's tools are when they are not on PATH.
TOOLS = "/usr/local/cuda/bin"
NO_GPU = 2

PYTHON = sys.executable
# The kernels are compiled, whatever the environment of the caller says.
COMPILED = {"TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1"}
# For as many processes as there are cores.
ONE_OF_MANY = {**COMPILED, "OMP_NUM_THREADS": "1"}
# Every tensor its own allocation, so that a step beyond one is seen.
UNCACHED = {**COMPILED, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

USES_A_DEVICE = re.compile(r"def test_\w+\([^)]*\bdevice\b|mark\.gpu\b")
# Run in place of the tests that need a GPU when the report is rehearsed.
REHEARSED = ("not gpu and not slow and not peers and not browser", ["tests/definition/test_numerics.py"])


def gpu_tests() -> list[str]:
    """Return the files with tests that run on a GPU, from the root of the checkout."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if USES_A_DEVICE.search(path.read_text(encoding="utf-8"))]


def waves(processes: int, rehearsal: bool = False) -> list[Wave]:
    """Return all steps in order; the seconds of the waves together are the budget.

    First what is promised: that the kernels are right, then the figures. A step that measures times is alone on the
    GPU. The steps that measure none come last, all at once.

    The seconds, with some 10 s in each step for Python, torch and the driver to start:

    - compile: 67 kernels of 1.4 s of a core, four graphs of the reference of 30 s or more, on twelve processes.
    - benchmark: 36 operations of 1.5 s of rounds and about 1 s of comparison, memory and capture.
    - traced: four operations, whose graphs are traced again in 5 to 10 s each; their code is on disk by then.
    - scaling: 20 points of 0.7 s and about as much beside it.
    - profile: about a hundred profiles of a third of a second.
    - The last wave has the rest: the tests compile some thousand kernels, and are a sample whatever time they have.

    Args:
        processes: How many may compile, or test, at the same time.
        rehearsal: On the CPU, in sizes that show nothing.
    """
    on = ["--device", "cpu"] if rehearsal else []
    # With less time than a compiler needs, none is started.
    how = ["--tiny", "--seconds", "25"] if rehearsal else ["--seconds", "{seconds}"]
    marks, files = REHEARSED if rehearsal else ("gpu", gpu_tests())

    def module(name: str, *arguments: str) -> list[str]:
        return [PYTHON, "-m", f"benchmarks.{name}", *arguments, *on]

    def benchmark(name: str, what: str, part: str) -> Step:
        command = module("gpu", "--json", "{json}", *how, "--rounds", "1.5", "--parts", part)
        return Step(name, what, command, resumes=True, environment=COMPILED)

    def checks(group: str, what: str) -> Step:
        command = module("gpu_report.checks", group, "--json", "{json}")
        return Step(group, what, command, resumes=True, environment=COMPILED)

    def watched(tool: str, what: str, environment: dict[str, str]) -> Step:
        # Never resumed: a second run would leave out what the first one found an error in.
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        command += module("gpu_report.checks", "sanitized", "--json", "{json}")
        return Step(tool, what, command, needs="compute-sanitizer", environment=environment)

    # A file that cannot be imported, for want of a package, is a failure and keeps none of the others from running.
    tests = [PYTHON, "-m", "pytest", "-q", "-m", marks, "-p", "benchmarks.gpu_report.sample", "-p", "no:cacheprovider"]
    tests += [
        "--continue-on-collection-errors",
        "--part",
        "{part}",
        "--budget",
        "{seconds}",
        "--counts",
        "{json}",
        *files,
    ]
    many = {"processes": processes, "environment": ONE_OF_MANY}
    return [
        (75.0, [Step("compile", "everything below is compiled", module("gpu", "--compile", "{part}"), **many)]),
        (25.0, [checks("first", "the kernels run and equal the reference")]),
        (130.0, [benchmark("benchmark", "times, bytes, memory", "times")]),
        (60.0, [benchmark("traced", "times beside torch.compile", "traced")]),
        (40.0, [benchmark("scaling", "times by tokens, sequences, skew", "scaling")]),
        (40.0, [benchmark("profile", "launches, copies, waits", "profile")]),
        (
            145.0,
            [
                Step("tests", "the tests that run on a GPU, a sample", tests, **many),
                checks("bits", "the same bits in every call and packing"),
                checks("calls", "launches, waits, graphs, torch.compile"),
                checks("sizes", "a million sequences, more than 2^31 tokens"),
                watched("memcheck", "no access out of bounds", UNCACHED),
                watched("racecheck", "no race in shared memory", COMPILED),
            ],
        ),
    ]


def head(said: str | None) -> dict[str, Any]:
    """Return the head of a report.

    Args:
        said: The commit as the caller says, used for a copy without git, whose `dirty` is then None.
    """
    about = machine.head()
    if about["commit"] == "unknown" and said is not None:
        about |= {"commit": said, "dirty": None}
    versions = {name: machine.version(name) for name in ("torch", "triton", "numpy", "pytest", "hypothesis")}
    return {"report": "gpu", **about, "python": platform.python_version(), "versions": versions, "steps": []}


def chosen(everything: Sequence[Wave], names: Sequence[str] | None, seconds: float) -> list[Wave]:
    """Return the waves with the steps of these names, or all, stretched or shrunk to this many seconds together."""
    some = [(limit, [step for step in steps if names is None or step.name in names]) for limit, steps in everything]
    some = [(limit, steps) for limit, steps in some if steps]
    share = seconds / sum(limit for limit, _ in some)
    return [(share * limit, steps) for limit, steps in some]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    names = [step.name for _, steps in waves(1) for step in steps]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(), help="folder for gpu.json and gpu.md; default: this one")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole run, default %(default)s")
    parser.add_argument("--steps", nargs="+", choices=names, metavar="STEP", help=f"some of {', '.join(names)}")
    parser.add_argument("--commit", help="what this is a copy of, where there is no git to ask")
    parser.add_argument("--processes", type=int, default=max(1, min(12, (os.cpu_count() or 2) * 3 // 4)))
    parser.add_argument("--rehearse", action="store_true", help="on the CPU: shows only that the steps work together")
    return parser.parse_args(arguments)


def write(folder: Path, found: dict[str, Any]) -> None:
    """Write gpu.json, and then gpu.md; anything that the second cannot show is in the first."""
    machine.write(folder / "gpu.json", found)
    try:
        text = page.report(found)
    except Exception:  # noqa: BLE001  (said below)
        # A file of a step that was ended may have any shape, and a page that cannot show it must not lose the steps
        # that are still to come: gpu.json is written already, and the page holds the traceback.
        text = f"# A commit on a GPU\n\nThis page could not be made; gpu.json has it all.\n\n{traceback.format_exc()}"
    machine.write_text(folder / "gpu.md", text)


def stop(*_: object) -> None:
    """End the report, and thereby its steps, when a signal asks for it."""
    sys.exit("gpu-report: ended from outside; what was there by then is written")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write; return the exit status: 0 if every step passed, 1 if not, 2 where there is no GPU."""
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
        run_all(plan, report, Path(folder), save)
    print(f"gpu-report: {options.out / 'gpu.json'} and {options.out / 'gpu.md'}")
    return 0 if all(step["status"] == PASSED for step in report["steps"]) else 1


if __name__ == "__main__":
    sys.exit(main())

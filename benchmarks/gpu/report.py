"""Everything that a GPU can tell about a commit, in one command and at most seven minutes.

`make gpu-report` from the root of a checkout, or, where the package is installed, `python -m benchmarks.gpu.report`. It
needs torch with CUDA, Triton, pytest and hypothesis, and no network. Steps run one after the other, each in a process
with a time limit, and both files are written after each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks import machine
from benchmarks.gpu import page
from benchmarks.machine import ROOT

# Of the whole run; with the start before it less than seven minutes.
SECONDS = 400.0
# Where CUDA's tools are when they are not on PATH.
TOOLS = "/usr/local/cuda/bin"
NO_GPU = 2
PASSED, FAILED, OUT_OF_TIME, CUT, NOT_RUN = "passed", "failed", "out of time", "cut", "not run"
# None of these is a failure.
FINE = (PASSED, CUT, NOT_RUN)
# Lines of output that are kept of a step that did not pass. Seconds that it may take to end when it is interrupted.
KEPT_LINES, GRACE = 40, 5
# What a tool says that does not work on a device.
REFUSED = ("not supported", "ERR_NVGPUCTRPERM")
# Kernels whose hardware counters are read.
COUNTED = "regex:read_kernel|decide_kernel|apply_kernel|gradient_kernel|scale_kernel"

Found = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A step of the report.

    Args:
        name: Its name, and the stem of its files.
        what: What it shows, in words.
        command: The command; "{json}", "{xml}" stand for files that it may write, "{seconds}" for the time it has.
        seconds: That it may take.
        may_be_cut: Shows what it has found when its time is over, and has not failed unless that is wrong.
        needs: A program that must be installed, or the step is not run.
        environment: Variables to add to the report's own.
    """

    name: str
    what: str
    command: Sequence[str]
    seconds: float
    may_be_cut: bool = False
    needs: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def steps(rehearsal: bool = False) -> list[Step]:
    """Return all steps in order: first the measurements, last what may find no time left."""
    # In a rehearsal kernels run in an interpreter of PTX, and tensors on the CPU.
    python = [sys.executable, "-m"]
    run, tiny = ([*python, "lab.ptx.without_gpu"], ["--tiny"]) if rehearsal else (python, [])
    run, json_and_size = [*run, "benchmarks.gpu"], ["--json", "{json}", *tiny]
    tests = [*python, "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--junitxml", "{xml}"]
    tests += ["--continue-on-collection-errors"]
    # Each is a context of CUDA, and a compiler on a core.
    processes = min(12, len(os.sched_getaffinity(0)))
    tests += ["--numprocesses", f"{processes}"] if find_spec("xdist") and not rehearsal else []
    rooms = ["tests/kernels", "tests/backends", "tests/api"]
    quick = ["--quick", *(["--without-gpu", "tests/kernels/test_graphs.py"] if rehearsal else rooms)]
    checks = ["many_tokens", *([] if rehearsal else ["compiles"])]
    benchmark = [*run, "benchmark", *json_and_size, "--seconds", "{seconds}", "--rounds", "1.5"]
    benchmark += ["--cases", "SkyRL's row"] if rehearsal else ["--parts", "times", "compiled"]
    counters = ["ncu", "--clock-control", "none", "--csv", "--set", "basic", "--section", "WarpStateStats"]
    counters += ["--section", "ComputeWorkloadAnalysis", "--kernel-name", COUNTED, "--launch-count", "40"]

    def watched(tool: str, what: str, **environment: str) -> Step:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *run]
        command += ["checks", "sanitized", "--json", "{json}"]
        return Step(tool, what, command, 60.0, True, "compute-sanitizer", environment)

    each, everything = [*run, "kernels"], [*run, "checks", *checks, *json_and_size]
    return [
        Step("benchmark", "times, bytes, memory, launches", benchmark, 200.0),
        Step("kernels", "each kernel alone, registers", [*each, *json_and_size], 40.0),
        Step("tests", "the tests that need a GPU, a case each", [*tests, *quick], 100.0, may_be_cut=True),
        Step("checks", "sizes, torch.compile", everything, 60.0, may_be_cut=True),
        Step("counters", "hardware counters", [*counters, *each, "--once", *tiny], 40.0, True, "ncu"),
        # Every tensor its own allocation, so that a step beyond one is seen.
        watched("memcheck", "no access out of bounds", PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
        watched("racecheck", "no race in shared memory"),
        *([] if rehearsal else [Step("all tests", "the other cases, as many as fit", [*tests, *rooms], 200.0, True)]),
    ]


def run_step(step: Step, folder: Path, seconds: float) -> Found:
    """Run a step for so many seconds at most; return its entry in the report."""
    entry: Found = {"name": step.name, "what": step.what, "status": NOT_RUN, "seconds": 0.0}
    if step.needs and shutil.which(step.needs) is None:
        return entry | {"why": f"{step.needs} is not installed"}
    if seconds < 2 * GRACE:
        return entry | {"why": "no time was left"}
    wrote, tested, log = (folder / f"{step.name}.{kind}" for kind in ("json", "xml", "log"))
    limit = seconds - GRACE
    words = {"{json}": str(wrote), "{xml}": str(tested), "{seconds}": f"{limit - GRACE:.0f}"}
    # An interrupted pytest still writes its file. `timeout` ends whatever a step has started.
    command = ["timeout", "--signal=INT", f"--kill-after={GRACE}", f"{limit:.0f}"]
    command += [words.get(word, word) for word in step.command]
    environment = {"TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1", **step.environment}
    began = time.monotonic()
    with log.open("wb") as out:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=os.environ | environment, timeout=seconds + GRACE,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:  # it waits for a device that does not answer
            code = 124
    entry["seconds"] = round(time.monotonic() - began, 1)
    text = log.read_text(encoding="utf-8", errors="replace")
    over = CUT if step.may_be_cut else OUT_OF_TIME
    entry["status"] = PASSED if code == 0 else over if code in (124, 137) else FAILED
    if step.needs and code != 0 and any(refused in text for refused in REFUSED):
        entry |= {"status": NOT_RUN, "why": f"{step.needs} does not work on this device"}
    if wrote.exists():
        entry["found"] = json.loads(wrote.read_text(encoding="utf-8"))
    if tested.exists():
        entry["found"] = tests_of(tested)
    if entry["status"] == CUT and is_wrong(entry.get("found", {})):
        entry["status"] = FAILED
    if step.needs == "ncu" or entry["status"] != PASSED:
        entry["output"] = text.splitlines()[-10 * KEPT_LINES if step.needs == "ncu" else -KEPT_LINES :]
    return entry


def is_wrong(found: Found) -> bool:
    """Return whether tests have failed, or checks do not hold, in what a step has found when it was cut."""
    return bool(found.get("failed")) or any(isinstance(x, dict) and x.get("held") is False for x in found.values())


def tests_of(path: Path) -> Found:
    """Count the tests in a file of pytest, and keep the end of what failed."""
    counts: Found = {"tests": 0, "passed": 0, "skipped": 0, "failed": {}}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        counts["tests"] += 1
        wrong = [x for x in case if x.tag in ("failure", "error")]
        for one in wrong:
            name = f"{case.get('classname')}::{case.get('name')}"
            counts["failed"][name] = (one.text or "").splitlines()[-KEPT_LINES // 2 :]
        skipped = any(x.tag == "skipped" for x in case)
        counts["skipped"] += skipped
        counts["passed"] += not wrong and not skipped
    return counts


def head(said: str | None) -> Found:
    """Return the head of a report."""
    about = machine.head()
    if about["commit"] == "unknown" and said is not None:
        about |= {"commit": said, "dirty": None}
    versions = {name: machine.version(name) for name in ("torch", "triton", "numpy", "pytest", "hypothesis")}
    return {"report": "gpu", **about, "python": platform.python_version(), "versions": versions, "steps": []}


def write(folder: Path, found: Found) -> None:
    """Write gpu.json, and then gpu.md; anything that the second cannot show is in the first."""
    machine.write(folder / "gpu.json", found)
    try:
        text = page.report(found)
    except Exception:  # noqa: BLE001  (said below)
        # A step that was ended may have written anything, and a page that cannot show it must not lose the steps that
        # are still to come: gpu.json is written already, and the page holds the traceback.
        text = f"# A commit on a GPU\n\nThis page could not be made; gpu.json has it all.\n\n{traceback.format_exc()}"
    machine.write_text(folder / "gpu.md", text)


def clocks_in(path: Path) -> list[list[float]]:
    """Read what nvidia-smi has written each second: MHz of the multiprocessors and of the memory, watts, degrees."""
    rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [[float(x) for x in row] for row in rows if len(row) == 4 and not any("[" in x for x in row)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write; return the exit status: 0 where all is well, 1 where it is not, 2 where there is no GPU."""
    names = [step.name for step in steps()]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.report", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(), help="folder for gpu.json and gpu.md; default: this one")
    parser.add_argument("--seconds", type=float, help=f"of the whole run, default {SECONDS:.0f}")
    parser.add_argument("--steps", nargs="+", choices=names, metavar="STEP", help=f"some of {', '.join(names)}")
    parser.add_argument("--commit", help="what this is a copy of, where there is no git to ask")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU: shows only that the steps work together")
    options = parser.parse_args(arguments)
    if not options.rehearse and not torch.cuda.is_available():
        print("gpu-report: torch sees no GPU here, so there is nothing to report and nothing was written")
        return NO_GPU
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), TOOLS])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    report = head(options.commit) | ({"rehearsal": True} if options.rehearse else {})
    # An interpreter is slow, and no lease of a device ends.
    share = 10.0 if options.rehearse else 1.0
    end = time.monotonic() + (options.seconds or share * SECONDS)
    with tempfile.TemporaryDirectory() as name:
        folder, watch = Path(name), None
        if shutil.which("nvidia-smi"):
            query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
            command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "--loop=1"]
            watch = subprocess.Popen(command, stdout=(folder / "clocks.csv").open("wb"), stderr=subprocess.DEVNULL)
        try:
            for step in steps(options.rehearse):
                if options.steps is None or step.name in options.steps:
                    report["steps"].append(run_step(step, folder, min(share * step.seconds, end - time.monotonic())))
                    report["clocks"] = clocks_in(folder / "clocks.csv")
                    write(options.out, report)
                    print(page.one_line(report["steps"][-1]), flush=True)
        finally:
            if watch is not None:
                watch.terminate()
    print(f"gpu-report: {options.out / 'gpu.json'} and {options.out / 'gpu.md'}")
    return 0 if all(step["status"] in FINE for step in report["steps"]) else 1


if __name__ == "__main__":
    sys.exit(main())

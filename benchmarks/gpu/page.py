"""The GPU report as Markdown: a file of its own, and the part of docs/benchmarks.md about GPUs."""

from __future__ import annotations

from statistics import median

from benchmarks.gpu import tables as gpu_tables
from benchmarks.gpu.device import IN_A_ROW
from benchmarks.tables import Found, Table, commit_of, markdown, of_rows

METHOD = f"""\
**How.** In each measurement all results are compared with ours first, and ours with the reference: a wrong one is not
timed. Then all run once a round in random order, and so does a copy of 1 GiB within the device. Before each call the
L2 cache is overwritten. *GPU ms* is the time between two events around the replay of a CUDA graph that holds one
call; where the host waits inside the call it cannot be captured, and the events are around the call itself (marked
e). *Call ms* is the host's clock from the call until the device is done, *whole ms* includes reading the metrics.
Extra memory is the peak of torch's allocator beyond inputs and outputs. *GB/s* is the required bytes (each input read
once, each output written once) over GPU ms, *of a copy* its part of what the copy in the same rounds reached. *In a
row* is the time of one of {IN_A_ROW} calls in one graph, each on inputs of its own, started together.
torch.compile is measured apart with ours next to it, because compiling may take longer than all the rest; it is told
the shapes (`dynamic=False`).
"""


def saying(step: Found) -> str:
    """Return one sentence on the result of a step."""
    found = step.get("found")
    if "why" in step or not found:
        return str(step.get("why", ""))
    if "tests" in found:
        return (
            f"{found['passed']} of {found['tests']} passed, {len(found['failed'])} failed, {found['skipped']} skipped"
        )
    if "measured" in found:
        words = {"measured": "timed", "compiled": "by torch.compile too"}
        many = {word: sum("problem" not in one for one in found[name]) for name, word in words.items() if found[name]}
        many |= {"with a problem": len(gpu_tables.problems(found)), "not reached": len(found["not_reached"])}
        return ", ".join(f"{count} {word}" for word, count in many.items() if count)
    if "compiled" in found:
        return f"{len(found['compiled'])} kernels, {sum(one['spills'] > 0 for one in found['compiled'])} with spills"
    return f"{sum(one['held'] is True for one in found.values())} of {len(found)} hold"


def one_line(step: Found) -> str:
    """Progress."""
    return f"{step['name']}: {step['status']} after {step['seconds']:.0f} s; {saying(step)}"


def found_by(report: Found, name: str) -> Found:
    """Return what a step has found, empty where it has not run."""
    return next((step["found"] for step in report["steps"] if step["name"] == name and step.get("found")), {})


def own_tables(report: Found) -> list[Table]:
    """Steps, kernels, clocks and checks."""
    steps = [{"step": step["name"], "what it shows": step["what"], "status": step["status"], "": saying(step),
              "seconds": f"{step['seconds']:.0f}"} for step in report["steps"]]  # fmt: skip
    answer = {True: "yes", False: "no", None: "not finished"}
    held = [
        {"check": one["what"].rstrip("."), "holds": answer[one["held"]], "what was seen": one["said"]}
        for name in ("checks", "memcheck", "racecheck")
        for one in found_by(report, name).values()
    ]
    kernels = found_by(report, "kernels")
    names = ("MHz", "MHz of the memory", "W", "degrees")
    clocks = [
        {"each second": name, "least": min(values), "median": median(values), "most": max(values)}
        for name, values in zip(names, zip(*report.get("clocks", []), strict=True), strict=False)
    ]
    return [
        of_rows("Steps", steps, 4),
        of_rows("Microseconds of each kernel in a call", kernels.get("kernels", []), 3),
        of_rows("Registers and spills", kernels.get("compiled", []), 1),
        of_rows("Clocks and power", clocks, 1),
        of_rows("Checks", held, 3),
    ]


def facts(report: Found) -> list[str]:
    """Return date, commit, versions and machine."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    lines = ["A rehearsal on a CPU: nothing here says anything about a GPU.", ""] if "rehearsal" in report else []
    lines += [f"{commit_of(report)}.", f"Python {report['python']}, {versions}."]
    results = found_by(report, "benchmark")
    return [*lines, gpu_tables.processor(results["machine"])] if results else lines


def body(report: Found) -> list[str]:
    """Return facts, method, tables, and a list of what was not timed."""
    shown, results = own_tables(report), found_by(report, "benchmark")
    shown += gpu_tables.all_tables(results) if results else []
    lines = [*facts(report), "", METHOD, *markdown([table for table in shown if table.rows])]
    if results and gpu_tables.notes(results):
        lines += ["**Not timed:**", "", *(f"- {note}." for note in gpu_tables.notes(results)), ""]
    return lines


def report(found: Found) -> str:
    """Return the whole report, with the output of steps that did not pass."""
    lines = ["# A commit on a GPU", "", *body(found)]
    for step in found["steps"]:
        if step.get("output"):
            lines += [f"## End of the output of {step['name']} ({step['status']})", "", "```"]
            lines += [*step["output"], "```", ""]
    return "\n".join(lines).rstrip() + "\n"

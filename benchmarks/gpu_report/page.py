"""The GPU report as Markdown: a file of its own, and the part of docs/benchmarks.md about GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gpu import tables as gpu_tables
from benchmarks.gpu_report.steps import UNDER_WAY
from benchmarks.tables import Found, Table, markdown

METHOD = """\
**How.** In each measurement all results are compared with ours first, and ours with the reference: a wrong one is not
timed. Then all run once a round in random order, beside a copy of 1 GiB within the device. Before each call the L2
cache is overwritten. *GPU ms* is the time between two events around the replay of a CUDA graph that holds one call;
where the host waits inside the call it cannot be captured, and the events are around the call itself (marked e). *In a
row* is one of 16 calls in one graph, each on its own inputs, without gaps in which the device waits for the host. *Call
ms* is the host's clock from the call until the device is done, *whole ms* includes reading the metrics.
Launches, copies and waits of the host are counted by torch's profiler, extra memory by torch's allocator: its peak
beyond inputs and outputs. *GB/s* is the required bytes (each input read once, each output written once) over GPU ms,
*of a copy* its part of what the copy in the same rounds reached. "Restated" means the operations of a framework in its
order, written by us (`benchmarks/peers/restated.py`). torch.compile is measured apart with ours beside it, because
compiling may take longer than all the rest. It is told the shapes (`dynamic=False`), and its *first call* finds the
cache on disk that an earlier step has filled.
"""


def tests_of(step: Found) -> dict[str, int] | None:
    """Return the counts of all processes of a step of tests together."""
    found = [part["found"] for part in step["parts"] if part["found"]]
    if not found or "selected" not in found[0]:
        return None
    added = {name: sum(one[name] for one in found) for name in ("selected", "passed", "not_run")}
    return {**added, "failed": sum(len(one["failed"]) for one in found)}


def saying(step: Found) -> str:
    """Return one sentence on the result of a step."""
    if "why" in step:
        return str(step["why"])
    tests = tests_of(step)
    if tests is not None:
        said = "{passed} of {selected} passed, {failed} failed, {not_run} not reached"
        return said.format(**tests)
    found = step["parts"][0]["found"] if step["parts"] else None
    if isinstance(found, Mapping) and "measured" in found:
        words = {"measured": "timed", "traced": "beside torch.compile", "scaling": "on curves", "profiled": "profiled"}
        many = {word: sum("problem" not in one for one in found[name]) for name, word in words.items() if found[name]}
        many |= {"with a problem": len(gpu_tables.problems(found)), "not reached": len(found["not_reached"])}
        return ", ".join(f"{count} {word}" for word, count in many.items() if count or word in words.values())
    if isinstance(found, Mapping):
        return f"{sum(one['held'] is True for one in found.values())} of {len(found)} hold"
    return ""


def one_line(step: Found) -> str:
    """Progress."""
    return f"{step['name']}: {step['status']} after {step['seconds']:.0f} s; {saying(step)}"


def steps_table(report: Found) -> Table:
    """Every step and how it ended."""
    rows = [
        [step["name"], step["what"], step["status"], saying(step), f"{step['seconds']:.0f}"] for step in report["steps"]
    ]
    return Table("Steps", ["step", "what it shows", "status", "", "seconds"], rows, 4)


def checks_table(report: Found) -> Table:
    """Every check of every step, and its answer."""
    rows = []
    for step in report["steps"]:
        for part in step["parts"]:
            found = part["found"]
            if isinstance(found, Mapping) and all(isinstance(one, Mapping) and "held" in one for one in found.values()):
                for one in found.values():
                    answer = {True: "yes", False: "no", None: "not finished"}[one["held"]]
                    rows.append([step["name"], one["what"].rstrip("."), answer, one["said"].replace("|", "/")])
    return Table("Checks", ["step", "check", "holds", "what was seen"], rows, 4)


def benchmark_of(report: Found) -> Found | None:
    """Return the results of all parts of the benchmark together, None if there are none."""
    found = [
        step["parts"][0]["found"]
        for step in report["steps"]
        if step["name"] in ("benchmark", "traced", "scaling", "profile") and step["parts"]
    ]
    found = [part for part in found if part is not None]
    lists = ("measured", "traced", "scaling", "profiled", "not_reached")
    return None if not found else {**found[0], **{name: [x for part in found for x in part[name]] for name in lists}}


def facts(report: Found) -> list[str]:
    """Return date, commit, versions and machine."""
    states = {True: " with uncommitted changes", False: "", None: " (of a copy without git, as its caller says)"}
    state = states[report["dirty"]]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    lines = ["A rehearsal on a CPU: nothing here says anything about a GPU.", ""] if "rehearsal" in report else []
    lines += [f"{report['date']}, commit {report['commit'][:12]}{state}.", f"Python {report['python']}, {versions}."]
    results = benchmark_of(report)
    if results is not None:
        lines.append(gpu_tables.processor(results["machine"]))
    return lines


def pictures(results: Found) -> list[str]:
    """Return links to the pictures for which there are numbers."""
    there = {"scaling": gpu_tables.scaling(results), "speedup": gpu_tables.speedups(results)}
    texts = {"scaling": "Bandwidth against tokens, sequences and skew", "speedup": "Speed-ups of whole calls"}
    return [f"![{texts[name]}]({gpu_tables.PICTURES[name]})" for name, drawn in there.items() if drawn]


def body(report: Found) -> list[str]:
    """Return facts, method, tables, and a list of what was not timed."""
    lines = [*facts(report), "", METHOD]
    shown = [steps_table(report), checks_table(report)]
    results = benchmark_of(report)
    if results is not None:
        shown += gpu_tables.all_tables(results)
    lines += markdown([table for table in shown if table.rows])
    if results is not None and gpu_tables.notes(results):
        lines += ["**Not timed:**", "", *(f"- {note}." for note in gpu_tables.notes(results)), ""]
    return lines


def report(found: Found) -> str:
    """Return the whole report, with the output of steps that did not pass."""
    lines = ["# A commit on a GPU", "", *body(found)]
    early = [step["name"] for step in found["steps"] if step["status"] == UNDER_WAY]
    if early:
        lines += [f"The report ends in the step {', '.join(early)}.", ""]
    for step in found["steps"]:
        for part in step["parts"]:
            if part.get("output"):
                lines += [f"## End of the output of {step['name']} ({part['status']})", "", "```"]
                lines += [*part["output"], "```", ""]
    return "\n".join(lines).rstrip() + "\n"

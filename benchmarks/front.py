"""README's table of speed, from the committed results; `python -m benchmarks.report` puts it there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.contenders import BY_HAND, COMPILED, OURS, VERL
from benchmarks.cpu_tables import median, said_threads, usual
from benchmarks.tables import number

BEGIN, END = "<!-- made by `python -m benchmarks.report`; a test compares them -->\n", "<!-- end of what is made -->"
SHAPES = ((256, 2048), (2048, 8192))
NAMES = (VERL, BY_HAND, OURS, COMPILED)


def part(results: Mapping[str, Any] | None) -> str:
    """Milliseconds of padded batches with the fewest threads that were used, and where they were measured."""
    if results is None:
        return ""
    cases = usual(results)
    head = [f"milliseconds a call, {said_threads(cases[0]['threads'])}", *NAMES]
    lines = [head, [":--", *["--:"] * len(NAMES)]]
    for case in cases:
        if case["layout"] == "padded" and tuple(case["shape"]) in SHAPES:
            size = f"{case['shape'][0]} x {case['shape'][1]}, {case['workload']}"
            lines.append([size, *(number(median(case, name)) for name in NAMES)])
    about = results["machine"]
    where = f"{about['cpu']}, torch {about['torch']}, {results['date']}, commit {results['commit'][:12]}."
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", where]) + "\n"


def put(page: str, results: Mapping[str, Any] | None) -> str:
    """A page with the table between its two comments."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"page: expected {BEGIN.strip()} and then {END}, got a page without them")
    return "\n".join([before + BEGIN, part(results), END + after])

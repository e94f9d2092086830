"""Counts of one call from a profile: launches, copies, waits of the host, and how long the device was busy.

Read from the trace that torch's profiler exports; categories and names are those of the profiler's own viewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

LABEL = "the measured call"
# cudaMemcpy without Async waits too.
BLOCKING_COPY = "cudaMemcpy"


@dataclass
class Counts:
    """Counts of one call.

    Attributes:
        kernels: Kernels launched, one by one or inside a graph.
        fills: Calls that set memory to a value.
        copies: Copies between host and device and within the device.
        syncs: Waits of the host for the device.
        busy_ms: Sum of the durations of kernels, copies and fills.
        longest: The kernels that took longest, by name: (times, milliseconds).
    """

    kernels: int = 0
    fills: int = 0
    copies: int = 0
    syncs: int = 0
    busy_ms: float = 0.0
    longest: dict[str, tuple[int, float]] = field(default_factory=dict)


def counts(events: Iterable[Mapping[str, Any]], most: int = 8) -> Counts | None:
    """Count the call under LABEL, with nothing else on the device; None if the profiler saw no device."""
    complete = [event for event in events if event.get("ph") == "X"]
    marks = [e for e in complete if e["name"] == LABEL and e.get("cat") == "user_annotation"]
    if len(marks) != 1:
        raise ValueError(f"trace: expected one mark {LABEL!r}, got {len(marks)}")
    start, end = marks[0]["ts"], marks[0]["ts"] + marks[0]["dur"]
    found, of_kernels = Counts(), dict[str, tuple[int, float]]()
    seen = False
    for event in complete:
        category, name = event.get("cat"), event["name"]
        if category in ("cuda_runtime", "cuda_driver"):
            seen = True
            waits = "Synchronize" in name or name == BLOCKING_COPY
            found.syncs += waits and start <= event["ts"] <= end
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            seen = True
            found.kernels += category == "kernel"
            found.copies += category == "gpu_memcpy"
            found.fills += category == "gpu_memset"
            found.busy_ms += event["dur"] / 1e3
            if category == "kernel":
                times, taken = of_kernels.get(name, (0, 0.0))
                of_kernels[name] = times + 1, taken + event["dur"] / 1e3
    if not seen:
        return None
    ranked = sorted(of_kernels.items(), key=lambda item: -item[1][1])[:most]
    found.longest = {name: (times, round(taken, 5)) for name, (times, taken) in ranked}
    return found

"""Results of benchmarks whose answers are easy, and tiny cases, for the tests in tests/benchmarks."""

from __future__ import annotations

from typing import Any


def results_of_cpu(**changed: Any) -> dict[str, Any]:
    """Return results of the CPU benchmark: ours 2 ms, by hand 6, verl 20, with verl's metrics absent."""
    from benchmarks.cases.contender import BY_HAND, OURS, VERL, VERL_METRICS

    def row(name: str, wall: list[float], temporaries: int = 0) -> dict[str, Any]:
        times = {"wall_ms": wall, "cpu_ms": wall, "system_ms": 0.0, "faults": 3, "first_ms": 9.0}
        return {"name": name, "note": "", **times, "temporaries": temporaries, "outputs": 0}

    rows = [
        row(OURS, [1.0, 2.0, 30.0], 2 << 20),
        {"name": VERL_METRICS, "note": "absent: not asked for"},
        row(BY_HAND, [5.0, 6.0, 7.0]),
        row(VERL, [19.0, 20.0, 21.0], 10 << 20),
    ]
    case = {
        "pages": "default", "shape": [2048, 8192], "layout": "padded", "workload": "metrics only", "threads": 1,
        "slots": 10, "tokens": 5, "required_bytes": 4_000_000, "calibration_ms": [1.0, 1.1, 1.2], "rows": rows,
    }  # fmt: skip
    machine = {
        "cpu": "a processor", "cores": 2, "caches": {"L2": "1024K"}, "system": "Linux x86_64", "python": "3.11.7",
        "torch": "2.13.0", "vectors": "AVX512", "verl": "0.9.1", "allocator": {},
    }  # fmt: skip
    return {
        "date": "2026-01-01", "commit": "c" * 40, "dirty": True, "machine": machine, "import_ms": [20.0, 60.0, 30.0],
        "cases": [case], "blocks": [], **changed,
    }  # fmt: skip


def results_of_gpu(case: str = "16M", operation: str = "TOKEN", **changed: Any) -> dict[str, Any]:
    """Return results of the benchmark of a GPU: 14 MB in 10 us beside a copy of 2 GB in 1 ms."""
    from benchmarks.cases import operations
    from benchmarks.cases.contender import BY_HAND, EAGER, OURS, TRACED, VERL

    def milliseconds(median: float) -> dict[str, float]:
        return {"median": median, "low": median / 2, "high": median * 2}

    def row(name: str, device: float, wall: float, **more: Any) -> dict[str, Any]:
        times = {"device_ms": milliseconds(device), "call_ms": milliseconds(device), "wall_ms": milliseconds(wall)}
        return {"name": name, "note": "", "how": "graph", "temporaries": 1 << 20, **times, **more}

    alone = {"kernels": 3, "fills": 1, "copies": 0, "syncs": 0, "busy_ms": 0.5, "longest": {"read_kernel": (2, 0.01)}}
    whole = {**alone, "syncs": 1}
    found = {
        "case": case, "operation": getattr(operations, operation).name, "tokens": 900_000,
        "slots": 1_000_000, "sequences": 10, "layout": "packed", "logp": "float32", "mask": "bool",
        "bytes_per_slot": 14, "required_bytes": 14_000_000, "copy_bytes": 2_000_000_000, "rounds": 5,
        "copy_ms": milliseconds(1.0),
        "rows": [
            row(OURS, 0.010, 0.1),
            row(EAGER, 0.040, 0.5),
            row(BY_HAND, 0.080, 2.5, how="events"),
            {"name": VERL, "note": "absent: it has no packed form"},
        ],
        **changed,
    }  # fmt: skip
    seen = [{"name": BY_HAND, "on_device": alone}, {"name": OURS, "on_device": alone, "whole": whole}]
    traced = {**found, "rows": [row(OURS, 0.010, 0.1), row(TRACED, 0.040, 0.5, first_s=7.0)]}
    about = {
        "gpu": "a GPU", "multiprocessors": 132, "l2_bytes": 50 << 20, "memory_bytes": 80 << 30, "cuda": "13.0",
        "driver": "580.1", "cores": 16, "cpu": "a processor", "python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0",
    }  # fmt: skip
    return {
        "tiny": False, "date": "2026-01-01", "commit": "c" * 40, "dirty": True, "machine": about,
        "measured": [found], "traced": [traced], "scaling": [{"axis": "tokens", **found}], "not_reached": [],
        "profiled": [{"case": case, "operation": found["operation"], "rows": seen}],
    }  # fmt: skip

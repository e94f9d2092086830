"""Results of a benchmark whose answers are easy, for the tests in tests/benchmarks."""

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

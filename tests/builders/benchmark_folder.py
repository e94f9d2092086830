"""The folder of benchmarks as a package, for tests of its own logic."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def imported() -> Iterator[ModuleType]:
    """Import the folder by its path: with the root of the checkout on sys.path, `kernels` would be the wrong one."""
    folder = ROOT / "benchmarks"
    spec = importlib.util.spec_from_file_location(
        "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["benchmarks"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]


def load(name: str) -> ModuleType:
    """A module of it."""
    return importlib.import_module(f"benchmarks.{name}")


def tiny(name: str) -> Any:
    """A case of the device benchmark, of a size that a CPU does in no time."""
    return load("batches").named(name).tiny()


def compiled_ones_left_out(batch: Any, operation: Any) -> list[Any]:
    """Everybody who needs no compiler."""
    contenders = load("device_contenders")
    return [who for who in contenders.contenders(batch, operation) if who.name != load("contenders").COMPILED]


def results_of(case: str = "16M", operation: str = "TOKEN", **changed: Any) -> dict[str, Any]:
    """A run whose answers are easy: 14 MB in 10 us beside a copy of 2 GB in 1 ms."""
    names = load("device_contender")

    def milliseconds(median: float) -> dict[str, float]:
        return {"median": median, "low": median / 2, "high": median * 2}

    def row(name: str, device: float, wall: float, **more: Any) -> dict[str, Any]:
        times = {"device_ms": milliseconds(device), "call_ms": milliseconds(device), "wall_ms": milliseconds(wall)}
        return {"name": name, "note": "", "how": "graph", "temporaries": 1 << 20, **times, **more}

    alone = {"kernels": 3, "fills": 1, "copies": 0, "syncs": 0, "busy_ms": 0.5, "longest": {"read_kernel": (2, 0.01)}}
    whole = {**alone, "syncs": 1}
    found = {
        "case": case, "whose": "", "operation": getattr(load("operations"), operation).name, "tokens": 900_000,
        "slots": 1_000_000, "sequences": 10, "layout": "packed", "logp": "float32", "mask": "bool",
        "bytes_per_slot": 14, "required_bytes": 14_000_000, "copy_bytes": 2_000_000_000, "rounds": 5,
        "copy_ms": milliseconds(1.0),
        "rows": [
            row(names.OURS, 0.010, 0.1),
            row(names.EAGER, 0.040, 0.5),
            row(names.BY_HAND, 0.080, 2.5, how="events"),
            {"name": names.VERL, "note": "absent: it has no packed form"},
        ],
        **changed,
    }  # fmt: skip
    seen = [{"name": names.BY_HAND, "on_device": alone}, {"name": names.OURS, "on_device": alone, "whole": whole}]
    traced = {**found, "rows": [row(names.OURS, 0.010, 0.1), row(names.TRACED, 0.040, 0.5, first_s=7.0)]}
    profiled = {"case": case, "operation": found["operation"], "rows": seen}
    points = [{"axis": "tokens", **found}]
    about = {
        "gpu": "a GPU", "multiprocessors": 132, "l2_bytes": 50 << 20, "memory_bytes": 80 << 30, "cuda": "13.0",
        "driver": "580.1", "cores": 16, "cpu": "a processor", "python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0",
    }  # fmt: skip
    head = {"tiny": False, "date": "2026-01-01", "commit": "c" * 40, "dirty": True, "machine": about}
    lists = {"measured": [found], "traced": [traced], "scaling": points, "profiled": [profiled], "not_reached": []}
    return {**head, **lists}

"""The kernels by themselves: `python -m benchmarks.gpu kernels --json FILE`.

Microseconds of each kernel in a call, by torch's profiler, and registers and spills of those that were compiled. With
`--once` the calls run once and nothing is measured: for a profiler of hardware counters around this process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from triton.runtime.jit import JITFunction

from benchmarks import machine
from benchmarks.cases.batches import CASES, make
from benchmarks.cases.contenders import ours
from benchmarks.cases.operations import BOTH, METRICS, PRODUCT, TOKEN
from benchmarks.gpu.device import Gpu

CALLS = [(name, operation) for name in ("16M", "16M in 100,000") for operation in (METRICS, TOKEN, PRODUCT, BOTH)]


def compiled() -> Iterator[dict[str, Any]]:
    """Yield registers, spills and shared memory of each kernel that was compiled."""
    modules = [module for name, module in sys.modules.items() if name.startswith("rollout_corr.kernels.")]
    functions = {x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)}
    for function in sorted(functions, key=lambda x: x.__name__):
        for caches in function.device_caches.values():
            for kernel in caches[0].values():
                about = {"registers": kernel.n_regs, "spills": kernel.n_spills, "shared": kernel.metadata.shared}
                yield {"kernel": function.__name__, **about}


def run(where: Gpu, options: argparse.Namespace) -> int:
    """Measure and write."""
    found: dict[str, Any] = {"kernels": [], "compiled": []}
    for name, operation in CALLS[:2] if options.tiny else CALLS:
        call, _ = ours(make(CASES[name].tiny() if options.tiny else CASES[name], "cuda"), operation)
        call()
        if options.once:
            continue
        for kernel, times, us in where.kernels(call):
            one = {"case": name, "operation": operation.name, "kernel": kernel.partition("<")[0][:60], "times": times}
            found["kernels"].append(one | {"us": round(us, 2)})
        found["compiled"] = list(compiled())
        if options.json is not None:
            machine.write(options.json, found)
        where.free()
    return 0

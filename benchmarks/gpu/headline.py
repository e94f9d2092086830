"""The headline of a GPU, before anything else may go wrong: `python -m benchmarks.gpu headline --json FILE`.

It names the device, measures its copy bandwidth, and compares one result with the reference. Then it measures each
call: its time; its time in a CUDA graph of 16 calls, which is launched once; the clock of the multiprocessors right
after; its launches, and whether the host waits. The file is written after each of these.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import rollout_corr as rc
from benchmarks import machine
from benchmarks.cases import gate
from benchmarks.cases.batches import CASES, make
from benchmarks.cases.contender import EAGER, OURS
from benchmarks.cases.contenders import contenders, ours
from benchmarks.cases.operations import BOTH, METRICS, TOKEN, bytes_per_slot
from benchmarks.gpu.device import IN_A_ROW, MOST_IN_A_ROW, Gpu
from rollout_corr.kernels.launches import Launch, compiled_meanwhile

HEADLINE = [
    (name, operation) for name in ("32k in 256", "1M", "16M", "16M in 100,000") for operation in (METRICS, TOKEN, BOTH)
]
ROUNDS = 15


def launches_of(call: Callable[[], object]) -> int:
    """Count the kernels that a call launches."""
    run, seen = Launch.run, []
    with mock.patch.object(Launch, "run", lambda launch: (seen.append(launch), run(launch))):
        call()
    return len(seen)


def run(where: Gpu, options: argparse.Namespace) -> int:
    """Measure and write; return the exit status, 1 if the kernels do not equal the reference."""
    found: dict[str, Any] = {"machine": where.facts(), "calls": []}

    def save(**more: Any) -> None:
        found.update(more)
        if options.json is not None:
            machine.write(options.json, found)
        print(more, flush=True)

    def median(call: Callable[[], object]) -> float:
        taken = [where.timed(call) for _ in range(ROUNDS)]
        where.synchronize()
        return statistics.median(read() for read in taken)

    calls = HEADLINE[:3] if options.tiny else HEADLINE
    save()
    save(copy_gb_s=round(where.copy_bytes / median(where.copy) / 1e9, 1))
    cases = {name: CASES[name].tiny() if options.tiny else CASES[name] for name, _ in HEADLINE}
    with compiled_meanwhile(len(os.sched_getaffinity(0))):
        for name, operation in calls:
            ours(make(cases[name], "cuda"), operation)[0]()
    batch = make(cases["32k in 256"], "cuda")
    try:
        for operation in (METRICS, TOKEN, BOTH):
            pair = [who for who in contenders(batch, operation) if who.name in (OURS, EAGER)]
            gate.check(batch, operation, {who.name: who.whole() for who in pair if who.whole is not None})
        save(agrees=f"3 operations equal the reference; {rc.backend_for(batch.old).reason}")
    except gate.WrongResult as problem:
        save(agrees=None, problem=str(problem))
    for name, operation in calls:
        # Each call on its own inputs; those of a large batch are larger than a cache.
        count = 1 if options.tiny else IN_A_ROW
        several = [make(cases[name], "cuda", i) for i in range(count if cases[name].tokens <= MOST_IN_A_ROW else 1)]
        in_a_row = [ours(one, operation)[0] for one in several] * (count // len(several))
        batch, call = several[0], in_a_row[0]
        call()
        seconds = median(where.graph(in_a_row)) / count
        clock = where.megahertz()
        speed = batch.slots * bytes_per_slot(batch, operation) / seconds / 1e9
        about = {"MHz": clock, "launches": launches_of(call), "waits": where.waits(call)}
        one = {
            "case": name,
            "operation": operation.name,
            "us": round(1e6 * seconds, 2),
            "gb_s": round(speed, 1),
            **about,
        }
        save(calls=[*found["calls"], one])
        where.free()
    return 0 if found["agrees"] else 1

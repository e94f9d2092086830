"""Compile what the benchmark will run, before it runs: `python -m benchmarks.gpu_report.warm --shard 0/8`.

Several of these run at the same time and leave their work in the caches on disk, so that the benchmark, which has to be
alone on the GPU, spends its time on measuring.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks import batches, gpu, operations
from benchmarks.batches import Case
from benchmarks.contenders import OURS
from benchmarks.device_contender import TRACED
from benchmarks.device_contenders import contenders, with_compiler
from benchmarks.operations import TOKEN, Operation


def work(part: int, parts: int) -> Iterator[tuple[Case, Operation, bool]]:
    """(case, operation, whether torch.compile takes part) of a part of what has to be compiled.

    What takes longest stands first, so that it is spread over the parts; the curve over sequences has all shapes of
    the kernels.
    """
    traced = [(*pair, True) for pair in gpu.plan(False, None, operations.TRACED)]
    plan = [(*pair, False) for pair in gpu.plan(False, None)]
    curve = [(case, TOKEN, False) for axis, case in gpu.scaling(False) if axis == "sequences"]
    yield from [*traced, *plan, *curve][part::parts]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs ours and what compiles for long, once each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report.warm")
    parser.add_argument("--shard", required=True, help="I/N")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="on the CPU in tiny sizes")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("warm: torch sees no GPU here")
    part, _, parts = options.shard.partition("/")
    for case, operation, traced in work(int(part), int(parts)):
        batch = batches.make(case if options.device == "cuda" else case.tiny(), options.device)
        for who in (with_compiler if traced else contenders)(batch, operation):
            if who.whole is not None and who.name in (OURS, TRACED):
                who.whole()
        print(case.name, operation.name, flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

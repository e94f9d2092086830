"""Compile what the benchmark will run, before it runs: `python -m benchmarks.gpu_report.warm --shard 0/8`.

Several of these run at the same time and leave their work in the caches on disk, so that the benchmark, which has to be
alone on the GPU, spends its time on measuring.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks import batches, gpu
from benchmarks.batches import Case
from benchmarks.contenders import OURS
from benchmarks.device_contenders import contenders
from benchmarks.operations import TOKEN, Operation


def work(part: int, parts: int) -> Iterator[tuple[Case, Operation]]:
    """A part of what has to be compiled; the curve over sequences has all shapes of the kernels."""
    curve = ((case, TOKEN) for axis, case in gpu.scaling(False) if axis == "sequences")
    everything = [*gpu.plan(False, None), *curve]
    yield from everything[part::parts]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs ours and what compiles for long, once each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report.warm")
    parser.add_argument("--shard", required=True, help="I/N")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("warm: torch sees no GPU here")
    part, _, parts = options.shard.partition("/")
    for case, operation in work(int(part), int(parts)):
        batch = batches.make(case, "cuda")
        for who in contenders(batch, operation):
            if who.whole is not None and (who.name == OURS or who.slow):
                who.whole()
        print(case.name, operation.name, flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

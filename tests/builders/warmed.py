"""A warm-up with Triton's compiler and without a GPU, in a process of its own.

`PYTHONPATH=tests TRITON_INTERPRET=0 python -m builders.warmed WHAT THREADS` prints as JSON how many kernels it needed,
how many of them were compiled and not found on disk, and the seconds.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from unittest import mock

import triton
from triton.compiler import ASTSource

import rollout_corr as rc
from builders.calls import example
from builders.launched import Driver
from rollout_corr.backends import batch as reading
from rollout_corr.backends import operators

TOKEN = rc.Spec(rc.Weight.token(upper=2.0))
WHAT = {
    "one": {"spec": rc.Spec(), "aligned": True, "mean_lengths": (500, 500)},
    "packed": {"spec": TOKEN, "loss": rc.Loss(kl=rc.KL("k3", 0.001)), "aligned": True},
}


def cpu_seconds():
    """CPU seconds of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main():
    driver, made, compiles, front_end = Driver(), [], triton.compiler.compile, ASTSource.make_ir

    def compiled(src, target=None, options=None, **others):
        return driver.load(compiles(src, target=target, options=options, **others), options)

    def lowered(self, *arguments, **others):
        made.append(self.name)
        return front_end(self, *arguments, **others)

    triton.runtime.driver.set_active(driver)
    with (
        mock.patch.object(triton.compiler, "compile", compiled),
        mock.patch.object(ASTSource, "make_ir", lowered),
        mock.patch.object(operators, "why_not", return_value=None),
        mock.patch.object(reading, "checked_offsets", lambda offsets, tokens: offsets),
    ):
        start, before = time.time(), cpu_seconds()
        rc.warmup(*example(), **WHAT[sys.argv[1]], threads=int(sys.argv[2]), progress=True)
        seconds = {"cpu": cpu_seconds() - before, "wall": time.time() - start}
    sys.stdout.write(json.dumps({"kernels": len(driver.compiled), "compiled": len(made), **seconds}))


if __name__ == "__main__":
    main()

"""Compile the kernels ahead of time for GPU targets, and report registers and spills.

Three things have to hold, or the command fails:

- Every variant compiles for every target.
- Loops over tokens store or load at most 16 bytes of what a thread spills. What is stored before a loop and loaded
  behind it costs a program two accesses and may be more.
- Where fp32 log-probs are aligned, `read` and `gradient` load all of them 128 bits at a time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from lab.aot.file_variants import FILE_VARIANTS
from lab.aot.loss_variants import LOSS_FEW, LOSS_VARIANTS
from lab.aot.machine_code import MachineCode, read_machine_code
from lab.aot.step_variants import STEP_VARIANTS
from lab.aot.variant import LossVariant, StepVariant, Variant
from lab.aot.variants import FEW, OF_NEW_VARIANTS, SPLIT_VARIANTS, TURN_VARIANTS, VARIANTS
from rollout_corr.backends import operators

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")

# Bytes a thread, in loops.
MOST_SPILLED = 16

# Of both operators.
EVERY: dict[str, Variant | LossVariant | StepVariant] = {
    **VARIANTS,
    **OF_NEW_VARIANTS,
    **SPLIT_VARIANTS,
    **TURN_VARIANTS,
    **LOSS_VARIANTS,
    **FILE_VARIANTS,
    **{f"step_{name}": variant for name, variant in STEP_VARIANTS.items()},
}
SEQUENCE_KERNELS = ("gather", "decide", "sequences", "finish", "close")

NUMBERS = ("registers", "spilled", "in loops", "shared", "instructions", "a token", "cpu s")
COLUMNS = ("variant", "target", "kernel", *NUMBERS, "loads", "stores")


class KernelRow(NamedTuple):
    """One kernel of one variant for one target.

    Attributes:
        variant: Its name.
        target: The GPU.
        kernel: "read", "gather", "decide" or "apply" of `correct`; "sum", "gradient", "sequences", "finish" or "scale"
            of `policy_loss`.
        shared: Bytes of shared memory of a program.
        tokens: How many tokens a thread has; 0 if the kernel looks at none.
        seconds: CPU seconds of the compilation; next to none if Triton had it on disk.
        code: What the disassembly says.
    """

    variant: str
    target: str
    kernel: str
    shared: int
    tokens: int
    seconds: float
    code: MachineCode

    def cells(self) -> tuple[str, ...]:
        """The row of the table; instructions a token count each instruction once."""
        code, each = self.code, f"{self.code.instructions / self.tokens:.0f}" if self.tokens else "-"
        numbers = (code.registers, code.spilled, code.spilled_in_loops, self.shared, code.instructions)
        widths = (" ".join(f"{many}x{bits}" for bits, many in x.items()) or "-" for x in (code.loads, code.stores))
        return (*self[:3], *map(str, numbers), each, f"{self.seconds:.1f}", *widths)


def main(arguments: list[str]) -> int:
    """Compile and report; 0 if all holds, 1 if not."""
    parser = argparse.ArgumentParser(prog="make kernels", description=str(__doc__).splitlines()[0])
    parser.add_argument("--target", nargs="+", default=TARGETS, choices=TARGETS, help="GPUs (default: all)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--variant", nargs="+", default=tuple(EVERY), metavar="NAME", help="names (default: all)")
    few = (*FEW, *LOSS_FEW, "file_packed")
    which.add_argument("--few", action="store_const", dest="variant", const=few, help="a selection of the variants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.variant if name not in EVERY]
    if unknown:
        parser.error(f"--variant: expected some of {', '.join(EVERY)}; got {unknown[0]!r}")
    if operators.MISSING_TRITON is not None:
        parser.error(operators.MISSING_TRITON)
    if operators.interprets():
        parser.error("TRITON_INTERPRET=1 is set, so the kernels are interpreted and cannot be compiled")
    return publish(*compile_all(options.variant, options.target, options.jobs))


def compile_all(variants: Iterable[str], targets: Iterable[str], jobs: int) -> tuple[list[KernelRow], list[str]]:
    """Compile variants for targets, in processes of their own: Triton compiles one kernel at a time.

    Returns:
        The kernels, and a line for each variant that does not compile.
    """
    rows: list[KernelRow] = []
    failures: list[str] = []
    # Not forked: torch has threads by now.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [(name, target, pool.submit(compile_one, name, target)) for target in targets for name in variants]
        for name, target, future in futures:
            error = future.exception()
            if error is None:
                rows += future.result()
            else:
                failures.append(f"{name} for {target} does not compile: {type(error).__name__}: {error}")
    return rows, failures


def compile_one(name: str, target: str) -> list[KernelRow]:
    """The kernels of a variant for a target."""
    from lab.aot.ahead_of_time import compile_launch

    rows = []
    for launch in EVERY[name].launches():
        before = sum(os.times()[:4])
        binary = compile_launch(launch, target)
        seconds = sum(os.times()[:4]) - before
        kernel, constants = launch.kernel.__name__.removesuffix("_kernel"), launch.arguments
        if kernel == "gradient" and constants["PLAN"].phase == "sum":
            # The pass before the one that writes, which loads less.
            kernel = "sum"
        looks = kernel not in SEQUENCE_KERNELS and (kernel != "apply" or constants["PLAN"].applies)
        code = read_machine_code(binary.text)
        rows.append(KernelRow(name, target, kernel, binary.shared, binary.tokens if looks else 0, seconds, code))
    return rows


def problems(rows: list[KernelRow]) -> list[str]:
    """List the requirements that compiled kernels do not meet, one line each."""
    found = []
    for row in rows:
        where = f"{row.variant} for {row.target}: {row.kernel}"
        spilled = row.code.spilled_in_loops
        if row.kernel not in SEQUENCE_KERNELS and spilled > MOST_SPILLED:
            found.append(f"{where} spills {spilled} bytes in loops, at most {MOST_SPILLED} are allowed")
        if row.kernel in ("read", "gradient"):
            loads, least = row.code.loads.get(128, 0), row.tokens * EVERY[row.variant].wide_bytes(row.kernel) // 16
            if loads < least:
                found.append(f"{where} has {loads} loads of 128 bits, {least} and more were expected")
    return found


def publish(rows: list[KernelRow], failures: list[str]) -> int:
    """Print the table and what does not hold; 0 if all holds, 1 if not."""
    lines = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(COLUMNS, line, widths, strict=True)
        print(*(x.rjust(width) if name in NUMBERS else x.ljust(width) for name, x, width in cells), sep="  ")
    wrong = failures + problems(rows)
    print(f"\n{len(rows)} kernels, {len(failures)} failures to compile")
    print(*(f"- {line}" for line in wrong), sep="\n")
    return 1 if wrong else 0

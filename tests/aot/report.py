"""Compile the kernels ahead of time for GPU targets, and report registers and spills.

Three things have to hold, or the command fails:

- Every variant compiles for every target.
- Loops over tokens store or load at most 16 bytes of what a thread spills. What is stored before a loop and loaded
  behind it costs a program two accesses and may be more.
- Where fp32 log-probs are aligned, `read` and `gradient` load all of them 128 bits at a time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from aot.loss_variants import LOSS_FEW, LOSS_VARIANTS
from aot.machine_code import MachineCode, read_machine_code
from aot.variant import LossVariant, Variant
from aot.variants import (
    FEW,
    OF_NEW_VARIANTS,
    SPLIT_VARIANTS,
    TURN_VARIANTS,
    VARIANTS,
)
from rollout_corr.backends import operators
from rollout_corr.whole_files import write_whole

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")

# Bytes a thread, in loops.
MOST_SPILLED = 16

# Of both operators.
EVERY: dict[str, Variant | LossVariant] = {
    **VARIANTS,
    **OF_NEW_VARIANTS,
    **SPLIT_VARIANTS,
    **TURN_VARIANTS,
    **LOSS_VARIANTS,
}
SEQUENCE_KERNELS = ("gather", "decide", "sequences", "finish")

NUMBERS = ("registers", "spilled", "in loops", "shared", "instructions", "a token", "cpu s")
COLUMNS = ("variant", "target", "kernel", *NUMBERS, "loads", "stores")


@dataclass(frozen=True)
class KernelRow:
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

    @property
    def per_token(self) -> float | None:
        """Instructions over the tokens of a thread, each instruction counted once."""
        return self.code.instructions / self.tokens if self.tokens else None


@dataclass(frozen=True)
class Failure:
    """A variant that did not compile for a target."""

    variant: str
    target: str
    error: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--target", nargs="+", default=TARGETS, choices=TARGETS, help="GPUs (default: all)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--variant", nargs="+", default=tuple(EVERY), metavar="NAME", help="names (default: all)")
    which.add_argument(
        "--few",
        action="store_const",
        dest="variant",
        const=(*FEW, *LOSS_FEW),
        help="a small selection that covers the main options",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")


def main(arguments: list[str]) -> int:
    """Compile and report; 0 if all holds, 1 if not, 2 if nothing could be tried."""
    parser = argparse.ArgumentParser(prog="python -m aot", description=str(__doc__).splitlines()[0])
    add_arguments(parser)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.variant if name not in EVERY]
    if unknown:
        return _refuse(f"--variant: expected some of {', '.join(EVERY)}; got {unknown[0]!r}")
    if options.jobs < 1:
        return _refuse(f"--jobs: expected at least 1, got {options.jobs}")
    if operators.MISSING_TRITON is not None:
        return _refuse(f"{operators.MISSING_TRITON}: pip install triton")
    try:
        interprets = operators.interprets()
    except ModuleNotFoundError as error:
        # Triton's interpreter imports NumPy, which neither Triton nor this package requires.
        return _refuse(f"Triton needs {error.name}: pip install {error.name}")
    if interprets:
        return _refuse(
            "TRITON_INTERPRET=1 is set, so the kernels are functions of Triton's interpreter, which cannot be "
            "compiled; run this without it"
        )
    rows, failures = compile_all(options.variant, options.target, options.jobs)
    return publish(rows, failures, options.json)


def _refuse(why: str) -> int:
    print(f"aot: {why}", file=sys.stderr)
    return 2


def compile_all(
    variants: tuple[str, ...], targets: tuple[str, ...], jobs: int
) -> tuple[list[KernelRow], list[Failure]]:
    """Compile variants for targets, in processes of their own: Triton compiles one kernel at a time."""
    pairs = [(variant, target) for target in targets for variant in variants]
    # Not forked: torch has threads by now.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(compile_one, *pair) for pair in pairs]
        rows: list[KernelRow] = []
        failures: list[Failure] = []
        for (variant, target), future in zip(pairs, futures, strict=True):
            _sort_out(variant, target, future, rows, failures)
    return rows, failures


def _sort_out(
    variant: str, target: str, future: Future[list[KernelRow]], rows: list[KernelRow], failures: list[Failure]
) -> None:
    error = future.exception()
    if error is None:
        rows += future.result()
    else:
        failures.append(Failure(variant, target, f"{type(error).__name__}: {error}"))


def compile_one(name: str, target: str) -> list[KernelRow]:
    """The kernels of a variant for a target."""
    from aot.ahead_of_time import compile_launch

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


# --- what has to hold ---


def problems(rows: list[KernelRow], failures: list[Failure]) -> list[str]:
    """List the requirements that do not hold, one line each."""
    found = [f"{x.variant} for {x.target} does not compile: {x.error}" for x in failures]
    for row in rows:
        where = f"{row.variant} for {row.target}: {row.kernel}"
        if row.kernel not in SEQUENCE_KERNELS and row.code.spilled_in_loops > MOST_SPILLED:
            found.append(
                f"{where} spills {row.code.spilled_in_loops} bytes in loops, at most {MOST_SPILLED} are allowed"
            )
        loads, least = row.code.loads.get(128, 0), row.tokens * EVERY[row.variant].wide_bytes // 16
        if row.kernel in ("read", "gradient") and loads < least:
            found.append(f"{where} has {loads} loads of 128 bits, {least} and more were expected")
    return found


# --- the report ---


def publish(rows: list[KernelRow], failures: list[Failure], path: Path | None) -> int:
    """Print and write the report, and say whether all holds.

    Args:
        rows: What was compiled.
        failures: What could not be.
        path: Where the JSON goes, None for nowhere.
    """
    wrong = problems(rows, failures)
    print(table(rows))
    print(f"\n{len(rows)} kernels, {len(failures)} failures to compile")
    if wrong:
        print("\nDoes not hold:\n" + "\n".join(f"- {line}" for line in wrong))
    if path is not None:
        write_whole(path, json.dumps(as_json(rows, failures, wrong), indent=1) + "\n")
    return 1 if wrong else 0


def table(rows: list[KernelRow]) -> str:
    """Columns in plain text."""
    lines = [COLUMNS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = {COLUMNS.index(name) for name in NUMBERS}
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: KernelRow) -> tuple[str, ...]:
    code, each = row.code, row.per_token
    numbers = (code.registers, code.spilled, code.spilled_in_loops, row.shared, code.instructions)
    others = "-" if each is None else f"{each:.0f}", f"{row.seconds:.1f}", _counted(code.loads), _counted(code.stores)
    return (row.variant, row.target, row.kernel, *map(str, numbers), *others)


def _counted(widths: dict[int, int]) -> str:
    return " ".join(f"{many}x{bits}" for bits, many in widths.items()) or "-"


def as_json(rows: list[KernelRow], failures: list[Failure], wrong: list[str]) -> dict[str, object]:
    """The report for programs."""
    return {
        "kernels": [
            {
                "variant": row.variant,
                "target": row.target,
                "kernel": row.kernel,
                "shared": row.shared,
                "tokens_per_thread": row.tokens,
                "instructions_per_token": row.per_token,
                "seconds": row.seconds,
                **asdict(row.code),
            }
            for row in rows
        ],
        "failures": [asdict(failure) for failure in failures],
        "problems": wrong,
    }

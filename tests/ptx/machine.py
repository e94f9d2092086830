"""Run a kernel: its blocks over waves of programs, warps and programs in an order that a seed decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ptx.findings import Findings
from ptx.memory import Region
from ptx.opcodes import TYPES
from ptx.parse import BRANCHES, Block, Instruction, Kernel, kind_of, parse
from ptx.steps import Assembler, Step
from ptx.wave import LANES, Mask, Wave

# Programs that run together. More of them share the cost of Python, fewer fit into a cache.
TOGETHER = 64
Go = Callable[[Wave, NDArray[np.bool_], NDArray[np.int32]], None]
NOBODY, WARP, PROGRAM = 0, 1, 2


@dataclass
class Runnable:
    """A block as functions, and where it goes on."""

    block: Block
    steps: list[Step]
    go: Go | None  # where its branch leads each thread; None without one
    waits: int


@dataclass
class Executed:
    """How often the blocks of a kernel were executed, by how many threads and by how many warps; bytes by kind."""

    kernel: Kernel
    threads: Counter[int] = field(default_factory=Counter)
    warps: Counter[int] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)


@dataclass
class Program:
    """A kernel ready to run.

    Attributes:
        kernel: As it was read.
        shared: Bytes of shared memory of a program.
        granule: Bytes of shared memory that no access divides.
        blocks: Its blocks as functions.
    """

    kernel: Kernel
    shared: int
    granule: int
    blocks: list[Runnable]


def assemble(text: str, shared: int) -> Program:
    """Read a module and make functions of its instructions."""
    kernel = parse(text)
    assembler = Assembler(kernel)
    blocks = [_runnable(block, assembler, kernel) for block in kernel.blocks]
    return Program(kernel, shared, _granule(kernel), blocks)


def run(
    program: Program, parameters: Sequence[int], grid: int, programs: NDArray[np.int64], tensors: list[Region],
    launch: int, seed: int, checked: bool, findings: Findings,
) -> Executed:  # fmt: skip
    """Run programs of a launch and count what they execute.

    Args:
        program: The kernel.
        parameters: Its parameters' values in order.
        grid: How many programs the launch has.
        programs: The numbers of those that run.
        tensors: All that it may touch.
        launch: A number that no earlier launch has had.
        seed: Of every order.
        checked: Accesses are recorded.
        findings: Where findings go.
    """
    kernel, generator = program.kernel, np.random.default_rng(seed)
    warps, done = kernel.threads // LANES, Executed(kernel)
    given = dict(zip(kernel.parameters, parameters, strict=True))
    order = generator.permutation(programs)
    for first in range(0, order.size, TOGETHER):
        these = order[first : first + TOGETHER]
        places = generator.permuted(np.tile(np.arange(warps), (these.size, 1)), axis=1)
        wave = Wave(
            kernel, given, grid, these, places, program.shared, program.granule, tensors, launch, findings, checked
        )
        _run_wave(wave, program.blocks, generator)
        done.threads += wave.threads_in
        done.warps += wave.warps_in
        done.bytes += wave.bytes
    return done


def _runnable(block: Block, assembler: Assembler, kernel: Kernel) -> Runnable:
    instructions, go = block.instructions, None
    if instructions and instructions[-1].opcode in BRANCHES:
        *instructions, branch = instructions
        go = _branch(branch, assembler, kernel)
    waits = {None: NOBODY, "warp": WARP, "program": PROGRAM}[kind_of(instructions[0]) if instructions else None]
    return Runnable(block, [assembler.step(x) for x in instructions], go, waits)


def _branch(branch: Instruction, assembler: Assembler, kernel: Kernel) -> Go:
    """Make the function of a branch: it sets where the threads of a mask go on."""
    targets, end = kernel.targets(), len(kernel.blocks)
    if branch.opcode == "brx.idx":
        choice = assembler.read(branch.operands[0], "u32")
        table = np.array([targets[label] for label in kernel.tables[str(branch.operands[1])]])

        def choose(wave: Wave, mask: NDArray[np.bool_], at: NDArray[np.int32]) -> None:
            at[mask] = table[np.broadcast_to(choice(wave), wave.shape)[mask]]

        return choose
    target = end if branch.opcode in ("ret", "exit") else targets[str(branch.operands[0])]
    guard = assembler.guard(branch) if branch.guard else None

    def go(wave: Wave, mask: NDArray[np.bool_], at: NDArray[np.int32]) -> None:
        at[mask if guard is None else guard(wave, mask)] = target

    return go


def _granule(kernel: Kernel) -> int:
    """Count the bytes of the narrowest access to shared memory."""
    instructions = (x for block in kernel.blocks for x in block.instructions if ".shared" in x.opcode)
    return min(
        (TYPES[x.opcode.split(".")[-1]].itemsize for x in instructions if not x.opcode.startswith("ldm")), default=4
    )


def _run_wave(wave: Wave, blocks: list[Runnable], generator: np.random.Generator) -> None:
    """Run blocks for all threads that are at one, until every thread has returned.

    Some warps, drawn anew behind every barrier, go as far as they can before the others begin.
    """
    end = len(blocks)
    at = np.zeros(wave.shape, np.int32)
    waits = np.array([*(block.waits for block in blocks), NOBODY])
    late = generator.random(wave.rows) < 0.5
    while True:
        ready = _ready(wave, at, waits, end)
        if not ready.any():
            if (at < end).any():
                _report_stuck(wave, at, blocks, end)
            return
        early = ready & (~late[:, None] | (waits[at] == PROGRAM))
        if early.any():
            ready = early
        here = int(at[ready].min())
        mask = ready & (at == here)
        block = blocks[here]
        if block.waits == PROGRAM:
            passing = mask[:, 0]
            late[passing] = generator.random(int(passing.sum())) < 0.5
        everybody: Mask = None if mask.all() else mask
        wave.enter(here, mask)
        for step in block.steps:
            step(wave, everybody)
        at[mask] = here + 1
        if block.go is not None:
            block.go(wave, mask, at)


def _ready(wave: Wave, at: NDArray[np.int32], waits: NDArray[np.int64], end: int) -> NDArray[np.bool_]:
    """Tell which threads need not wait for others."""
    kind = waits[at]
    ready = (at < end) & (kind == NOBODY)
    uniform = (at == at[:, :1]).all(1)
    ready |= (kind == WARP) & uniform[:, None]
    of_program = at.reshape(-1, wave.warps * LANES)
    together = np.repeat((of_program == of_program[:, :1]).all(1), wave.warps)
    return ready | ((kind == PROGRAM) & together[:, None])


def _report_stuck(wave: Wave, at: NDArray[np.int32], blocks: list[Runnable], end: int) -> None:
    """Say of every place where threads wait that the others will not come."""
    for here in np.unique(at[at < end]):
        lanes = np.nonzero((at == here).ravel())[0]
        program = at.reshape(-1, wave.warps * LANES)[lanes[0] // (wave.warps * LANES)]
        others = {
            "the end" if x == end else blocks[x].block.instructions[0].line for x in np.unique(program) if x != here
        }
        wave.report_divergence(lanes, blocks[here].block.instructions[0], f"others are at {', '.join(sorted(others))}")

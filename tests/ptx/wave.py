"""Programs that run together: registers of their threads, shared and local memory, and every access with its checks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx.findings import Finding, Findings
from ptx.memory import EPOCH, LAUNCH, PROGRAM, Indices, Region, Stamps, stamp
from ptx.parse import Instruction, Kernel

Values = NDArray[Any]
Mask = NDArray[np.bool_] | None  # None: every thread
LANES = 32
# Addresses of local memory as a generic one.
LOCAL = 1 << 60


class Wave:
    """Some programs of a launch, [warps, 32 threads]; a program's warps lie side by side, in shuffled order.

    Args:
        kernel: Whose programs these are.
        parameters: The values of its parameters by name.
        grid: How many programs the launch has.
        programs: Their numbers.
        warps: Of each program, in order: a permutation for each, [programs, warps].
        shared: Bytes of shared memory of a program.
        granule: Bytes of shared memory that no access divides.
        tensors: Global memory.
        launch: A number that no earlier launch has had.
        findings: Where findings go.
        checked: Who touches memory is recorded; bounds and alignment are checked always.
    """

    def __init__(
        self,
        kernel: Kernel,
        parameters: dict[str, int],
        grid: int,
        programs: Indices,
        warps: Indices,
        shared: int,
        granule: int,
        tensors: list[Region],
        launch: int,
        findings: Findings,
        checked: bool,
    ) -> None:
        self.name, self.parameters, self.findings, self.checked = kernel.name, parameters, findings, checked
        self.grid, self.warps = grid, warps.shape[1]
        self.rows = programs.size * self.warps
        self.shape = (self.rows, LANES)
        self.registers = [
            np.zeros((1, 1), bool if bits == 1 else f"u{bits // 8}") for bits in kernel.registers.values()
        ]
        self.thread = warps.reshape(-1, 1) * LANES + np.arange(LANES)
        self.program = np.repeat(programs, self.warps)[:, None]
        self.epoch = np.zeros(programs.size, np.int64)
        self._stamps = stamp(launch, self.program, 0, self.thread).astype(np.int64).ravel()
        self.tensors = tensors
        self._shared_size, self._local_size = -(-shared // 16) * 16, kernel.local
        lines = self._shared_size * programs.size
        self.shared = Region(
            "shared", 0, granule, (lines // granule,), (1,), np.zeros(lines, np.uint8), checked, checked
        )
        own = kernel.local * self.rows * LANES
        self.local = Region("local", 0, 1, (own,), (1,), np.zeros(own, np.uint8), checked, False)
        self.threads_in: Counter[int] = Counter()
        self.warps_in: Counter[int] = Counter()
        self.bytes: Counter[str] = Counter()

    def pass_barrier(self, mask: Mask) -> None:
        """Begin another epoch for the programs whose threads these are."""
        rows = np.ones(self.rows, bool) if mask is None else mask[:, 0]
        passing = rows.reshape(-1, self.warps)[:, 0]
        self.epoch += passing
        assert self.epoch.max() < 1 << (PROGRAM - EPOCH), "more barriers than a stamp can count"
        self._stamps += np.repeat(passing.astype(np.int64) << EPOCH, self.warps * LANES)

    def enter(self, block: int, mask: NDArray[np.bool_]) -> None:
        """Count the threads and the warps that execute a block."""
        self.threads_in[block] += int(mask.sum())
        self.warps_in[block] += int(mask.any(1).sum())

    def count(self, how: str, space: str, addresses: Indices, lanes: Indices, size: int) -> None:
        """Count the bytes of an access, and of global memory the sectors of 32 bytes that each warp asks for."""
        self.bytes[f"{space} {how}"] += addresses.size * size
        if space == "global":
            sectors = np.stack([addresses >> 5, (addresses + size - 1) >> 5], 1) + (lanes[:, None] // LANES << 48)
            self.bytes[f"sectors {how}"] += np.unique(sectors).size

    # --- accesses ---

    def places(
        self, space: str, addresses: Values, lanes: Indices, size: int, instruction: Instruction, hint: list[int]
    ):
        """Find where addresses lead: regions, byte offsets in them, and which of the accesses these are.

        The hint is where the same instruction led the last time, as a number among the launch's tensors.
        """
        wrong = addresses % size != 0
        if wrong.any():
            self._report(
                "alignment", lanes[wrong], f"address {int(addresses[wrong][0]):#x} for {size} bytes", instruction
            )
        if space in ("shared", "local"):
            region, each = (self.shared, self._shared_size) if space == "shared" else (self.local, self._local_size)
            beyond = (addresses < 0) | (addresses + size > each)
            if beyond.any():
                at = int(addresses[beyond][0])
                self._report("bounds", lanes[beyond], f"byte {at} of {each} of {space} memory", instruction)
            owner = lanes // (LANES * self.warps) if space == "shared" else lanes
            good = np.nonzero(~(wrong | beyond))[0]
            yield region, (addresses + owner * each)[good], good
            return
        left = np.nonzero(~wrong)[0]
        for number in [*hint, *range(len(self.tensors))]:
            if not left.size:
                return
            region = self.tensors[number]
            at = addresses[left]
            inside = (at >= region.base) & (at + size <= region.end)
            if inside.all():
                found, left = left, left[:0]
            elif inside.any():
                found, left = left[inside], left[~inside]
            else:
                continue
            hint[:] = [number]
            yield region, addresses[found] - region.base, found
        if left.size:
            self._report("bounds", lanes[left], self._nearest(int(addresses[left[0]])), instruction)

    def _nearest(self, address: int) -> str:
        def distance(region: Region) -> int:
            return max(region.base - address, address - region.end + 1, 0)

        region = min(self.tensors, key=distance)
        return f"{address - region.base} bytes behind the start of {region.name}, which has {region.data.size}"

    def read(self, region: Region, at: Indices, lanes: Indices, size: int, instruction: Instruction) -> None:
        """Check and record reads."""
        if self.checked:
            flat, lanes = self._granules(region, at, lanes, size, instruction)
            self._must_be_written(region, flat, lanes, instruction)
            if region.shadow is not None:
                self._report_race(region, flat, lanes, region.shadow.read(flat, self._stamps[lanes]), instruction)

    def touch(self, region: Region, at: Indices, lanes: Indices, size: int, instruction: Instruction) -> None:
        """Check and record atomic accesses."""
        if self.checked:
            flat, lanes = self._granules(region, at, lanes, size, instruction)
            self._must_be_written(region, flat, lanes, instruction)
            if region.shadow is not None:
                self._report_race(region, flat, lanes, region.shadow.touch(flat, self._stamps[lanes]), instruction)

    def write(self, region: Region, at: Indices, lanes: Indices, values: Values, instruction: Instruction) -> None:
        """Check, record and do writes.

        That several threads of a program write one value to one place is no race: Triton's layouts repeat values.
        """
        if not self.checked:
            region.store(at, values)
            return
        size = values.shape[1] * values.dtype.itemsize
        flat, threads = self._granules(region, at, lanes, size, instruction)
        if region.unwritten is not None:
            region.unwritten[flat] = False
        if region.shadow is None:
            region.store(at, values)
            return
        now = self._stamps[threads]
        readers, before, beside = region.shadow.write(flat, now)
        for others in (before, beside):
            if others.any():
                same = (region.load(at, size, values.dtype.itemsize) == values).all(1)
                repeats = np.repeat(same, flat.size // at.size) & ((others ^ now) >> PROGRAM == 0)
                self._report_race(region, flat, threads, np.where(repeats, 0, others), instruction)
            if others is before:
                region.store(at, values)
        self._report_race(region, flat, threads, readers, instruction)

    def _granules(
        self, region: Region, at: Indices, lanes: Indices, size: int, instruction: Instruction
    ) -> tuple[Indices, Indices]:
        granules = region.granules(at, size)
        flat, lanes = granules.ravel(), np.repeat(lanes, granules.shape[1]) if granules.shape[1] > 1 else lanes
        if region.gaps is not None and (outside := region.gaps[flat]).any():
            self._report("bounds", lanes[outside], f"between the elements of {region.name}", instruction)
        return flat, lanes

    def _must_be_written(self, region: Region, flat: Indices, lanes: Indices, instruction: Instruction) -> None:
        if region.unwritten is not None and (unknown := region.unwritten[flat]).any():
            where = self._where(region, int(flat[unknown][0]), lanes[unknown][0])
            self._report("unwritten", lanes[unknown], where, instruction)

    def _report_race(
        self, region: Region, flat: Indices, lanes: Indices, others: Stamps, instruction: Instruction
    ) -> None:
        if not others.any():
            return
        i = int(np.nonzero(others)[0][0])
        other = int(others[i])
        program, thread = (other & ((1 << LAUNCH) - 1)) >> PROGRAM, other & ((1 << EPOCH) - 1)
        kind = "race in a program" if (other ^ int(self._stamps[lanes[i]])) >> PROGRAM == 0 else "race of programs"
        where = f"{self._where(region, int(flat[i]), lanes[i])}, touched by thread {thread} of program {program}"
        self._report(kind, lanes[i : i + 1], where, instruction)

    def _where(self, region: Region, granule: int, lane: int) -> str:
        if region is not self.shared:
            return region.index(granule)
        return f"shared byte {granule * region.item - lane // (LANES * self.warps) * self._shared_size}"

    def _report(self, kind: str, lanes: Indices, where: str, instruction: Instruction) -> None:
        threads = self.thread.ravel()[lanes]
        program = int(self.program[lanes[0] // LANES, 0])
        who = f"program {program}, thread {int(threads[0])}" + (f" and {lanes.size - 1} more" if lanes.size > 1 else "")
        self.findings.add(Finding(kind, self.name, instruction.line, who, where, instruction.opcode))

    def report_divergence(self, lanes: Indices, instruction: Instruction, where: str) -> None:
        """Say that some threads wait for others that will never come."""
        self._report("divergence", lanes, where, instruction)

"""Stand where the driver would: `with compiled():` runs every launch of the kernels as PTX, on tensors of the CPU.

It needs a process in which the kernels were imported without TRITON_INTERPRET.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from builders.launches import key
from lab.aot.ahead_of_time import TARGETS, interpreted, source_of
from lab.ptx.machine import Executed, FoundWrong, Program, Region, record_of
from lab.ptx.native import CACHE
from rollout_corr.backends import operators
from rollout_corr.kernels.launches import Launch

TARGET = TARGETS["sm_90"]
# Bytes from which on memory is the system's own and fresh: nothing touches all of it.
LARGE = 1 << 28

program_of = lru_cache(maxsize=256)(Program)

_compiled: dict[object, tuple[str, int]] = {}


def compile_ptx(launch: Launch) -> tuple[str, int]:
    """Compile a launch as the launcher would, as far as PTX; give the text and the bytes of shared memory."""
    if interpreted(launch):
        raise RuntimeError("TRITON_INTERPRET=1 makes the kernels interpreted functions, which cannot be compiled")
    options = launch.options(TARGET.warp_size, nvidia=True)
    known = launch.kernel.cache_key, key(launch), *options.items()
    if known in _compiled:
        return _compiled[known]
    gc.disable()  # to look for garbage among a compilation's objects is 6 % of its time
    try:
        with (
            mock.patch.object(CUDABackend, "make_cubin", lambda backend, text, *others: text.encode()),
            mock.patch.object(JITFunction, "parse", _tree_of),
            mock.patch.object(triton.knobs.cache, "dir", str(CACHE)),
            mock.patch.object(triton.knobs.compilation, "store_binary_only", True),
        ):
            made = triton.compile(source_of(launch, TARGET), target=TARGET, options=options)
    finally:
        gc.enable()
    scratch = [getattr(made.metadata, name, 0) for name in ("global_scratch_size", "profile_scratch_size")]
    assert not any(scratch), "scratch memory is not known"
    _compiled[known] = made.asm["cubin"].decode(), made.metadata.shared
    return _compiled[known]


def _tree_of(function: JITFunction) -> ast.Module:
    """Read the source of a function once, not for each of its 1,800 places in the kernels of five variants."""
    return _trees(function.src)


_trees = lru_cache(maxsize=None)(ast.parse)


@dataclass
class Session:
    """Launches that share tensors.

    Attributes:
        seed: Of the order of programs and warps.
        checked: Who touches which memory is recorded; bounds and alignment are checked always.
        executed: What each launch has executed.
        launches: Numbers them.
        programs: Chooses the programs of a launch that run, by default all.
        allowed: Kinds of findings that are none.
        off_by: Units in the last place that results of ex2 and lg2 are off at most, each as the seed has it.
    """

    seed: int = 0
    checked: bool = True
    programs: Callable[[Launch], np.ndarray] | None = None
    allowed: tuple[str, ...] = ()
    off_by: int = 0
    executed: list[tuple[Launch, Executed]] = field(default_factory=list)
    _allocated: dict[int, Tensor] = field(default_factory=dict)
    _records: dict[tuple[int, int, int], tuple[Tensor, NDArray[np.uint8]]] = field(default_factory=dict)
    launches: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def run(self, launch: Launch) -> None:
        """Run a launch.

        Raises:
            FoundWrong: It did something that it must not do.
        """
        if launch.programs == 0:
            return
        text, shared = compile_ptx(launch)
        program = program_of(text, shared)
        values, tensors = self._bind(launch)
        # Behind the kernel's own parameters stand pointers to scratch memory; it asks for none.
        values += [0] * (len(program.kernel.parameters) - len(values))
        programs = np.arange(launch.programs) if self.programs is None else self.programs(launch)
        number = next(self.launches)
        done = program.run(
            values, launch.programs, programs, tensors, number, self.seed + number, self.checked,
            (self.off_by, self.seed),
        )  # fmt: skip
        self.executed.append((launch, done))
        wrong = [x for x in done.findings if x.kind not in self.allowed]
        if wrong:
            raise FoundWrong(wrong)

    def allocate(self, x: Tensor) -> Tensor:
        """Take note of memory that nobody has written, and keep it as long as this."""
        self._allocated[x.untyped_storage().data_ptr()] = x
        return x

    def _bind(self, launch: Launch) -> tuple[list[int], list[Region]]:
        """List the parameters that are not constants, tuples entry by entry, and the regions of tensors."""
        values, tensors = [], []

        def take(name: str, x: Any) -> None:
            if isinstance(x, tuple):
                for i, item in enumerate(x):
                    take(f"{name}[{i}]", item)
            elif isinstance(x, Tensor):
                values.append(x.data_ptr())
                if x.numel():
                    tensors.append(self.region(name, x))
            elif x is not None:
                values.append(int(x) & (2**64 - 1))

        for parameter in launch.kernel.params:
            if not parameter.is_constexpr:
                take(parameter.name, launch.arguments[parameter.name])
        return values, tensors

    def region(self, name: str, x: Tensor) -> Region:
        """Describe a tensor, with the record of an earlier launch if it was there; views in another shape share it."""
        start, storage, item = x.data_ptr(), x.untyped_storage().data_ptr(), x.element_size()
        unwritten = self.checked and storage in self._allocated
        region = Region(name, start, item, tuple(x.shape), x.stride(), unwritten, None)
        if self.checked:
            key = start, item, region.elements
            _, region.record = self._records.setdefault(key, (x, record_of(region.elements)))
        return region


@contextlib.contextmanager
def compiled(**settings: Any) -> Iterator[Session]:
    """Run every launch of the kernels as compiled code on the CPU; what torch.empty gives nobody has written."""
    session, empty = Session(**settings), torch.empty

    def allocate(*size: Any, **others: Any) -> Tensor:
        made = empty(*size, **others)
        if session.programs is not None and made.nbytes < LARGE:
            made.zero_()  # what the programs that do not run would have written; fresh pages are zero anyway
        return session.allocate(made)

    with (
        mock.patch.object(torch, "empty", allocate),
        mock.patch.object(Launch, "run", lambda launch: session.run(launch)),
        mock.patch.object(operators, "interprets", return_value=True),
    ):
        yield session

"""Launch kernels without Triton's dispatch: by the compiled kernel that it took before for a launch of the same kind.

Triton finds a compiled kernel by a key that it makes of every argument, 25 microseconds a launch. All of that key
follows from a few things that a launcher knows anyway: dtypes, constants, the shape class, and which addresses are
multiples of 16. So the first launch of a kind goes through Triton, and its kernel is kept for the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, reduce
from inspect import signature
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

# Bytes from one slice of a workspace to the next, beyond what alignment takes; tests look there for stray writes.
GAP = 0
# Elements of a slice are counted in multiples of this, so that every slice begins at a multiple of 16 bytes.
ROUNDED = 16
# AMD's compiler is told of tensors in storages up to this size.
SMALL_STORAGE = 2**31 - 1


class Field(NamedTuple):
    """A table that a workspace holds, [rows, count] or [count]."""

    name: str
    rows: int | None  # None: one dimension
    dtype: torch.dtype


class WorkspaceLayout:
    """The tables of an operation, grouped by what their columns count.

    Args:
        groups: Tables for each of the counts that `Workspace` is given, in order.
    """

    def __init__(self, *groups: Sequence[Field]) -> None:
        self.fields: dict[str, tuple[Field, int]] = {}
        self.widths: list[int] = []  # bytes of all tables of a group, for each of what they count
        self._places: list[tuple[str, int, int]] = []  # table, group, and the bytes of the tables before it there
        for number, group in enumerate(groups):
            width = 0
            for field in group:
                self._places.append((field.name, number, width))
                self.fields[field.name] = (field, number)
                width += field.dtype.itemsize * (1 if field.rows is None else field.rows)
            self.widths.append(width)
        self._gap, self._spaced = 0, [(*place, 0) for place in self._places]

    def spaced(self) -> list[tuple[str, int, int, int]]:
        """List table, group, bytes before it in the group, and bytes to leave free before it."""
        if self._gap != GAP:
            self._gap, self._spaced = GAP, [(*place, GAP * i) for i, place in enumerate(self._places)]
        return self._spaced


class Workspace:
    """All scratch memory of a call: one allocation, and tables within it by address.

    Whether a pointer is aligned is part of a compile key, so every table begins at a multiple of 16 bytes, whatever
    the counts.
    """

    __slots__ = ("_made", "addresses", "counts", "layout", "memory")

    def __init__(self, layout: WorkspaceLayout, counts: tuple[int, ...], device: torch.device) -> None:
        total, starts, rounded = 0, [], []
        for count, width in zip(counts, layout.widths, strict=True):
            count = -(-count // ROUNDED) * ROUNDED
            starts.append(total)
            rounded.append(count)
            total += count * width
        spaced = layout.spaced()
        # Tests exchange torch.empty by what takes its arguments like this.
        self.memory = torch.empty((total + GAP * len(spaced),), dtype=torch.uint8, device=device)
        first = self.memory.data_ptr()
        self.addresses = {
            name: first + starts[group] + rounded[group] * before + gap for name, group, before, gap in spaced
        }
        self.layout, self.counts = layout, counts
        self._made: dict[str, Tensor] | None = None

    def tensor(self, name: str) -> Tensor:
        """Give a table as a tensor: to Triton when it compiles, to its interpreter, to tests."""
        if self._made is None:
            self._made = {}
        if name not in self._made:
            field, group = self.layout.fields[name]
            count, start = self.counts[group], self.addresses[name] - self.memory.data_ptr()
            size = (count,) if field.rows is None else (field.rows, count)
            length = field.dtype.itemsize * count * (1 if field.rows is None else field.rows)
            self._made[name] = self.memory[start : start + length].view(field.dtype).view(size)
        return self._made[name]


# Of launches that need no scratch memory.
NOTHING = Workspace(WorkspaceLayout(), (), torch.device("cpu"))


class Site:
    """A kernel at its place in an operation, with what was compiled for its launches there.

    Everything that a compilation depends on is the same for all of its launches, but for their keys.
    """

    __slots__ = ("compiled", "kernel", "known", "names", "pick")

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.names = parameters_of(kernel)
        self.compiled: dict[Any, Kept] = {}
        # Picks the values that the kernel's parameters name, in their order.
        self.pick = itemgetter(*self.names)
        self.known = _is_known(kernel)


class Kept(NamedTuple):
    """A compiled kernel that Triton took, and the driver that it took it for."""

    run: Any
    function: Any
    metadata: Any
    driver: Any


class Launch:
    """A kernel launch, ready to run or to be compiled ahead of time.

    Attributes:
        site: The kernel, and what has been compiled for it.
        programs: The number of programs.
        threads: Threads of a program.
        values: Arguments by name, among others; tables of the workspace as addresses.
        key: Tells launches of the site apart that Triton may compile apart.
        workspace: Where those tables lie.
        device: The device of the tensors.
    """

    __slots__ = ("_arguments", "device", "key", "programs", "site", "threads", "values", "workspace")

    def __init__(
        self,
        site: Site,
        programs: int,
        threads: int,
        values: Mapping[str, Any],
        key: object,
        workspace: Workspace,
        device: torch.device,
    ) -> None:
        self.site, self.programs, self.threads, self.values = site, programs, threads, values
        self.key, self.workspace, self.device = key, workspace, device
        self._arguments: dict[str, Any] | None = None

    @property
    def kernel(self) -> Any:
        """The kernel."""
        return self.site.kernel

    @property
    def arguments(self) -> dict[str, Any]:
        """Every parameter of the kernel by name, tables as tensors."""
        if self._arguments is None:
            held, values = self.workspace.addresses, self.values
            self._arguments = {
                # A launch may get None or a tensor in the place of a table.
                name: self.workspace.tensor(name)
                if type(values[name]) is int and name in held
                else as_bytes(values[name])
                for name in self.site.names
            }
        return self._arguments

    def run(self) -> None:
        """Launch it on the current stream of its device, which is the current one."""
        kept = self.site.compiled.get(self.key)
        if kept is None or kept.driver is not plain_driver():
            self._dispatch()
            return
        stream = kept.driver.get_current_stream(self.device.index or 0)
        # As Triton's dispatch calls it where there is no hook to be called.
        kept.run(
            self.programs, 1, 1, stream, kept.function, kept.metadata, None, None, None, *self.site.pick(self.values)
        )

    def _dispatch(self) -> None:
        """Launch it through Triton, and keep the kernel that it takes."""
        warps = max(1, self.threads // warp_size(self.device))
        if getattr(_THREAD, "only_compiles", False):
            self.kernel.warmup(**self.arguments, grid=(self.programs,), num_warps=warps)
            return
        driver = plain_driver() if self.site.known else None
        taken = self.kernel[(self.programs,)](**self.arguments, num_warps=warps)
        if driver is not None and isinstance(taken, triton.compiler.CompiledKernel):
            self.site.compiled[self.key] = Kept(taken.run, taken.function, taken.packed_metadata, driver)


# Of this thread alone: what others launch meanwhile is launched.
_THREAD = threading.local()


@contextmanager
def compiled_beside(threads: int) -> Iterator[Sequence[Future[Any]]]:
    """Compile, in so many threads, what this thread launches inside, and launch nothing; give all compilations.

    Compiling is MLIR, LLVM and a process of ptxas, which hold no lock of Python, but for a tenth. What is compiled is
    found by Triton's dispatch afterwards, and on disk by other processes. Leaving waits for all of it.
    """
    with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool) as mode:
        _THREAD.only_compiles = True
        try:
            yield mode.raw_futures
        finally:
            _THREAD.only_compiles = False


def plain_driver() -> Any:
    """Give the driver that Triton launches on; None if its dispatch has more to do than to find a kernel and launch it.

    That is so where functions are called around launches, and where kernels are compiled for debugging or profiling.
    """
    runtime = knobs.runtime
    if (
        runtime.debug
        or runtime.launch_enter_hook.calls
        or runtime.launch_exit_hook.calls
        or knobs.compilation.instrumentation_mode
        or (HAS_STAGES and runtime.add_stages_inspection_hook is not None)
    ):
        return None
    return DRIVERS.active


# Triton's own, beside which stands the module of this name.
DRIVERS = triton.runtime.driver
HAS_STAGES = hasattr(knobs.runtime, "add_stages_inspection_hook")


def _is_known(kernel: Any) -> bool:
    """Tell whether compilations of a kernel depend on nothing but dtypes, alignments and constants.

    That is so where Triton is told not to look at values of numbers, and nobody is to be called before a launch.
    """
    if type(kernel) is not JITFunction or getattr(kernel, "pre_run_hooks", None):
        return False
    numbers = [one for one in kernel.params if not one.is_constexpr and one.annotation_type]
    return all(one.do_not_specialize for one in numbers)


@lru_cache(maxsize=64)
def parameters_of(kernel: Any) -> tuple[str, ...]:
    """Name the parameters of a kernel in order."""
    return tuple(signature(kernel.fn).parameters)


@lru_cache(maxsize=16)
def warp_size(device: torch.device) -> int:
    """Count the threads of a warp: 32, or 64 on some of AMD's GPUs."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def as_bytes(x: Any) -> Any:
    """View a bool tensor as the bytes it holds: a byte of 2 is valid too."""
    return x.view(torch.uint8) if isinstance(x, Tensor) and x.dtype == torch.bool else x


def alignment_of(tensors: Sequence[Tensor]) -> object:
    """Give what Triton tells the compiler of pointers to these tensors beside their dtypes, as a part of a key."""
    if reduce(or_, map(Tensor.data_ptr, tensors)) & 15 == 0 and torch.version.hip is None:
        return 0  # all of them are aligned, which is the rule
    aligned = tuple(x.data_ptr() & 15 == 0 for x in tensors)
    if torch.version.hip is None:
        return aligned
    return aligned, tuple(x.untyped_storage().nbytes() <= SMALL_STORAGE for x in tensors)


def names_of_tensors(values: Mapping[str, Tensor | None]) -> Callable[[Mapping[str, Any]], tuple[Tensor, ...]]:
    """Give what picks the values that are tensors from all others of their names."""
    return itemgetter(*[name for name, x in values.items() if x is not None])

"""Launch kernels without Triton's dispatch: by the compiled kernel that it took before for a launch of the same kind.

Triton finds a compiled kernel by a key that it makes of every argument, 25 microseconds a launch. All of that key
follows from a few things that a launcher knows anyway: dtypes, constants, the shape class, and which addresses are
multiples of 16. So the first launch of a kind goes through Triton, and its kernel is kept for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from inspect import signature
from operator import itemgetter
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
        self.groups: list[tuple[int, list[tuple[str, int, int]]]] = []
        for number, group in enumerate(groups):
            width, places = 0, []
            for field in group:
                places.append((field.name, width, len(self.fields)))
                self.fields[field.name] = (field, number)
                width += field.dtype.itemsize * (1 if field.rows is None else field.rows)
            self.groups.append((width, places))


class Workspace:
    """All scratch memory of a call: one allocation, and tables within it by address.

    Whether a pointer is aligned is part of a compile key, so every table begins at a multiple of 16 bytes, whatever
    the counts.
    """

    __slots__ = ("_made", "addresses", "counts", "layout", "memory")

    def __init__(self, layout: WorkspaceLayout, counts: tuple[int, ...], device: torch.device) -> None:
        at, addresses = 0, {}
        for count, (width, places) in zip(counts, layout.groups, strict=True):
            if places:
                rounded = -(-count // ROUNDED) * ROUNDED
                for name, before, index in places:
                    addresses[name] = at + rounded * before + GAP * index
                at += rounded * width
        # Tests exchange torch.empty by what takes its arguments like this.
        self.memory = torch.empty((at + GAP * len(addresses),), dtype=torch.uint8, device=device)
        first = self.memory.data_ptr()
        self.addresses = {name: first + start for name, start in addresses.items()}
        self.layout, self.counts = layout, counts
        self._made: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        """Give a table as a tensor: to Triton when it compiles, to its interpreter, to tests."""
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
        key: Tells launches of the site apart that Triton may compile apart.
        values: Arguments by name, among others; tables of the workspace as addresses.
        workspace: Where those tables lie.
        device: The device of the tensors.
    """

    __slots__ = ("_arguments", "device", "key", "programs", "site", "threads", "values", "workspace")

    def __init__(
        self,
        site: Site,
        programs: int,
        threads: int,
        key: object,
        values: Mapping[str, Any],
        workspace: Workspace,
        device: torch.device,
    ) -> None:
        self.site, self.programs, self.threads, self.key = site, programs, threads, key
        self.values, self.workspace, self.device = values, workspace, device
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
        stream, given = kept.driver.get_current_stream(self.device.index or 0), self.site.pick(self.values)
        # As Triton's dispatch calls it where there is no hook to be called.
        kept.run(self.programs, 1, 1, stream, kept.function, kept.metadata, None, None, None, *given)

    def _dispatch(self) -> None:
        """Launch it through Triton, and keep the kernel that it takes."""
        warps = max(1, self.threads // warp_size(self.device))
        driver = plain_driver() if self.site.known else None
        taken = self.kernel[(self.programs,)](**self.arguments, num_warps=warps)
        if driver is not None and isinstance(taken, triton.compiler.CompiledKernel):
            self.site.compiled[self.key] = Kept(taken.run, taken.function, taken.packed_metadata, driver)


def plain_driver() -> Any:
    """Give the driver that Triton launches on; None if its dispatch has more to do than to find a kernel and launch it.

    That is so where functions are called around launches, and where kernels are compiled for debugging or profiling.
    """
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        # A hook is None, a function, or a chain of some.
        if hook is not None and getattr(hook, "calls", True):
            return None
    if runtime.debug or knobs.compilation.instrumentation_mode:
        return None
    if getattr(runtime, "add_stages_inspection_hook", None) is not None:
        return None
    return triton.runtime.driver.active


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


def alignment_of(tensors: Sequence[Tensor | None]) -> object:
    """Give what Triton tells the compiler of pointers to these tensors beside their dtypes, as a part of a key."""
    there = [x for x in tensors if x is not None]
    addresses = [x.data_ptr() for x in there]
    together = 0
    for address in addresses:
        together |= address
    # Where all are aligned, which is the rule, the key is short.
    found: object = together & 15 and tuple(address & 15 == 0 for address in addresses)
    if torch.version.hip is None:
        return found
    return found, tuple(x.untyped_storage().nbytes() <= SMALL_STORAGE for x in there)

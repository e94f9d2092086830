"""Launches of kernels: operations, whose kernels share tensors and tables, and launches past Triton's dispatch.

Triton finds a compiled kernel by a key that it makes of every argument, 25 microseconds a launch. All of that key
follows from a few things that a launcher knows anyway: dtypes, constants, the shape class, and which addresses are
multiples of 16. So the first launch of a kind goes through Triton, and its kernel is kept for the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from inspect import signature
from itertools import accumulate, repeat
from math import prod
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from ..specs.caches import cached_untraced
from .grid import SIZES, Grid, sizes_of, strides_of, warp_size

# Bytes from one table to the next, beyond what alignment takes; tests look there for stray writes.
GAP = 0
# Elements of a table are counted in multiples of this, so that every table begins at a multiple of 16 bytes.
ROUNDED = 16
# AMD's compiler is told of tensors in storages up to this size.
SMALL_STORAGE = 2**31 - 1


# --- scratch memory ---


class Table(NamedTuple):
    """A table in the scratch memory of a call, [rows, columns] or [columns]."""

    name: str  # the parameter of kernels that takes it
    per: str  # the field of `Grid` that counts its columns
    rows: int | None  # None: one dimension; 0: there is no such table, and kernels take None
    dtype: torch.dtype


def tables_of_partials(sums: int, maxima: int) -> list[Table]:
    """List the tables of so many columns that programs over tokens store, and those of parts of these."""
    return [
        Table("token_sums", "token_programs", sums, torch.float64),
        Table("token_maxima", "token_programs", maxima, torch.float64),
        Table("part_sums", "parts", sums, torch.float64),
        Table("part_maxima", "parts", maxima, torch.float64),
    ]


class Scratch:
    """All scratch memory of a call: one allocation, and the addresses of tables within it.

    Whether a pointer is aligned is part of a compile key, so every table begins at a multiple of 16 bytes, whatever
    the size of the batch.
    """

    __slots__ = ("_grid", "address", "addresses", "memory", "tables")

    def __init__(
        self, tables: tuple[Table, ...], places: Sequence[int], size: int, grid: Grid | None, device: torch.device
    ) -> None:
        # Tests exchange torch.empty by what takes its arguments like this.
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.address = address = self.memory.data_ptr()
        self.addresses = list(map(address.__add__, places))
        self.tables, self._grid = tables, grid

    def tensor(self, name: str) -> Tensor:
        """View a table as a tensor: for Triton when it compiles, for its interpreter, for tests."""
        place = [table.name for table in self.tables].index(name)
        table, start = self.tables[place], self.addresses[place] - self.address
        columns: int = getattr(self._grid, table.per)
        size = (columns,) if table.rows is None else (table.rows, columns)
        return self.memory[start : start + prod(size) * table.dtype.itemsize].view(table.dtype).view(size)


def places_of(tables: tuple[Table, ...], grid: Grid, gap: int) -> tuple[list[int], int]:
    """Lay tables side by side, so many bytes apart: the first byte of each, and the bytes of all."""
    columns = [-(-getattr(grid, table.per) // ROUNDED) * ROUNDED for table in tables]
    widths = [table.dtype.itemsize * (1 if table.rows is None else table.rows) for table in tables]
    *places, size = accumulate([gap + many * width for many, width in zip(columns, widths, strict=True)], initial=0)
    return places, size


# --- operations ---


def picker(places: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Make what picks entries by their places or names, as a tuple however many there are."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])


class Site:
    """A kernel at its place in an operation, with what was compiled for its launches there.

    `size` gives its programs, and the threads of a program, for a grid; `fixed` parameters have the same value in all
    launches; `renamed` has names of values by the parameters of the kernel that go by another name.
    """

    __slots__ = ("compiled", "fixed", "is_known", "kernel", "pick", "places", "renamed", "size")

    def __init__(
        self,
        kernel: Any,
        size: Callable[[Grid], tuple[int, int]],
        fixed: Mapping[str, object],
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        self.kernel, self.size, self.fixed, self.renamed = kernel, size, fixed, dict(renamed or {})
        self.compiled: dict[object, Kept] = {}
        self.is_known = is_known(kernel)
        # The place of each argument among the values of a call, and what picks them; see `Operation`.
        self.places: dict[str, int] = {}
        self.pick = picker(())


class Call(NamedTuple):
    """The settings that all launches of a call share."""

    # Addresses of tensors and tables, strides, external tensors, numbers, sizes, constants: what kernels take.
    values: tuple[Any, ...]
    tensors: tuple[Tensor, ...]  # which have to live until the launches
    scratch: Scratch
    key: object  # tells launches of a site apart that Triton may compile apart
    device: torch.device


class Operation:
    """Kernels that are launched one after the other, with the tensors and the tables that they take by name.

    A kernel's parameter p_x takes the tensor x.

    Its calls are alike in everything that decides how a kernel is compiled, except for the grid and for alignments: in
    dtypes, in the device, and in which of the tensors are None. Tensors that are `strided` may lie in memory anyhow:
    kernels take the strides of "x" or "x_logp" as x_row and x_step.
    """

    def __init__(self, sites: Sequence[Site], tables: Sequence[Table] = (), strided: Sequence[str] = ()) -> None:
        self.sites, self.strided = tuple(sites), tuple(strided)
        self.tables = tuple([table for table in tables if table.rows != 0])
        self._missing = [table.name for table in tables if table.rows == 0]
        self.constants = (None, *[x for site in self.sites for x in site.fixed.values()])
        # Picks the tensors that are not None; made at the first call.
        self._held: Callable[[Mapping[str, Any]], tuple[Tensor, ...]] | None = None

    def launches(
        self, tensors: Mapping[str, Tensor | None], grid: Grid, externals: tuple[Tensor, ...] = (), **numbers: int
    ) -> tuple[Launch, ...]:
        """Allocate the tables of a call and list its launches, with numbers that kernels take by their names.

        A kernel takes `externals` as a tuple by this name.
        """
        held = (self._held or self._bind(tensors, numbers))(tensors)
        device = held[0].device
        strides, constants, sites, (places, size) = sized_for(self, grid, GAP)
        if not grid.contiguous and self.strided:
            strides = strides_of([tensors[name] for name in self.strided], grid)
        scratch = Scratch(self.tables, places, size, grid, device) if places else NOTHING
        addresses = tuple(map(Tensor.data_ptr, held))
        values = *addresses, *scratch.addresses, *strides, externals, *numbers.values(), *constants
        if externals:
            addresses = *addresses, *map(Tensor.data_ptr, externals)
        key = grid.cut, alignment_of(addresses, held + externals, scratch)
        call = Call(values, held, scratch, key, device)
        return tuple([Launch(*one, call) for one in sites])

    def _bind(
        self, tensors: Mapping[str, Tensor | None], numbers: Iterable[str]
    ) -> Callable[[Mapping[str, Any]], tuple[Tensor, ...]]:
        """Find the place of everything that kernels take among the values of a call; give what picks the tensors."""
        held = [name for name, x in tensors.items() if x is not None]
        prefixes = [name.removesuffix("_logp") for name in self.strided]
        strides = [f"{prefix}_{one}" for prefix in prefixes for one in ("row", "step")]
        fixed = [(site, parameter) for site in self.sites for parameter in site.fixed]
        names = [*held, *[table.name for table in self.tables], *strides, "externals", *numbers, *SIZES, None, *fixed]
        places: dict[object, int] = {name: place for place, name in enumerate(names)}
        places |= dict.fromkeys({*tensors, *self._missing} - {*held}, places[None])
        for site in self.sites:
            for parameter in parameters_of(site.kernel):
                name = parameter.removeprefix("p_")
                value = (site, name) if name in site.fixed else site.renamed.get(name, name)
                site.places[parameter] = places[value]
            site.pick = picker(tuple(site.places.values()))
        self._held = picker(held)
        return self._held


class Sized(NamedTuple):
    """The settings shared by calls of an operation that divide their batches alike."""

    strides: list[int]  # of strided tensors, if they are contiguous
    constants: tuple[Any, ...]  # and sizes
    sites: tuple[tuple[Site, int, int], ...]  # with the programs of each launch, and the threads of a program
    tables: tuple[list[int], int]  # see `places_of`


@cached_untraced(maxsize=1024)
def sized_for(operation: Operation, grid: Grid, gap: int) -> Sized:
    """Find what calls of an operation have in common on batches of a size."""
    return Sized(
        [grid.width, 1] * len(operation.strided),
        (*sizes_of(grid), *operation.constants),
        tuple([(site, *site.size(grid)) for site in operation.sites]),
        places_of(operation.tables, grid, gap),
    )


# Of operations without tables.
NOTHING = Scratch((), (), 0, None, torch.device("cpu"))


# --- launches ---


class Kept(NamedTuple):
    """A compiled kernel, and what Triton gives its launcher."""

    compiled: Any  # Triton 3.9 unloads its module when nothing refers to it any more
    launcher: Callable[..., object]
    function: Any
    metadata: Any
    driver: Any  # that it was compiled for


class Launch:
    """A launch of so many programs of a kernel, ready to run or to be compiled ahead of time."""

    __slots__ = ("call", "programs", "site", "threads")

    def __init__(self, site: Site, programs: int, threads: int, call: Call) -> None:
        self.site, self.programs, self.threads, self.call = site, programs, threads, call

    @property
    def kernel(self) -> Any:
        """The kernel."""
        return self.site.kernel

    @property
    def device(self) -> torch.device:
        """The device that it runs on."""
        return self.call.device

    @property
    def arguments(self) -> dict[str, Any]:
        """Every parameter of the kernel by name, with tensors instead of addresses, as Triton takes them."""
        values, tensors, scratch, _, _ = self.call
        first = [*map(as_bytes, tensors), *[scratch.tensor(table.name) for table in scratch.tables]]
        every = (*first, *values[len(first) :])
        return {name: every[place] for name, place in self.site.places.items()}

    def options(self, warp: int, nvidia: bool) -> dict[str, int]:
        """Give Triton's options: warps of so many threads and, of a pass over tokens on NVIDIA, a cap of registers."""
        # Sums and products are contracted whatever TRITON_DEFAULT_FP_FUSION says; Triton 3.9 warns who does not choose.
        found, arguments = {"num_warps": max(1, self.threads // warp), "enable_fp_fusion": True}, self.arguments
        if nvidia and "TILING" in arguments and arguments["PLAN"].registers is not None:
            found["maxnreg"] = arguments["PLAN"].registers
        return found

    def run(self) -> None:
        """Launch it on the current stream of its device, which is the current one."""
        kept = self.site.compiled.get(self.call.key)
        if kept is None or kept.driver is not plain_driver(self.site.kernel):
            self._dispatch()
        else:
            kept.launcher(*self._as_kept(kept))

    def _as_kept(self, kept: Kept) -> tuple[Any, ...]:
        """List the arguments of the launcher, as Triton's dispatch gives them where there is no hook to be called."""
        call, (_, _, function, metadata, driver) = self.call, kept
        stream = driver.get_current_stream(call.device.index or 0)
        return self.programs, 1, 1, stream, function, metadata, None, None, None, *self.site.pick(call.values)

    def _dispatch(self) -> None:
        """Launch it through Triton, and keep the kernel that it takes if `run` would launch that in the same way."""
        kernel, grid, named = self.kernel, (self.programs,), self.arguments
        options = self.options(warp_size(self.device), self.device.type == "cuda" and torch.version.hip is None)
        if only_compiles():
            kernel.warmup(**named, grid=grid, **options)
            return
        driver = plain_driver(kernel) if self.site.is_known else None
        if driver is None:
            kernel[grid](**named, **options)
            return
        compiled = kernel.warmup(**named, grid=grid, **options)
        with recorded(compiled) as calls:
            kernel[grid](**named, **options)
        for launcher, call in calls:
            # The grid and the stream, these two, what hooks are told, the hooks, and the kernel's arguments.
            if len(call) > 9:
                kept = Kept(compiled, launcher, function=call[4], metadata=call[5], driver=driver)
                if is_same_call(call, self._as_kept(kept)):
                    self.site.compiled[self.call.key] = kept


# Of this thread alone: what others launch meanwhile is launched.
_THREAD = threading.local()


def only_compiles() -> bool:
    """Return whether launches of this thread are compiled and not launched."""
    return getattr(_THREAD, "only_compiles", False)


@contextmanager
def compiled_meanwhile(threads: int) -> Iterator[Sequence[Future[Any]]]:
    """Compile, in so many threads, what this thread launches inside, and launch nothing; give all compilations.

    Nine tenths of compiling are MLIR, LLVM and a process of ptxas, which hold no lock of Python. Triton's dispatch
    finds the compilations afterwards, other processes find them on disk. Leaving waits for all of them.
    """
    with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool) as mode:
        _THREAD.only_compiles = True
        try:
            yield mode.raw_futures
        finally:
            _THREAD.only_compiles = False


# Held while a launcher is replaced. Two threads that replaced one at a time would each put back what they found, the
# second of them the recorder of the first.
_RECORDING = threading.Lock()


@contextmanager
def recorded(compiled: Any) -> Iterator[list[tuple[Callable[..., object], tuple[Any, ...]]]]:
    """Record how Triton calls the launcher of a compiled kernel in this thread: the launcher, and its arguments.

    Nothing promises that call. Where Triton has its launchers elsewhere nothing is recorded. One thread records at a
    time, since the launcher of a compiled kernel is replaced for all of them.
    """
    calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
    with _RECORDING:
        if not hasattr(compiled, "_run") or compiled.run is not compiled._run:
            yield calls
            return
        thread, launcher = threading.get_ident(), compiled.run

        def record(*arguments: Any, **named: Any) -> None:
            if threading.get_ident() == thread and not named:
                calls.append((launcher, arguments))
            launcher(*arguments, **named)

        compiled._run = record
        try:
            yield calls
        finally:
            compiled._run = launcher


def is_same_call(call: tuple[Any, ...], mine: tuple[Any, ...]) -> bool:
    """Return whether a launcher takes two calls alike. Triton's, the first, has tensors, and hooks that are empty."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if len(call) != len(mine) or any(x is not hook for x, hook in zip(call[7:9], hooks, strict=True)):
        return False
    return all(map(is_same, call[:6] + call[9:], mine[:6] + mine[9:]))


def is_same(x: Any, mine: Any) -> bool:
    """Return whether a launcher takes two arguments alike: a tensor is its address."""
    if type(x) is tuple and type(mine) is tuple:
        return len(x) == len(mine) and all(map(is_same, x, mine))
    x, mine = (one.data_ptr() if isinstance(one, Tensor) else one for one in (x, mine))
    return type(x) is type(mine) and x == mine


def plain_driver(kernel: Any) -> Any:
    """Give the driver that Triton launches on; None if its dispatch has more to do than to find a kernel and launch it.

    That is so where functions are called around launches or before those of this kernel, where kernels are compiled
    for debugging or profiling, and in a Triton that has none of these switches.
    """
    runtime = knobs.runtime
    try:
        if (
            runtime.debug
            or runtime.launch_enter_hook.calls
            or runtime.launch_exit_hook.calls
            or kernel.pre_run_hooks
            or knobs.compilation.instrumentation_mode
            or runtime.add_stages_inspection_hook is not None
        ):
            return None
    except AttributeError:
        return None
    return DRIVERS.active


# Triton's instance, not the module of the same name.
DRIVERS = triton.runtime.driver


def is_known(kernel: Any) -> bool:
    """Tell whether compilations of a kernel depend on dtypes, alignments and constants, and on no value of a number."""
    return type(kernel) is JITFunction and all(
        one.do_not_specialize for one in kernel.params if not one.is_constexpr and one.annotation_type
    )


@cached_untraced(maxsize=64)
def parameters_of(kernel: Any) -> tuple[str, ...]:
    """Name the parameters of a kernel in order."""
    return tuple(signature(kernel.fn).parameters)


def as_bytes(x: Any) -> Any:
    """View a bool tensor as the bytes it holds: a byte of 2 is valid too."""
    return x.view(torch.uint8) if isinstance(x, Tensor) and x.dtype == torch.bool else x


def alignment_of(addresses: tuple[int, ...], tensors: tuple[Tensor, ...], scratch: Scratch) -> object:
    """Return what Triton tells the compiler about pointers, dtypes apart, as a part of a key."""
    if torch.version.hip is None and (reduce(or_, addresses) | scratch.address) & 15 == 0:
        return 0  # all of them are aligned, which is the rule
    aligned = tuple([x & 15 == 0 for x in (*addresses, scratch.address)])
    if torch.version.hip is None:
        return aligned
    return aligned, tuple([x.untyped_storage().nbytes() <= SMALL_STORAGE for x in (*tensors, scratch.memory)])


def dtypes_of(tensors: Sequence[Tensor | None]) -> tuple[torch.dtype | None, ...]:
    """Return the dtype of each tensor; None for one that is not there."""
    return tuple(map(getattr, tensors, repeat("dtype"), repeat(None)))

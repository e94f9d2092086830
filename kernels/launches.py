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
from functools import reduce
from inspect import signature
from itertools import accumulate, repeat
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from rollout_corr.spec.caches import cached

# Bytes from one slice of a workspace to the next, beyond what alignment takes; tests look there for stray writes.
GAP = 0
# Elements of a slice are counted in multiples of this, so that every slice begins at a multiple of 16 bytes.
ROUNDED = 16
# AMD's compiler is told of tensors in storages up to this size.
SMALL_STORAGE = 2**31 - 1


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Give what picks values by their places, as a tuple however many there are."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])


# --- scratch memory ---


class Field(NamedTuple):
    """A table that a workspace holds, [rows, count] or [count]."""

    name: str
    rows: int | None  # None: one dimension
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Bytes for each of what its columns count."""
        return self.dtype.itemsize * (1 if self.rows is None else self.rows)


class WorkspaceLayout:
    """The tables of an operation, grouped by what their columns count.

    Args:
        groups: Tables for each of the counts that `Workspace` is given, in order.
    """

    def __init__(self, *groups: Sequence[Field]) -> None:
        tables = [(number, field) for number, group in enumerate(groups) for field in group]
        self.fields = [field for _, field in tables]
        self.names = tuple([field.name for field in self.fields])
        self.groups = [number for number, _ in tables]


class Workspace:
    """All scratch memory of a call: one allocation, and the addresses of tables within it, side by side.

    Whether a pointer is aligned is part of a compile key, so every table begins at a multiple of 16 bytes, whatever
    the counts.
    """

    __slots__ = ("_made", "addresses", "counts", "first", "layout", "memory")

    def __init__(self, layout: WorkspaceLayout, counts: tuple[int, ...], device: torch.device) -> None:
        places, total = places_of(layout, counts, GAP)
        # Tests exchange torch.empty by what takes its arguments like this.
        self.memory = torch.empty(total, dtype=torch.uint8, device=device)
        self.first = first = self.memory.data_ptr()
        self.addresses = list(map(first.__add__, places))
        self.layout, self.counts = layout, counts
        self._made: dict[str, Tensor] | None = None

    def tensor(self, name: str) -> Tensor:
        """Give a table as a tensor: to Triton when it compiles, to its interpreter, to tests."""
        if self._made is None:
            self._made = {}
        if name not in self._made:
            place = self.layout.names.index(name)
            field, count = self.layout.fields[place], self.counts[self.layout.groups[place]]
            start = self.addresses[place] - self.memory.data_ptr()
            size = (count,) if field.rows is None else (field.rows, count)
            self._made[name] = self.memory[start : start + field.width * count].view(field.dtype).view(size)
        return self._made[name]


@cached(maxsize=1024)
def places_of(layout: WorkspaceLayout, counts: tuple[int, ...], gap: int) -> tuple[list[int], int]:
    """Lay tables side by side, and that many bytes apart: the first byte of each, and the bytes of all."""
    lengths = [
        gap + -(-counts[group] // ROUNDED) * ROUNDED * field.width
        for group, field in zip(layout.groups, layout.fields, strict=True)
    ]
    *places, total = accumulate(lengths, initial=0)
    return places, total


# Of launches that need no scratch memory.
NOTHING = Workspace(WorkspaceLayout(), (), torch.device("cpu"))


# --- launches ---


class Names:
    """The names of the values that the launches of an operation take their arguments from, in order.

    Args:
        tensors: All tensors that they may take, and which of them are there; values hold those by address.
        tables: Tables of the workspace, by address too.
        strided: Tensors that are read with strides of their own, see `grid.strides_of`. Behind them, "externals" are
            further tensors.
        others: What values hold as it is. Behind them stands None, by the name "nothing".
    """

    def __init__(
        self, tensors: Mapping[str, object], tables: Sequence[str], strided: Sequence[str], others: Sequence[str]
    ) -> None:
        self.tensors, self.tables = tuple([name for name, there in tensors.items() if there]), tuple(tables)
        self._held = picker([place for place, there in enumerate(tensors.values()) if there])
        strides = [f"{name}_{one}" for name in strided for one in ("row", "step")]
        every = (*self.tensors, *tables, *strides, "externals", *others, "nothing")
        self.places = {name: place for place, name in enumerate(every)}

    def operands(
        self,
        tensors: Sequence[Tensor | None],
        workspace: Workspace,
        strides: Sequence[int],
        extras: tuple[Tensor, ...],
        others: Sequence[Any],
        key: object,
        device: torch.device,
    ) -> Operands:
        """Give the operands of a call.

        Args:
            tensors: All tensors in order; those that are not there are not looked at.
            workspace: The tables.
            strides: Those of strided tensors.
            extras: The further tensors.
            others: The other values.
            key: What tells launches apart beside alignments.
            device: The device of the tensors.
        """
        held = self._held(tensors)
        addresses = tuple(map(Tensor.data_ptr, held))
        values = *addresses, *workspace.addresses, *strides, extras, *others, None
        key = key, alignment_of(addresses, held, workspace, extras)
        return Operands(values, held, workspace, key, device)


class Site:
    """A kernel at its place in an operation, with what was compiled for its launches there.

    Everything that a compilation depends on is the same for all of its launches, but for their keys.

    Args:
        kernel: The kernel.
        names: The names of values.
        renamed: Names of values by parameters of the kernel that go by another name. One without a value takes None.
    """

    __slots__ = ("_names", "compiled", "kernel", "known", "pick", "takes")

    def __init__(self, kernel: Any, names: Names, renamed: Mapping[str, str] | None = None) -> None:
        renamed = {} if renamed is None else renamed
        self.kernel, self._names = kernel, names
        self.compiled: dict[Any, Kept] = {}
        # The name of the value that each parameter takes, and what picks these values.
        takes = {name: renamed.get(name, name) for name in parameters_of(kernel)}
        self.takes = {name: value if value in names.places else "nothing" for name, value in takes.items()}
        self.pick = picker([names.places[name] for name in self.takes.values()])
        self.known = _is_known(kernel)

    def arguments(self, call: Operands) -> dict[str, Any]:
        """Give every parameter by name, as Triton's dispatch takes it: tensors in the place of addresses."""
        names, found = self._names, {}
        for parameter, name in self.takes.items():
            if name in names.tensors:
                found[parameter] = as_bytes(call.tensors[names.tensors.index(name)])
            elif name in names.tables:
                found[parameter] = call.workspace.tensor(name)
            else:
                found[parameter] = call.values[names.places[name]]
        return found


class Kept(NamedTuple):
    """A compiled kernel, and how Triton called its launcher.

    Attributes:
        compiled: The kernel itself: Triton 3.9 unloads its module when nothing refers to it any more.
        launcher: Its launcher.
        function: Its handle.
        metadata: What the launcher wants to know of it.
        driver: The driver that it was compiled for.
    """

    compiled: Any
    launcher: Callable[..., object]
    function: Any
    metadata: Any
    driver: Any


class Operands(NamedTuple):
    """All that the launches of a call have in common.

    Attributes:
        values: What they take their arguments from, in the order of `Names`.
        tensors: The tensors whose addresses are among them, which have to live until the launches.
        workspace: The tables whose addresses are among them.
        key: Tells launches of a site apart that Triton may compile apart.
        device: The device of the tensors.
    """

    values: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    workspace: Workspace
    key: object
    device: torch.device


class Sized(NamedTuple):
    """The launches that calls of one recipe and one division have in common.

    Attributes:
        values: Values that are no addresses.
        launches: Of each launch the site, the number of programs, and the threads of a program.
    """

    values: tuple[Any, ...]
    launches: tuple[tuple[Site, int, int], ...]

    def on(self, operands: Operands) -> tuple[Launch, ...]:
        """List the launches of a call."""
        return tuple([Launch(*one, operands) for one in self.launches])


class Launch:
    """A kernel launch, ready to run or to be compiled ahead of time.

    Attributes:
        site: The kernel, and what has been compiled for it.
        programs: The number of programs.
        threads: Threads of a program.
        operands: What it takes its arguments from.
    """

    __slots__ = ("operands", "programs", "site", "threads")

    def __init__(self, site: Site, programs: int, threads: int, operands: Operands) -> None:
        self.site, self.programs, self.threads, self.operands = site, programs, threads, operands

    @property
    def kernel(self) -> Any:
        """The kernel."""
        return self.site.kernel

    @property
    def device(self) -> torch.device:
        """The device that it runs on."""
        return self.operands.device

    @property
    def arguments(self) -> dict[str, Any]:
        """Every parameter of the kernel by name, tables as tensors."""
        return self.site.arguments(self.operands)

    def options(self, warp: int, nvidia: bool) -> dict[str, int]:
        """Give Triton's options: warps of so many threads and, of a pass over tokens on NVIDIA, a cap of registers."""
        # Sums and products are contracted whatever TRITON_DEFAULT_FP_FUSION says; Triton 3.9 warns who does not choose.
        found, arguments = {"num_warps": max(1, self.threads // warp), "enable_fp_fusion": True}, self.arguments
        if nvidia and "TILING" in arguments and self.threads == warp and arguments["PLAN"].registers is not None:
            found["maxnreg"] = arguments["PLAN"].registers
        return found

    def run(self) -> None:
        """Launch it on the current stream of its device, which is the current one."""
        kept = self.site.compiled.get(self.operands.key)
        if kept is None or kept.driver is not plain_driver(self.site.kernel):
            self._dispatch()
        else:
            kept.launcher(*self._call(kept))

    def _call(self, kept: Kept) -> tuple[Any, ...]:
        """List the arguments of a launcher, as Triton's dispatch gives them where there is no hook to be called."""
        stream = kept.driver.get_current_stream(self.device.index or 0)
        arguments = self.site.pick(self.operands.values)
        return self.programs, 1, 1, stream, kept.function, kept.metadata, None, None, None, *arguments

    def _dispatch(self) -> None:
        """Launch it through Triton, and keep the kernel that it takes if `run` would launch that in the same way."""
        kernel, grid, named = self.kernel, (self.programs,), self.arguments
        options = self.options(warp_size(self.device), self.device.type == "cuda" and torch.version.hip is None)
        if getattr(_THREAD, "only_compiles", False):
            kernel.warmup(**named, grid=grid, **options)
            return
        driver = plain_driver(kernel) if self.site.known else None
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
                if is_same_call(call, self._call(kept)):
                    self.site.compiled[self.operands.key] = kept


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


@contextmanager
def recorded(compiled: Any) -> Iterator[list[tuple[Callable[..., object], tuple[Any, ...]]]]:
    """Record how Triton calls the launcher of a compiled kernel in this thread: the launcher, and its arguments.

    Nothing promises that call. Where Triton has its launchers elsewhere nothing is recorded.
    """
    calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
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
    """Tell whether a launcher takes two calls alike. Triton's, the first, has tensors, and hooks that are empty."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if len(call) != len(mine) or any(x is not hook for x, hook in zip(call[7:9], hooks, strict=True)):
        return False
    return all(map(is_same, call[:6] + call[9:], mine[:6] + mine[9:]))


def is_same(x: Any, mine: Any) -> bool:
    """Tell whether a launcher takes two arguments alike: a tensor is its address."""
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
            or (HAS_STAGES and runtime.add_stages_inspection_hook is not None)
        ):
            return None
    except AttributeError:
        return None
    return DRIVERS.active


# Triton's own, beside which stands the module of this name.
DRIVERS = triton.runtime.driver
HAS_STAGES = hasattr(knobs.runtime, "add_stages_inspection_hook")


def _is_known(kernel: Any) -> bool:
    """Tell whether compilations of a kernel depend on nothing but dtypes, alignments and constants.

    That is so where Triton is told not to look at values of numbers.
    """
    if type(kernel) is not JITFunction:
        return False
    numbers = [one for one in kernel.params if not one.is_constexpr and one.annotation_type]
    return all(one.do_not_specialize for one in numbers)


@cached(maxsize=64)
def parameters_of(kernel: Any) -> tuple[str, ...]:
    """Name the parameters of a kernel in order."""
    return tuple(signature(kernel.fn).parameters)


@cached(maxsize=16)
def warp_size(device: torch.device) -> int:
    """Count the threads of a warp: 32, or 64 on some of AMD's GPUs."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def as_bytes(x: Any) -> Any:
    """View a bool tensor as the bytes it holds: a byte of 2 is valid too."""
    return x.view(torch.uint8) if isinstance(x, Tensor) and x.dtype == torch.bool else x


def alignment_of(
    addresses: tuple[int, ...], tensors: tuple[Tensor, ...], workspace: Workspace, extras: tuple[Tensor, ...]
) -> object:
    """Give what Triton tells the compiler of pointers to tensors beside their dtypes, as a part of a key.

    Args:
        addresses: The addresses of the tensors.
        tensors: The tensors.
        workspace: The tables.
        extras: Further tensors.
    """
    if extras:
        tensors, addresses = (*tensors, *extras), (*addresses, *map(Tensor.data_ptr, extras))
    if torch.version.hip is None and (reduce(or_, addresses) | workspace.first) & 15 == 0:
        return 0  # all of them are aligned, which is the rule
    aligned = tuple([x & 15 == 0 for x in (*addresses, workspace.first)])
    if torch.version.hip is None:
        return aligned
    return aligned, tuple([x.untyped_storage().nbytes() <= SMALL_STORAGE for x in (*tensors, workspace.memory)])


def dtypes_of(tensors: Sequence[Tensor | None]) -> tuple[torch.dtype | None, ...]:
    """Give the dtype of each tensor; None for one that is not there."""
    return tuple(map(getattr, tensors, repeat("dtype"), repeat(None)))

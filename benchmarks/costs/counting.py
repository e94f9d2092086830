"""Counts of what a call asks of a device. Tensors of the CPU, or without memory, stand in for tensors of a device.

An operation of torch that computes or copies is one launch, though a sort or `nonzero` takes several: so counts of
torch are low rather than high. A launch of ours is one of Triton's. Views and allocations are none.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten

# They make room, or another view of what is there, and move nothing.
STILL = {
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *("_unsafe_view", "lift_fresh", "alias", "detach", "_local_scalar_dense"),
    )
}
# The shape of their result is known when the device has computed it.
SHAPED_BY_VALUES = {
    f"aten::{name}"
    for name in ("nonzero", "masked_select", "bincount", "unique_dim", "_unique", "_unique2", "unique_consecutive")
}
# They write what they are given, and do not read it.
OVERWRITE = {f"aten::{name}" for name in ("copy_", "fill_", "zero_")}
# They read as many elements of their first argument as they return.
PICK = {f"aten::{name}" for name in ("index", "index_select", "gather", "take", "embedding")}
# They read and write as many elements of their first argument as they are given values.
PUT = {
    f"aten::{name}"
    for name in ("index_put_", "_index_put_impl_", "index_add_", "scatter_", "scatter_add_", "scatter_reduce_")
}

# Calls that make a tensor from nothing: on the host, where no device is named.
FACTORIES = {
    *(torch.tensor, torch.as_tensor, torch.from_numpy, torch.arange, torch.linspace, torch.eye),
    *(torch.zeros, torch.ones, torch.full, torch.empty, torch.rand, torch.randn, torch.randint, torch.randperm),
}
FROM_PYTHON = {torch.tensor, torch.as_tensor}
READ_ON_THE_HOST = {Tensor.numpy, Tensor.tolist, Tensor.__array__}


class Wait(NamedTuple):
    """A place where the host waits for the device."""

    what: str
    place: str


@dataclass
class Cost:
    """The cost of a call.

    Attributes:
        launches: Operations that launch at least one kernel.
        waits: Where the host waits for the device.
        read: Bytes that operations read.
        written: Bytes that they write.
        temporaries: The most bytes at a time beyond what is left when the call has returned.
        peak: The most bytes at a time, with what is left.
        moves: Bytes that each launch of torch reads and writes, in order.
    """

    launches: int = 0
    waits: list[Wait] = field(default_factory=list)
    read: int = 0
    written: int = 0
    temporaries: int = 0
    peak: int = 0
    moves: list[tuple[int, int]] = field(default_factory=list)

    def amounts(self) -> dict[str, int]:
        """The launches, waits and bytes that a row of results has."""
        return {"launches": self.launches, "waits": len(self.waits), "read": self.read, "written": self.written}


@dataclass
class Memory:
    """Log of allocations: each event is a storage's number and its bytes, negative where it is freed."""

    events: list[tuple[int, int]] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)

    def add(self, x: Tensor, given: bool = False) -> bool:
        """Note the storage of a tensor, which takes no memory of the call where it was given; whether it is new."""
        storage = x.untyped_storage()
        if storage._cdata in self.known:
            return False
        number, size = len(self.events), 0 if given else storage.nbytes()
        self.known[storage._cdata] = number
        self.events.append((number, size))
        weakref.finalize(storage, self._free, storage._cdata, number, size)
        return True

    def _free(self, place: int, number: int, size: int) -> None:
        if self.known.get(place) == number:
            del self.known[place]
        self.events.append((number, -size))

    def temporaries(self) -> int:
        """Return the peak of what has gone by now."""
        gone = {number for number, size in self.events if size < 0}
        return _most(size for number, size in self.events if number in gone)

    def peak(self) -> int:
        """Return the peak of everything."""
        return _most(size for _, size in self.events)


def _most(sizes: Iterable[int]) -> int:
    return max(accumulate(sizes, initial=0))


class Counting(TorchDispatchMode):
    """Counts the operations that code of a folder calls, forward and backward; `entries`: what others call of it."""

    def __init__(self, root: Path, entries: Collection[str] = ()) -> None:
        super().__init__()
        self.root, self.entries = f"{root}/", entries
        self.cost, self.memory = Cost(), Memory()
        self.on_host: Any = WeakIdKeyDictionary()
        self.aside = False
        # Which nodes of autograd's graph the code has made, by their numbers.
        self.nodes: dict[int, bool] = {}
        self.numbered = torch._C._autograd._get_sequence_nr()

    def place(self) -> str | None:
        """File and line of the code that calls; None: other code does."""
        frame: Any = sys._getframe(1)
        place, entry = None, ""
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self.root):
                place, entry = place or f"{name.removeprefix(self.root)}:{frame.f_lineno}", frame.f_code.co_name
            frame = frame.f_back
        return None if self.entries and entry not in self.entries else place

    def wait(self, what: str, place: str | None = None) -> None:
        self.cost.waits.append(Wait(what, place or self.place() or "backward"))

    def __torch_dispatch__(self, function: Any, _: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        place = self._origin()
        given = [x for x in tree_leaves((arguments, named)) if isinstance(x, Tensor)]
        if function is aten._to_copy.default and given[0].is_meta and named.get("device") == torch.device("cpu"):
            result = torch.zeros_like(given[0], device="cpu")
            self.on_host[result] = True
        else:
            result = function(*arguments, **named)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if self.aside or (given and all(x in self.on_host for x in given)):
            for x in made:
                self.on_host[x] = True
        elif place is not None and not function.is_view:
            self._count(function, arguments, named, given, made, result, place)
        return result

    def _origin(self) -> str | None:
        place, node = self.place(), torch._C._current_autograd_node()
        if node is not None:
            return place or ("backward" if self.nodes.get(node._sequence_nr()) else None)
        now = torch._C._autograd._get_sequence_nr()
        for number in range(self.numbered, now):
            self.nodes[number] = place is not None
        self.numbered = now
        return place

    def _count(
        self,
        function: Any,
        arguments: Any,
        named: Any,
        given: list[Tensor],
        made: list[Tensor],
        result: Any,
        place: str,
    ) -> None:
        name, cost = function._schema.name, self.cost
        if waits := _waits_for(name, function, arguments, named, given, result):
            self.wait(waits, place)
        for x in given:
            self.memory.add(x, given=True)
        fresh = [x for x in made if self.memory.add(x)]
        if name in STILL or not (given or made):  # such as `promote_types`, of dtypes
            return
        cost.launches += 1
        changed = list(_changed(function, arguments, named))
        kept = [x for x in given if not any(x is one for one in changed)]
        if name in PICK:
            kept = [*made, *kept[1:]]
        if name in PUT:
            changed = kept[-1:]
        written = sum(map(_extent, [*fresh, *changed]))
        read = sum(map(_extent, kept)) + (0 if name in OVERWRITE else sum(map(_extent, changed)))
        cost.moves.append((read, written))
        cost.read += read
        cost.written += written


def _waits_for(name: str, function: Any, arguments: Any, named: Any, given: list[Tensor], result: Any) -> str | None:
    if given and isinstance(result, (bool, int, float, complex)):
        return "item"
    if name in SHAPED_BY_VALUES or (function is aten.repeat_interleave.Tensor and named.get("output_size") is None):
        return "shape"
    if name in ("aten::index", "aten::index_put_", "aten::_index_put_impl_"):
        by_mask = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in arguments[1])
        # One number at a mask is written without asking where.
        one_number = name != "aten::index" and len(arguments[1]) == 1 and arguments[2].numel() == 1
        return "shape" if by_mask and not one_number else None
    if name == "aten::_to_copy" and given[0].is_meta and not result.is_meta:
        return "copy to the host"
    return None


def _changed(function: Any, arguments: Any, named: Mapping[str, Any]) -> Iterator[Tensor]:
    for number, about in enumerate(function._schema.arguments):
        if about.alias_info is not None and about.alias_info.is_write:
            value = arguments[number] if number < len(arguments) else named.get(about.name)
            yield from (x for x in tree_leaves(value) if isinstance(x, Tensor))


def _extent(x: Tensor) -> int:
    """Bytes of a tensor, of repeated elements once."""
    size = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        size *= length if stride else 1
    return size if x.numel() else 0


class Callers(TorchFunctionMode):
    """Tells what lies on the host: where tensors of the CPU stand for those of a device, no operation shows it."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self.counting = counting

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named, counting = named or {}, self.counting
        if counting.place() is None:
            return function(*arguments, **named)
        if function in FACTORIES:
            return self._factory(function, arguments, named)
        if function in READ_ON_THE_HOST and arguments[0] not in counting.on_host:
            counting.wait("copy to the host")
        if function in (Tensor.to, Tensor.cpu):
            there = torch.device("cpu") if function is Tensor.cpu else None
            places = [x for x in (*arguments[1:], *named.values(), there) if isinstance(x, (str, torch.device))]
            to_host = function is Tensor.cpu or "cpu" in places
            if places and arguments[0].device.type == "cpu" and to_host != (arguments[0] in counting.on_host):
                return self._copied(function, arguments, named, to_host)
        return function(*arguments, **named)

    def _factory(self, function: Any, arguments: Any, named: Any) -> Any:
        where = named.get("device")
        if where is None and isinstance(arguments[0] if arguments else None, Tensor):
            return function(*arguments, **named)
        if where not in (None, "cpu"):
            if function in FROM_PYTHON:
                self.counting.wait("copy from the host")
            return function(*arguments, **named)
        return self._set(True, function, arguments, named)

    def _copied(self, function: Any, arguments: Any, named: Any, to_host: bool) -> Any:
        self.counting.wait("copy to the host" if to_host else "copy from the host")
        copied = self._set(to_host, function, arguments, named)
        return copied if copied is not arguments[0] else self._set(to_host, aten.alias, arguments[:1], {})

    def _set(self, on_host: bool, function: Any, arguments: Any, named: Any) -> Any:
        self.counting.aside, before = True, self.counting.aside
        try:
            made = function(*arguments, **named)
        finally:
            self.counting.aside = before
        if on_host:
            self.counting.on_host[made] = True
        else:
            self.counting.on_host.pop(made, None)
        return made


def cost_of(call: Callable[[], object], root: Path, entries: Collection[str] = ()) -> Cost:
    """Count what code does in a call; what the call returns is not a temporary. See `Counting`."""
    mode = Counting(root, entries)
    with mode, Callers(mode):
        result = call()
    mode.cost.temporaries, mode.cost.peak = mode.memory.temporaries(), mode.memory.peak()
    del result
    return mode.cost

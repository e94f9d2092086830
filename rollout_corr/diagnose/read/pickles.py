"""Interpret pickles of tensors, lists, dicts, numbers and texts. Nothing is imported, called or executed.

torch's own `weights_only` unpickler is not used: before torch 2.10 a crafted file corrupts memory through it
(CVE-2026-24747), in every version it calls what a file names with arguments of the file's choice (`bytearray(10**11)`),
and memory-mapped it does not compare the size that a tensor claims with that of its record.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor

from rollout_corr.definition.offsets import checked_offsets

# A longer pickle is refused: its values become objects of Python, 10 to 60 times as large. Tensors lie outside of it.
LONGEST_PICKLE = 128 << 20
# References make a pickle grow: so many values for each byte of the file are followed.
REPEATED = 16
MOST_DIMENSIONS = 8

# Booleans are read as bytes: a damaged one may hold other values than 0 and 1, which torch.bool does not allow for.
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "bool": torch.uint8,
}
UNTYPED = "torch.storage.UntypedStorage"
STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.uint8,
    UNTYPED: torch.uint8,
}
# How many arguments torch takes. With others torch.load refuses the file, so this one was not written by torch.save.
ARGUMENTS = {
    "torch._utils._rebuild_parameter": (3,),
    "torch._utils._rebuild_parameter_with_state": (4,),
    "torch._utils._rebuild_tensor": (4,),
    "torch._utils._rebuild_tensor_v2": (6, 7),
    "torch._utils._rebuild_tensor_v3": (7, 8),
}
NJT = "torch.nested._internal.nested_tensor._rebuild_njt"


class PickleError(ValueError):
    """A pickle that is damaged, or was not written by torch.save."""


class Storage(NamedTuple):
    """The values of tensors: a part of the file.

    Attributes:
        dtype: Of the values; None if it is none that is read.
        begin: Offset in the file, in bytes.
        values: Number of values.
        name: Name of its class.
    """

    dtype: torch.dtype | None
    begin: int
    values: int
    name: str


@dataclass(frozen=True)
class Unread:
    """Something in a pickle that is not read: an object of another class, or a tensor of a kind that has no rows."""

    what: str

    def __repr__(self) -> str:
        return self.what


@dataclass(frozen=True)
class _Named:
    """A class or function that a pickle names; it stays a name."""

    name: str


class Unpickler:
    """Interpreter of one pickle.

    Args:
        mapped: The whole file, for the values of tensors.
        storage: Takes a storage's key, number of values and class, and returns where it lies.
    """

    def __init__(self, mapped: Any, storage: Callable[[str, int, str], Storage]) -> None:
        self.mapped, self.storage = mapped, storage

    def load(self, data: bytes | IO[bytes]) -> Any:
        """Interpret a pickle up to its end.

        Raises:
            PickleError: An instruction is damaged, or is none that torch.save writes.
        """
        stack: list[Any] = []
        marks: list[list[Any]] = []
        memo: dict[int, Any] = {}
        begin = 0 if isinstance(data, bytes) else data.tell()
        for opcode, value, position in pickletools.genops(data):
            if position is not None and position - begin > LONGEST_PICKLE:
                raise PickleError(f"over {LONGEST_PICKLE >> 20} MiB of plain values; save tensors instead of lists")
            name, argument = opcode.name, cast("Any", value)
            if name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in ("BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "LONG1", "SHORT_BINSTRING"):
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name]())
            elif name == "MARK":
                marks.append(stack)
                stack = []
            elif name == "TUPLE":
                items, stack = stack, marks.pop()
                stack.append(tuple(items))
            elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
                size = int(name[-1])
                if len(stack) < size:
                    raise PickleError("an instruction lacks its values")
                stack[-size:] = [tuple(stack[-size:])]
            elif name == "APPEND":
                item = stack.pop()
                _of(list, stack[-1]).append(item)
            elif name == "APPENDS":
                items, stack = stack, marks.pop()
                _of(list, stack[-1]).extend(items)
            elif name in ("SETITEM", "SETITEMS"):
                if name == "SETITEM":
                    items = stack[-2:]
                    del stack[-2:]
                else:
                    items, stack = stack, marks.pop()
                if not isinstance(stack[-1], Unread):
                    _set_items(_of(dict, stack[-1]), items)
            elif name == "GLOBAL":
                stack.append(_Named(argument.replace(" ", ".")))
            elif name == "REDUCE":
                arguments = _of(tuple, stack.pop())
                stack[-1] = self._made(stack[-1], arguments)
            elif name == "NEWOBJ":
                stack.pop()
                stack[-1] = Unread(f"an object of the class {_name(stack[-1])}")
            elif name == "BUILD":
                # The state of an object; of tensors and dicts it is nothing that a dump needs.
                stack.pop()
            elif name == "BINPERSID":
                stack[-1] = self._storage(stack[-1])
            elif name not in ("PROTO", "STOP"):
                raise PickleError(f"the instruction {name}, which torch.save does not write")
        return stack.pop()

    def _storage(self, identity: Any) -> Storage:
        kind, named, key, _, count = _of(tuple, identity)[:5]
        # The old format has a sixth part, for a view into another storage.
        if kind != "storage" or len(identity) not in (5, 6) or (len(identity) == 6 and identity[5] is not None):
            raise PickleError(f"an unknown reference {identity!r:.80}")
        if type(count) is not int or count < 0 or not isinstance(key, str):
            raise PickleError(f"a storage of {count!r:.40} values")
        return self.storage(key, count, _name(named))

    def _made(self, named: Any, arguments: tuple[Any, ...]) -> Any:
        """Return what a function of torch would rebuild."""
        name = _name(named)
        if name == "torch._tensor._rebuild_from_type_v2":
            function, _, arguments, _ = arguments
            return self._made(function, _of(tuple, arguments))
        if name in ARGUMENTS and len(arguments) not in ARGUMENTS[name]:
            raise PickleError(f"{name} with {len(arguments)} arguments")
        if name in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            return arguments[0]
        if name in (
            "torch._utils._rebuild_tensor",
            "torch._utils._rebuild_tensor_v2",
            "torch._utils._rebuild_tensor_v3",
        ):
            dtype = _name(arguments[6]) if name.endswith("v3") else None
            storage, offset, size, stride = arguments[:4]
            return self._tensor(storage, offset, size, stride, dtype)
        if name == "torch._utils._rebuild_nested_tensor":
            return _rows_of_nested(*arguments)
        if name == NJT:
            parts = _of(dict, arguments[0])
            return _rows_of_jagged(parts.get("values"), parts.get("offsets"), parts.get("lengths"))
        if name == "collections.OrderedDict":
            made: dict[Any, Any] = {}
            for pair in arguments[0] if arguments else ():
                _set_items(made, list(pair))
            return made
        if name == "torch.Size":
            return tuple(arguments[0])
        return Unread(f"an object that {name} makes")

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None) -> Tensor | Unread:
        if not isinstance(storage, Storage) or (dtype is None and storage.name == UNTYPED):
            raise PickleError("a tensor without storage, or without a dtype")
        known = storage.dtype if dtype is None else DTYPES.get(dtype.removeprefix("torch."))
        if known is None:
            return Unread(f"a tensor of {dtype or storage.name}")
        size, stride = _of(tuple, size), _of(tuple, stride)
        if len(size) != len(stride) or len(size) > MOST_DIMENSIONS:
            raise PickleError(f"a tensor of shape {size!r:.80} with strides {stride!r:.80}")
        if not all(type(x) is int and 0 <= x < 1 << 62 for x in (*size, *stride, offset)):
            raise PickleError(f"a tensor of shape {size!r:.80} with strides {stride!r:.80} at {offset!r:.40}")
        width = 1 if storage.dtype is None else storage.dtype.itemsize
        count = storage.values * width // known.itemsize
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if math.prod(size) == 0:
            # Its strides mean nothing, and its other dimensions may be of any size.
            return torch.zeros(1, dtype=known).as_strided(size, (0,) * len(size))
        if last >= count:
            raise PickleError(f"a tensor of shape {list(size)} reaches beyond its {count} values")
        if storage.begin % known.itemsize:
            # Vector instructions want aligned values, and the old format aligns nothing.
            part = bytearray(self.mapped[storage.begin : storage.begin + count * known.itemsize])
            return torch.frombuffer(part, dtype=known).as_strided(size, stride, offset)
        whole = torch.frombuffer(self.mapped, dtype=known, count=count, offset=storage.begin)
        return whole.as_strided(size, stride, offset)


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": lambda: Unread("a set"),
}


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise PickleError(f"expected a {kind.__name__}, got {value!r:.80}")
    return value


def _name(named: Any) -> str:
    return str(_of(_Named, named).name)


def _set_items(mapping: dict[Any, Any], items: list[Any]) -> None:
    if len(items) % 2:
        raise PickleError("a key without a value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Other keys may be made to collide, which takes quadratic time.
        if type(key) not in (str, int) or (type(key) is int and abs(key) >= 1 << 63):
            raise PickleError(f"a key {key!r:.40}")
        mapping[key] = value


def _rows_of_nested(values: Any, sizes: Any, strides: Any, starts: Any) -> list[Tensor] | Unread:
    """Return the rows of a nested tensor: [B, 1] sizes, [B] starts."""
    if not all(isinstance(part, Tensor) for part in (values, sizes, starts)) or sizes.dim() != 2 or sizes.shape[1] != 1:
        return Unread("a nested tensor of more than two dimensions")
    lengths, starts = sizes[:, 0].tolist(), starts.tolist()
    return [_row(values, start, start + length) for start, length in zip(starts, lengths, strict=True)]


def _rows_of_jagged(values: Any, offsets: Any, lengths: Any) -> list[Tensor] | Unread:
    """Return the rows of a jagged tensor: [B + 1] offsets, perhaps [B] lengths."""
    if not isinstance(values, Tensor) or not isinstance(offsets, Tensor) or values.dim() != 1:
        return Unread("a nested tensor of more than two dimensions")
    bounds = checked_offsets(offsets, values.shape[0], "offsets").tolist()
    if lengths is None:
        return [_row(values, start, stop) for start, stop in pairwise(bounds)]
    return [_row(values, start, start + length) for start, length in zip(bounds, lengths.tolist(), strict=False)]


def _row(values: Tensor, start: int, stop: int) -> Tensor:
    if not 0 <= start <= stop <= values.shape[0]:
        raise PickleError(f"a nested tensor with a row from {start} to {stop} of {values.shape[0]} values")
    return values[start:stop]


def check_repeats(found: Any, size: int) -> None:
    """Refuse what is much larger than its file: one list in many places, itself within itself, expanded tensors.

    Args:
        found: What a pickle holds.
        size: Bytes of the file.

    Raises:
        PickleError: It is.
    """
    left = REPEATED * size
    waiting: list[Iterator[Any]] = [iter([found])]
    while waiting:
        for value in waiting[-1]:
            left -= value.numel() if isinstance(value, Tensor) else 1
            if left < 0:
                raise PickleError("values that repeat: it holds itself, or grows far beyond the size of the file")
            # The interpreter makes these types and no others; a check for any Mapping takes half of the time.
            if isinstance(value, (dict, list, tuple)):
                waiting.append(iter(value.values() if isinstance(value, dict) else value))
                break
        else:
            waiting.pop()

"""Open .pkl files of tensors: their instructions are followed by a machine that can build values, and call nothing."""

from __future__ import annotations

import io
import math
import mmap
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .fields import LONGEST_NAME
from .formats import READ, Unread, check_torch, load_pt_bytes
from .problems import DumpError

# Instructions of a file, and values that its stack and its memo may hold. A batch of 10,000 samples takes some 50,000.
MOST_STEPS = 1 << 20
# Bytes of a text. Longer ones, and all bytes, are not copied out of the file.
LONGEST_TEXT = 1 << 20


DAMAGED = "its bytes are damaged, or of something else"

# Fields of the batch: token ids of prompt and response, and log-probs of the response.
TOKENS, RESPONSE = "sequences", "rollout_logprobs"


class _RefusedError(ValueError):
    """The reason for refusing a file, in words for the user."""


@dataclass
class Thing:
    """Inert record of a call, a class or a name that an instruction asked for.

    Attributes:
        name: Module and name.
        arguments: What the call would have been given.
        state: What its `__setstate__` would have been given.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


class _Mark:
    """A place on the stack."""


class _Machine:
    """Follows the instructions that protocols 2 to 5 write.

    Args:
        data: The bytes of the file.
    """

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Return the value that the pickle builds."""
        for _ in range(MOST_STEPS):
            code = CODES.get(chr(self._take(1)[0]))
            if code is None:
                raise _RefusedError(DAMAGED)
            if code.name == "STOP":
                return self.stack.pop()
            STEPS.get(code.name, _unknown)(self, self._argument(code))
        raise _RefusedError(f"it has more than {MOST_STEPS:,} instructions; save tensors instead of lists")

    def _take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise _RefusedError("it is cut off")
        self.at += count
        return self.data[self.at - count : self.at]

    def _argument(self, code: pickletools.OpcodeInfo) -> Any:
        """Read the argument of an instruction; bytes are views of the file."""
        kind = code.arg
        if kind is None:
            return None
        width = WIDTHS.get(code.name)
        if width is not None:
            view = self._take(int.from_bytes(self._take(width), "little"))
            if "UNICODE" not in code.name:
                return view
            if len(view) > LONGEST_TEXT:
                raise _RefusedError(f"a text of {len(view)} bytes")
            return str(view, "utf-8", "surrogatepass")
        # The others are short: numbers, and names that end with their line.
        stream = io.BytesIO(self.data[self.at : self.at + 4096])
        found = kind.reader(stream)
        self.at += stream.tell()
        return found

    def marked(self) -> list[Any]:
        """Take what lies above the last mark."""
        i = len(self.stack) - 1
        while not isinstance(self.stack[i], _Mark):
            i -= 1
            if i < 0:
                raise _RefusedError(DAMAGED)
        above = self.stack[i + 1 :]
        del self.stack[i:]
        return above

    def put(self, value: Any) -> None:
        """Lay a value on the stack."""
        self.stack.append(value)

    def take(self, count: int) -> list[Any]:
        """Take the topmost values."""
        if count > len(self.stack):
            raise _RefusedError(DAMAGED)
        found = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return found


CODES = {code.code: code for code in pickletools.opcodes}
# Bytes of the length before texts and bytes.
WIDTHS = {
    "SHORT_BINUNICODE": 1,
    "BINUNICODE": 4,
    "BINUNICODE8": 8,
    "SHORT_BINBYTES": 1,
    "BINBYTES": 4,
    "BINBYTES8": 8,
    "BYTEARRAY8": 8,
}
Step = Callable[[_Machine, Any], object]


def _unknown(machine: _Machine, argument: Any) -> None:
    raise _RefusedError("it has instructions of another kind of pickle")


def _add_items(machine: _Machine, items: list[Any]) -> None:
    """Add keys and values to the mapping below; what is no mapping, as the base of a class, takes them too."""
    # The hash of another key may take any depth of calls.
    if not all(isinstance(key, (str, int)) for key in items[::2]):
        raise _RefusedError("a mapping by something else than names")
    pairs = dict(zip(items[::2], items[1::2], strict=True))
    owner = machine.stack[-1]
    if isinstance(owner, dict):
        owner.update(pairs)
    elif not isinstance(owner, Thing):
        raise _RefusedError(DAMAGED)


def _append(machine: _Machine, items: list[Any]) -> None:
    owner = machine.stack[-1]
    if isinstance(owner, list):
        owner.extend(items)
    elif not isinstance(owner, Thing):
        raise _RefusedError(DAMAGED)


def _call(machine: _Machine, argument: Any) -> None:
    what, arguments = machine.take(2)
    machine.put(Thing(what.name if isinstance(what, Thing) else "?", tuple(arguments)))


def _build(machine: _Machine, argument: Any) -> None:
    (state,) = machine.take(1)
    if isinstance(machine.stack[-1], Thing):
        machine.stack[-1].state = state


def _tuple_of(count: int) -> Step:
    return lambda machine, argument: machine.put(tuple(machine.take(count)))


STEPS: dict[str, Step] = {
    **{name: lambda machine, argument: None for name in ("PROTO", "FRAME")},
    **{
        name: lambda machine, argument: machine.put(argument)
        for name in (*WIDTHS, "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
    },
    "NONE": lambda machine, argument: machine.put(None),
    "NEWTRUE": lambda machine, argument: machine.put(True),
    "NEWFALSE": lambda machine, argument: machine.put(False),
    "EMPTY_DICT": lambda machine, argument: machine.put({}),
    "EMPTY_LIST": lambda machine, argument: machine.put([]),
    "EMPTY_SET": lambda machine, argument: machine.put([]),
    "EMPTY_TUPLE": lambda machine, argument: machine.put(()),
    "MARK": lambda machine, argument: machine.put(_Mark()),
    "POP": lambda machine, argument: machine.take(1),
    "POP_MARK": lambda machine, argument: machine.marked(),
    "TUPLE": lambda machine, argument: machine.put(tuple(machine.marked())),
    **{f"TUPLE{count}": _tuple_of(count) for count in (1, 2, 3)},
    "FROZENSET": lambda machine, argument: machine.put(machine.marked()),
    "SETITEM": lambda machine, argument: _add_items(machine, machine.take(2)),
    "SETITEMS": lambda machine, argument: _add_items(machine, machine.marked()),
    "APPEND": lambda machine, argument: _append(machine, machine.take(1)),
    "APPENDS": lambda machine, argument: _append(machine, machine.marked()),
    "ADDITEMS": lambda machine, argument: _append(machine, machine.marked()),
    "MEMOIZE": lambda machine, argument: machine.memo.update({len(machine.memo): machine.stack[-1]}),
    **{
        name: lambda machine, argument: machine.memo.update({argument: machine.stack[-1]})
        for name in ("BINPUT", "LONG_BINPUT")
    },
    **{name: lambda machine, argument: machine.put(machine.memo[argument]) for name in ("BINGET", "LONG_BINGET")},
    "GLOBAL": lambda machine, argument: machine.put(Thing(str(argument).replace(" ", "."))),
    "STACK_GLOBAL": lambda machine, argument: machine.put(Thing(".".join(map(str, machine.take(2))))),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _call),
    "NEWOBJ_EX": lambda machine, argument: machine.put(Thing("?", tuple(machine.take(3)))),
    "BUILD": _build,
}


# Numbers by the names that NumPy gives their kinds.
KINDS = {str(dtype).removeprefix("torch."): dtype for dtype in READ}


def load_pkl(path: Path) -> tuple[dict[str, Any], int]:
    """Load the batch of a .pkl file that SkyRL wrote: its tensors by name, and the bytes of the file.

    Nothing in the file is called or imported, whatever it asks for. Its tensors are mapped.

    Raises:
        DumpError: It is damaged, or holds something else.
    """
    check_torch(path)
    try:
        with path.open("rb") as file:
            # Tensors are views of it, and close it when they go. Copied on writing: torch warns of what is read-only.
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        saved = _batch(_Machine(data).run())
        made: dict[int, Any] = {}
        fields = {str(name): _tensor(value, made) for name, value in saved.items() if isinstance(value, dict)}
    except (DumpError, OSError):
        raise
    except Exception as error:  # damaged bytes may raise any error; it is kept as the cause
        reason = str(error) if isinstance(error, _RefusedError) else DAMAGED
        raise DumpError(f"{path}: not a complete .pkl file: {reason}. Expected a batch of SkyRL") from error
    tokens, response = fields.get(TOKENS), fields.get(RESPONSE)
    if isinstance(tokens, Tensor) and isinstance(response, Tensor) and tokens.dim() == response.dim() == 2:
        # Of prompt and response, aligned at their ends.
        fields["token_ids"] = tokens[:, max(0, tokens.shape[1] - response.shape[1]) :]
    return fields, len(data)


def _batch(found: Any) -> dict[str, Any]:
    """Find the tensors of a batch, in the state of an object or in an argument of the call that rebuilds it."""
    for state in (found.state, *found.arguments) if isinstance(found, Thing) else ():
        if isinstance(state, dict) and isinstance(state.get("batch_dict"), dict):
            return dict(state["batch_dict"])
    raise _RefusedError(f"it holds {found.name if isinstance(found, Thing) else type(found).__name__}")


def _tensor(saved: dict[str, Any], made: dict[int, Any]) -> Any:
    """Make a tensor of its bytes, shape and kind, or of the bytes that torch.save wrote; others are not read.

    Args:
        saved: The tensor as the file stores it.
        made: What was made of such bytes: a file may name them any number of times.
    """
    data, kind, shape = (saved.get(name) for name in ("data", "dtype", "shape"))
    if not isinstance(data, memoryview):
        return Unread("a list of tensors")
    if saved.get("format") == "torch":
        if id(data) not in made:
            made[id(data)] = load_pt_bytes(data)
        return made[id(data)]
    dtype = KINDS.get(str(kind))
    if dtype is None or not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        return Unread(f"a tensor of {str(kind)[:LONGEST_NAME]}")
    if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise _RefusedError(f"a tensor of shape {list(shape)} in {len(data)} bytes")
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8 if dtype == torch.bool else dtype).reshape(shape)

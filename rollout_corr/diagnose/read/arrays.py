"""Files of whole tensors: .pt, .safetensors, .npz. Padded or packed, read slice by slice."""

from __future__ import annotations

import json
import math
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rollout_corr.diagnose.read.block import BLOCK, Block
from rollout_corr.diagnose.read.fields import INTEGERS, LOG_PROBS, OFFSETS, Wanted, choose
from rollout_corr.diagnose.read.problems import DumpError, Problem, Problems, extra

Shape = tuple[int, ...]

# What a .safetensors header calls a dtype.
SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# A .safetensors header longer than this is no header.
LONGEST_HEADER = 100 << 20


class Arrays(Protocol):
    """Tensors by name of which rows can be read, in rising order."""

    shapes: dict[str, Shape]

    def rows(self, name: str) -> int:
        """How many rows can be read: fewer than the shape says where the file is cut off."""
        ...

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start to stop."""
        ...


class Loaded:
    """The tensors of a .pt file, mapped into memory rather than read where the file allows it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(x.shape) for name, x in tensors.items()}

    def rows(self, name: str) -> int:
        return self.shapes[name][0]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.tensors[name][start:stop]


def load_pt(path: Path) -> Any:
    """What a .pt file holds: tensors, lists, mappings and numbers, nothing that runs code."""
    try:
        # torch.save before 1.6 wrote no zip file, and cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DumpError(
            f"{path}: torch cannot load it: {reason}. Expected a whole file written by torch.save, of tensors, lists "
            "and dicts alone; of a file that is cut off nothing can be read, for its directory stands at its end"
        ) from error


class SafeTensors:
    """A .safetensors file. Tensors that a cut took away are shorter."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        # Read rather than mapped: what is mapped counts as this process's memory, all 10 GB of it.
        self.file = path.open("rb")
        head = self.file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(LONGEST_HEADER, size - 8):
            raise DumpError(f"{path}: not a .safetensors file: it has no whole header ({size} bytes in all)")
        try:
            header = json.loads(self.file.read(length))
        except ValueError as error:
            raise DumpError(f"{path}: not a .safetensors file: its header is no JSON ({error})") from error
        self.path, self.begin, self.size = path, 8 + length, size
        self.header = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self.shapes = {name: tuple(entry["shape"]) for name, entry in self.header.items()}

    def _row(self, name: str) -> tuple[torch.dtype, int, int]:
        """dtype, bytes of a row, where the tensor begins."""
        entry = self.header[name]
        if entry["dtype"] not in SAFETENSORS:
            raise DumpError(f"{self.path}, field {name!r}: expected one of {list(SAFETENSORS)}, got {entry['dtype']}")
        dtype = SAFETENSORS[entry["dtype"]]
        return dtype, dtype.itemsize * math.prod(self.shapes[name][1:]), self.begin + entry["data_offsets"][0]

    def rows(self, name: str) -> int:
        _, row, begin = self._row(name)
        return min(self.shapes[name][0], max(0, self.size - begin) // max(1, row))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        dtype, row, begin = self._row(name)
        shape = (stop - start, *self.shapes[name][1:])
        count = math.prod(shape)
        if count == 0:
            return torch.zeros(shape, dtype=dtype)
        self.file.seek(begin + start * row)
        return torch.frombuffer(bytearray(self.file.read((stop - start) * row)), dtype=dtype).view(shape)


class Npz:
    """A .npz file. Its members are streams, compressed or not, so rows can only be read in rising order."""

    def __init__(self, path: Path) -> None:
        self.numpy = extra("numpy", "report", "reading .npz files")
        try:
            self.archive = zipfile.ZipFile(path)
        except zipfile.BadZipFile as error:
            raise DumpError(
                f"{path}: not a whole .npz file ({error}); of a file that is cut off nothing can be read, for its "
                "directory stands at its end"
            ) from error
        self.path = path
        self.shapes: dict[str, Shape] = {}
        self.streams: dict[str, Any] = {}
        self.dtypes: dict[str, Any] = {}
        self.at: dict[str, int] = {}
        for member in self.archive.namelist():
            if member.endswith(".npy"):
                self._open(member.removesuffix(".npy"), member)

    def _open(self, name: str, member: str) -> None:
        form = self.numpy.lib.format
        stream = self.archive.open(member)
        try:
            version = form.read_magic(stream)
            header = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
            shape, fortran, dtype = header(stream)
        except ValueError as error:
            raise DumpError(f"{self.path}, field {name!r}: {error}") from error
        if fortran and len(shape) > 1:
            # Columns first: its rows are not in a row, so it is read whole.
            stream = self.archive.open(member)
            self.streams[name] = form.read_array(stream, allow_pickle=False)
        else:
            self.streams[name] = stream
        self.shapes[name], self.dtypes[name], self.at[name] = tuple(shape), dtype, 0

    def rows(self, name: str) -> int:
        return self.shapes[name][0]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        stream, dtype = self.streams[name], self.dtypes[name]
        if dtype.kind not in "fiub":
            raise DumpError(f"{self.path}, field {name!r}: expected numbers, got dtype {dtype}")
        if isinstance(stream, self.numpy.ndarray):
            return torch.from_numpy(stream[start:stop].copy())
        row = dtype.itemsize * math.prod(self.shapes[name][1:])
        try:
            stream.read((start - self.at[name]) * row)
            data = stream.read((stop - start) * row)
        except (zipfile.BadZipFile, EOFError) as error:
            raise DumpError(f"{self.path}, field {name!r}: damaged ({error})") from error
        self.at[name] = stop
        shape = (stop - start, *self.shapes[name][1:])
        array = self.numpy.frombuffer(data, dtype=dtype).reshape(shape)
        return torch.from_numpy(array.astype(dtype.newbyteorder("=")))


class ArrayFile:
    """The blocks of a file of whole tensors."""

    def __init__(self, arrays: Arrays, file: str, wanted: Wanted, problems: Problems) -> None:
        self.arrays, self.file, self.problems = arrays, file, problems
        self.progress = 0.0
        shapes = {name: shape for name, shape in arrays.shapes.items() if shape}
        first = choose(shapes, wanted, file)
        shape = shapes[first["train_logp"]]
        has_offsets = any(role in first for role in OFFSETS)
        self.one_row = len(shape) == 2 and shape[0] == 1 and has_offsets
        self.padded = len(shape) == 2 and not self.one_row
        if len(shape) not in (1, 2):
            raise self._error(first["train_logp"], f"expected shape [N] or [B, T], got {list(shape)}")
        if not (self.padded or has_offsets):
            raise self._error(
                first["train_logp"],
                f"1-D log-probs of shape {list(shape)} need cu_seqlens or lengths, and the file has neither",
            )
        self.offsets = None if self.padded else self._offsets(first, shape[-1])
        self.count = shape[0] if self.offsets is None else self.offsets.shape[0] - 1
        self.shape = shape
        self.fields = choose(shapes, wanted, file, self._fits)
        for role, name in self.fields.items():
            if role not in OFFSETS and not self._fits(role, name):
                raise self._error(
                    name,
                    f"as {role}: expected shape {list(shape)} (of {self.fields['train_logp']}), got "
                    f"{list(shapes[name])}",
                )
        for role in LOG_PROBS:
            if role not in self.fields:
                continue
            name = self.fields[role]
            dtype = self._take(name, 0, 0).dtype
            if not dtype.is_floating_point:
                raise self._error(name, f"as {role}: expected floating log-probs, got {dtype!s}")

    def _error(self, name: str, what: str) -> DumpError:
        return Problem(self.file, None, name, what).error()

    def _fits(self, role: str, name: str) -> bool:
        shape = self.arrays.shapes[name]
        if role in OFFSETS:
            return len(shape) == 1
        if shape == self.shape or (self.one_row and shape == self.shape[1:]):
            return True
        return role not in (*LOG_PROBS, "mask") and shape in (
            (self.count,),
            (self.count, 1),
        )

    def _take(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a field; tokens of a packed one."""
        if self.one_row and len(self.arrays.shapes[name]) == 2:
            return self.arrays.read(name, 0, 1)[0, start:stop] if stop > start else self.arrays.read(name, 0, 0)[:0]
        return self.arrays.read(name, start, stop)

    def _offsets(self, fields: Mapping[str, str], tokens: int) -> Tensor:
        role = "cu_seqlens" if "cu_seqlens" in fields else "lengths"
        name = fields[role]
        whole, rows = self.arrays.shapes[name][0], self.arrays.rows(name)
        found = self.arrays.read(name, 0, rows).reshape(-1).to(torch.int64)
        if role == "lengths":
            found = torch.cat([found.new_zeros(1), found.cumsum(0)])
        falls = (found.diff() < 0).nonzero()
        if falls.numel():
            record = int(falls[0])
            raise Problem(self.file, record, name, "expected offsets that do not decrease, and they do").error()
        if rows == whole and found.numel() and (int(found[0]) < 0 or int(found[-1]) > tokens):
            raise self._error(
                name, f"expected offsets within [0, {tokens}] tokens, got {int(found[0])} to {int(found[-1])}"
            )
        return found

    def blocks(self) -> Iterator[Block]:
        """Block by block; what a cut-off file lacks is noted."""
        limit = self._readable()
        if self.padded:
            width = self.shape[1]
            step = max(1, BLOCK // max(1, width))
            for start in range(0, limit, step):
                stop = min(limit, start + step)
                yield self._block(start, stop, start, stop, torch.arange(stop - start + 1) * width)
            return
        assert self.offsets is not None  # packed
        offsets = self.offsets.tolist()
        first = 0
        while first < limit:
            last = first + 1
            while last < limit and offsets[last + 1] - offsets[first] <= BLOCK:
                last += 1
            own = self.offsets[first : last + 1] - offsets[first]
            yield self._block(first, last, offsets[first], offsets[last], own)
            first = last

    def _readable(self) -> int:
        """How many sequences are whole in every field."""
        limit = self.count
        for role, name in self.fields.items():
            shape, rows = self.arrays.shapes[name], self.arrays.rows(name)
            if role in OFFSETS or rows == shape[0]:
                continue
            whole = rows
            if self.offsets is not None and shape == self.shape:
                whole = int((self.offsets[1:] <= rows).sum())
            what = f"cut off: {rows} of {shape[0]} rows are there"
            self.problems.add(Problem(self.file, whole, name, what))
            limit = min(limit, whole)
        return limit

    def _block(self, first: int, last: int, start: int, stop: int, offsets: Tensor) -> Block:
        """Sequences first to last, which stand in rows (packed: tokens) start to stop."""
        columns: dict[str, Tensor] = {}
        for role, name in self.fields.items():
            if role in (*OFFSETS, "texts"):
                continue
            shape = self.arrays.shapes[name]
            if shape == self.shape or (self.one_row and shape == self.shape[1:]):
                values = self._take(name, start, stop).reshape(-1)
            else:
                values = self.arrays.read(name, first, last).reshape(-1).repeat_interleave(offsets.diff())
            if role in LOG_PROBS:
                columns[role] = values
            else:
                columns[role] = values.to(torch.int64 if role in INTEGERS else torch.float32)
        mask = columns.pop("mask", None)
        if mask is None and self.padded and "lengths" in self.fields:
            lengths = self.arrays.read(self.fields["lengths"], first, last).reshape(-1, 1)
            mask = (torch.arange(self.shape[1]) < lengths).reshape(-1)
        self.progress = last / max(1, self.count)
        return Block(
            train=columns.pop("train_logp"),
            rollout=columns.pop("rollout_logp"),
            mask=None if mask is None else mask != 0,
            offsets=offsets,
            records=torch.arange(first, last),
            file=self.file,
            columns=columns,
        )

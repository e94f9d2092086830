"""Rows of named tensors in .pt, .safetensors and .npz files, read a few at a time."""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from rollout_corr.diagnose.read.problems import DumpError, Problem, cut_off, extra

Shape = tuple[int, ...]

# Names of dtypes in a .safetensors header. Booleans are bytes: in a damaged file they hold other values than 0 and 1.
SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.uint8,
}
# A longer .safetensors header is taken for a damaged file. The package writes 100 bytes for each tensor.
LONGEST_HEADER = 8 << 20
# An array of .npz that is stored by columns is copied to a temporary file; a larger one is refused.
LARGEST_COPY = 4 << 30
# Bytes of a .npz array that are skipped at once.
SKIPPED = 1 << 20


class Format(Protocol):
    """Tensors by name, of which rows are read in rising order.

    Attributes:
        shapes: Shapes by name.
        size: Bytes of the file, or of what is compressed in it.
    """

    shapes: dict[str, Shape]
    size: int

    def flatten(self, name: str) -> None:
        """Take a tensor of shape [1, N] as [N], so that it can be read in parts."""
        ...

    def rows(self, name: str) -> int:
        """Count the rows that can be read: fewer than in the shape if the file is cut off."""
        ...

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows start to stop: floating, or signed integers, or uint8."""
        ...


def signed(values: Tensor) -> Tensor:
    """Return unsigned integers, which torch cannot compute with, as int64.

    Raises:
        DumpError: A value is too large for it.
    """
    if values.dtype not in (torch.uint16, torch.uint32, torch.uint64):
        return values
    found = values.to(torch.int64)
    if values.dtype == torch.uint64 and bool((found < 0).any()):
        raise DumpError("expected numbers below 2**63, got larger ones")
    return found


class Loaded:
    """Tensors of a .pt file, memory-mapped."""

    def __init__(self, tensors: Mapping[str, Tensor], size: int) -> None:
        self.tensors, self.size = dict(tensors), size
        self.shapes = {name: tuple(x.shape) for name, x in tensors.items()}

    def flatten(self, name: str) -> None:
        self.tensors[name] = self.tensors[name][0]
        self.shapes[name] = self.shapes[name][1:]

    def rows(self, name: str) -> int:
        return self.shapes[name][0]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return signed(self.tensors[name][start:stop])


class SafeTensors:
    """A .safetensors file.

    The file is read here and not by the `safetensors` package: that one refuses a file that is cut off, of which the
    rows before the cut are still read here, and it maps files, so that all of them count as memory of this process.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.file, self.size = file, os.fstat(file.fileno()).st_size
        head = self.file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(LONGEST_HEADER, self.size - 8):
            raise DumpError(f"{path}: not a .safetensors file: no complete header in its {self.size} bytes")
        self.path, self.begin = path, 8 + length
        try:
            # Decoded here: json would take UTF-16 and a byte order mark, too.
            header = json.loads(self.file.read(length).decode("utf-8"), object_pairs_hook=_unique)
        except ValueError as error:
            raise self._damaged(f"the header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._damaged(f"expected a header of names, got {type(header).__name__}")
        self.header = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self.shapes = {name: self._shape(name, entry) for name, entry in self.header.items()}
        places = [(0, 0), *sorted(tuple(entry["data_offsets"]) for entry in self.header.values())]
        for (_, end), (begin, _) in pairwise(places):
            if end != begin:
                raise self._damaged("two fields in one place" if end > begin else "bytes that belong to no field")

    def _damaged(self, what: str) -> DumpError:
        return DumpError(f"{self.path}: not a .safetensors file: {what}")

    def _shape(self, name: str, entry: Any) -> Shape:
        """Return the shape in an entry of the header, after a look at all that it says."""
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
            raise self._damaged(f"field {name!r}: no dtype")
        shape, place = (self._numbers(name, entry.get(part)) for part in ("shape", "data_offsets"))
        if len(place) != 2 or place[0] > place[1]:
            raise self._damaged(f"field {name!r}: data_offsets {place}")
        dtype = SAFETENSORS.get(entry["dtype"])
        if dtype is not None and place[1] - place[0] != math.prod(shape) * dtype.itemsize:
            raise self._damaged(f"field {name!r}: shape {shape} of {entry['dtype']} in {place[1] - place[0]} bytes")
        return tuple(shape)

    def _numbers(self, name: str, numbers: Any) -> list[int]:
        if not isinstance(numbers, list) or not all(type(x) is int and 0 <= x < 1 << 62 for x in numbers):
            raise self._damaged(f"field {name!r}: no shape or no data_offsets of whole numbers")
        return numbers

    def flatten(self, name: str) -> None:
        self.shapes[name] = self.shapes[name][1:]

    def _layout(self, name: str) -> tuple[torch.dtype, int, int]:
        """Return dtype, bytes per row, and the offset of a tensor in the file."""
        entry = self.header[name]
        if entry["dtype"] not in SAFETENSORS:
            what = f"expected one of {list(SAFETENSORS)}, got {entry['dtype']!r}"
            raise Problem(str(self.path), None, name, what).error()
        dtype = SAFETENSORS[entry["dtype"]]
        return dtype, dtype.itemsize * math.prod(self.shapes[name][1:]), self.begin + entry["data_offsets"][0]

    def rows(self, name: str) -> int:
        _, row, begin = self._layout(name)
        return min(self.shapes[name][0], max(0, self.size - begin) // max(1, row))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        dtype, row, begin = self._layout(name)
        shape = (stop - start, *self.shapes[name][1:])
        if math.prod(shape) == 0:
            return signed(torch.zeros(shape, dtype=dtype))
        self.file.seek(begin + start * row)
        data = bytearray(self.file.read((stop - start) * row))
        if len(data) != (stop - start) * row:
            raise Problem(str(self.path), None, name, "the file has become shorter while it was read").error()
        return signed(torch.frombuffer(data, dtype=dtype).view(shape))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object; which one of two equal names is meant, nobody knows."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name that occurs twice")
    return found


class Npz:
    """A .npz file. Its arrays are streams, often compressed, so rows can only be read in rising order.

    numpy.load would read each array as a whole; here numpy reads the headers, and the rows come from the stream.
    """

    def __init__(self, path: Path) -> None:
        self.numpy = extra("numpy", "numpy", "reading .npz files")
        try:
            archive = zipfile.ZipFile(path)
        except zipfile.BadZipFile as error:
            raise DumpError(f"{path}: not a complete .npz file ({error}); {cut_off('.npz')}") from error
        self.path, self.size = path, 0
        self.shapes: dict[str, Shape] = {}
        self.streams: dict[str, Any] = {}
        self.dtypes: dict[str, Any] = {}
        self.at: dict[str, int] = {}
        for member in archive.infolist():
            if member.filename.endswith(".npy"):
                self._open(archive, member.filename.removesuffix(".npy"), member)

    def _error(self, name: str, what: str) -> DumpError:
        return Problem(str(self.path), None, name, what).error()

    def _open(self, archive: zipfile.ZipFile, name: str, member: zipfile.ZipInfo) -> None:
        if name in self.shapes:
            raise self._error(name, "it occurs twice")
        if member.flag_bits & 1:
            raise self._error(name, "it is encrypted")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # numpy writes these two. Others let a small file grow without end.
            raise self._error(name, "expected no compression or deflate")
        form = self.numpy.lib.format
        stream = archive.open(member)
        try:
            version = form.read_magic(stream)
            if version not in ((1, 0), (2, 0), (3, 0)):
                raise ValueError(f"a version {version[0]}.{version[1]} that numpy does not write")
            header = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
            shape, fortran, dtype = header(stream)
        except (ValueError, MemoryError, RecursionError) as error:
            # Python's parser answers a header of 9,000 signs with a MemoryError.
            raise self._error(name, str(error) or "a header that cannot be parsed") from error
        if not all(0 <= x < 1 << 62 for x in shape):
            raise self._error(name, f"shape {shape}")
        self.shapes[name], self.dtypes[name], self.at[name], self.streams[name] = tuple(shape), dtype, 0, stream
        if self._is_number(name):
            there, wanted = member.file_size - stream.tell(), math.prod(shape) * dtype.itemsize
            if there != wanted:
                raise self._error(name, f"shape {list(shape)} of {dtype} needs {wanted} bytes, and there are {there}")
            self.size += there
            if fortran and len(shape) > 1 and wanted:
                self.streams[name] = self._by_columns(name, stream)

    def _is_number(self, name: str) -> bool:
        return self.dtypes[name].kind in "fiub" and self.dtypes[name].itemsize <= 8

    def _by_columns(self, name: str, stream: Any) -> Any:
        """Map an array that is stored by columns: a row is scattered over all of it."""
        size = math.prod(self.shapes[name]) * self.dtypes[name].itemsize
        if size > LARGEST_COPY:
            raise self._error(name, f"{size >> 20} MiB by columns; save it with numpy.ascontiguousarray")
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(stream, copy, SKIPPED)
            copy.flush()
            mapped = mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)
        return self.numpy.ndarray(self.shapes[name], self.dtypes[name], mapped, order="F")

    def flatten(self, name: str) -> None:
        self.shapes[name] = self.shapes[name][1:]
        if isinstance(self.streams[name], self.numpy.ndarray):
            self.streams[name] = self.streams[name][0]

    def rows(self, name: str) -> int:
        return self.shapes[name][0]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        stream, dtype = self.streams[name], self.dtypes[name]
        if not self._is_number(name):
            raise self._error(name, f"expected numbers, of at most 64 bits, got dtype {dtype}")
        if isinstance(stream, self.numpy.ndarray):
            return self._tensor(stream[start:stop], dtype)
        row = dtype.itemsize * math.prod(self.shapes[name][1:])
        try:
            skip, wanted = (start - self.at[name]) * row, (stop - start) * row
            while skip > 0:
                skip -= len(stream.read(min(skip, SKIPPED))) or skip
            data = stream.read(wanted) if wanted else b""
        except (zipfile.BadZipFile, EOFError) as error:
            raise self._error(name, f"damaged ({error})") from error
        if len(data) != wanted:
            raise self._error(name, f"damaged: {len(data)} bytes where {wanted} are expected")
        self.at[name] = stop
        return self._tensor(
            self.numpy.frombuffer(data, dtype=dtype).reshape(stop - start, *self.shapes[name][1:]), dtype
        )

    def _tensor(self, array: Any, dtype: Any) -> Tensor:
        """Copy an array of any byte order and alignment."""
        if dtype.kind == "b":
            array = array.view("u1")
        return signed(torch.from_numpy(self.numpy.array(array, dtype=array.dtype.newbyteorder("="), order="C")))

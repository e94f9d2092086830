"""Rows of named tensors in .pt, .safetensors and .npz files, read a few at a time."""

from __future__ import annotations

import json
import math
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rollout_corr.diagnose.read.problems import DumpError, cut_off, extra

Shape = tuple[int, ...]

# Names of dtypes in a .safetensors header.
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
# A longer .safetensors header is taken for a damaged file.
LONGEST_HEADER = 100 << 20


class Format(Protocol):
    """Tensors by name, of which rows are read in rising order."""

    shapes: dict[str, Shape]

    def rows(self, name: str) -> int:
        """Count the rows that can be read: fewer than in the shape if the file is cut off."""
        ...

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows start to stop."""
        ...


class Loaded:
    """Tensors of a .pt file, memory-mapped where the file allows it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(x.shape) for name, x in tensors.items()}

    def rows(self, name: str) -> int:
        return self.shapes[name][0]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.tensors[name][start:stop]


def load_pt(path: Path) -> Any:
    """Load a .pt file of tensors, lists, mappings and numbers. Nothing in it is run as code."""
    try:
        # torch.save before 1.6 did not write zip files, and only those can be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DumpError(
            f"{path}: torch cannot load it: {reason}. Expected a complete file written by torch.save, holding only "
            f"tensors, lists, dicts and numbers; {cut_off('.pt')}"
        ) from error


class SafeTensors:
    """A .safetensors file.

    The file is read here and not by the `safetensors` package: that one refuses a file that is cut off, of which the
    rows before the cut are still read here, and it maps files, so that all of them count as memory of this process.
    """

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        self.file = path.open("rb")
        head = self.file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(LONGEST_HEADER, size - 8):
            raise DumpError(f"{path}: not a .safetensors file: no complete header in its {size} bytes")
        try:
            header = json.loads(self.file.read(length))
        except ValueError as error:
            raise DumpError(f"{path}: not a .safetensors file: the header is not JSON ({error})") from error
        self.path, self.begin, self.size = path, 8 + length, size
        self.header = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self.shapes = {name: tuple(entry["shape"]) for name, entry in self.header.items()}

    def _layout(self, name: str) -> tuple[torch.dtype, int, int]:
        """Return dtype, bytes per row, and the offset of a tensor in the file."""
        entry = self.header[name]
        if entry["dtype"] not in SAFETENSORS:
            raise DumpError(f"{self.path}, field {name!r}: expected one of {list(SAFETENSORS)}, got {entry['dtype']}")
        dtype = SAFETENSORS[entry["dtype"]]
        return dtype, dtype.itemsize * math.prod(self.shapes[name][1:]), self.begin + entry["data_offsets"][0]

    def rows(self, name: str) -> int:
        _, row, begin = self._layout(name)
        return min(self.shapes[name][0], max(0, self.size - begin) // max(1, row))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        dtype, row, begin = self._layout(name)
        shape = (stop - start, *self.shapes[name][1:])
        if math.prod(shape) == 0:
            return torch.zeros(shape, dtype=dtype)
        self.file.seek(begin + start * row)
        return torch.frombuffer(bytearray(self.file.read((stop - start) * row)), dtype=dtype).view(shape)


class Npz:
    """A .npz file. Its arrays are streams, often compressed, so rows can only be read in rising order.

    numpy.load would read each array as a whole; here numpy reads the headers, and the rows come from the stream.
    """

    def __init__(self, path: Path) -> None:
        self.numpy = extra("numpy", "report", "reading .npz files")
        try:
            archive = zipfile.ZipFile(path)
        except zipfile.BadZipFile as error:
            raise DumpError(f"{path}: not a complete .npz file ({error}); {cut_off('.npz')}") from error
        self.path = path
        self.shapes: dict[str, Shape] = {}
        self.streams: dict[str, Any] = {}
        self.dtypes: dict[str, Any] = {}
        self.at: dict[str, int] = {}
        for member in archive.namelist():
            if member.endswith(".npy"):
                self._open(archive, member.removesuffix(".npy"), member)

    def _open(self, archive: zipfile.ZipFile, name: str, member: str) -> None:
        form = self.numpy.lib.format
        stream = archive.open(member)
        try:
            version = form.read_magic(stream)
            header = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
            shape, fortran, dtype = header(stream)
        except ValueError as error:
            raise DumpError(f"{self.path}, field {name!r}: {error}") from error
        if fortran and len(shape) > 1:
            # Stored by columns: a row is scattered over the whole array, so all of it is read.
            self.streams[name] = form.read_array(archive.open(member), allow_pickle=False)
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
        array = self.numpy.frombuffer(data, dtype=dtype).reshape(stop - start, *self.shapes[name][1:])
        return torch.from_numpy(array.astype(dtype.newbyteorder("=")))

"""Open .pt files as named columns, by torch in the mode that runs nothing."""

from __future__ import annotations

import os
import pickle
import re
import warnings
import zipfile
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from .problems import DumpError

# Longer pickles are refused, whose values become objects of Python, 10 to 60 times as large. Tensors lie outside of it.
LONGEST_PICKLE = 128 << 20
# References make a pickle grow: so many values for each byte of the file are followed.
REPEATED = 16

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
READ = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, *UNSIGNED),
)


@dataclass(frozen=True)
class Unread:
    """A field that is not read, and what it is: an error only where the field has a role."""

    what: str

    def __repr__(self) -> str:
        return self.what


def signed(values: Tensor) -> Tensor:
    """Return unsigned integers, which torch cannot compute with, as int64.

    Raises:
        DumpError: A value is too large for it.
    """
    if values.dtype not in UNSIGNED:
        return values
    found = values.to(torch.int64)
    if values.dtype == torch.uint64 and bool((found < 0).any()):
        raise DumpError("expected numbers below 2**63, got larger ones")
    return found


def load_pt(path: Path, whole: bool = True) -> tuple[Any, int]:
    """Load a .pt file of tensors, lists, mappings and numbers. Its tensors are mapped.

    Args:
        path: The file.
        whole: Compare the checksums of all records, which reads the file once.

    Returns:
        What it holds, and its bytes.

    Raises:
        DumpError: It is damaged, or holds something else.
    """
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            # torch warns of sparse and nested tensors.
            warnings.simplefilter("ignore")
            size = os.fstat(file.fileno()).st_size
            records = _sizes_of_records(file, whole)
            found = _loaded(path)
        return _Contents(records, REPEATED * size).plain(found), size
    except (DumpError, OSError):
        raise
    except Exception as error:  # torch, pickle and zipfile answer damage with anything, in words about themselves
        reason = str(error) if isinstance(error, _RefusedError) else "its bytes are damaged, or of something else"
        if isinstance(error, RecursionError):
            reason = "it is nested too deeply, or holds itself"
        elif named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            reason = f"it holds {named[1]}"
        raise DumpError(
            f"{path}: not a complete .pt file: {reason}. Expected one written by torch.save, holding only tensors, "
            f"lists, dicts and numbers; one that is cut off cannot be read, because its index is at its end"
        ) from error


def _loaded(path: Path) -> Any:
    """Call torch.load in the mode that runs nothing."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        if "torch._dynamo" not in str(error) and "nested_tensor" not in str(error):
            raise
        # For jagged tensors, which take two seconds to import, and which torch 2.15 no longer allows by itself.
        import_module("torch._dynamo")
        nested = import_module("torch.nested._internal.nested_tensor")
        with torch.serialization.safe_globals([nested.NestedTensor, nested._rebuild_njt]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


class _RefusedError(ValueError):
    """The reason for refusing a .pt file, in words for the user."""


def _sizes_of_records(file: IO[bytes], whole: bool) -> Counter[int]:
    """Refuse what torch.load does not notice: changed bytes, compressed records, pickles that fill the memory."""
    if not zipfile.is_zipfile(file):
        empty = file.seek(0, os.SEEK_END) == 0
        raise _RefusedError("it is empty" if empty else "it is no zip archive, which torch.save writes since torch 1.6")
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise _RefusedError("a record is compressed, which torch.save does not do")
        (pickled,) = (entry for entry in entries if entry.filename.endswith("/data.pkl"))
        if pickled.file_size > LONGEST_PICKLE:
            raise _RefusedError(f"over {LONGEST_PICKLE >> 20} MiB of plain values; save tensors instead of lists")
        # torch.serialization.set_crc32_options(False) leaves every checksum 0.
        if any(entry.CRC for entry in entries):
            archive.read(pickled)
            damaged = archive.testzip() if whole else None
            if damaged is not None:
                raise _RefusedError(f"the checksum of the record {damaged} does not fit: its bytes have changed")
    return Counter(entry.file_size for entry in entries)


class _Contents:
    """Converts what a pickle holds to plain types, within the memory that its file justifies.

    Args:
        records: How many records have so many bytes. The values of a tensor are a whole record.
        left: How many more values are followed: one list may be in many places, and tensors expand.
    """

    def __init__(self, records: Counter[int], left: int) -> None:
        self.records, self.left = records, left
        self._seen: set[int] = set()

    def plain(self, value: Any) -> Any:
        """Return a value; refuse what is much larger than its file, and what lies beyond a record."""
        if isinstance(value, Tensor):
            value = _dense(value)
        self.left -= value.numel() if isinstance(value, Tensor) else 1
        if self.left < 0:
            raise _RefusedError("values that repeat: they grow far beyond the size of the file")
        if isinstance(value, Tensor):
            values = value.untyped_storage()
            if values.data_ptr() not in self._seen:
                self._seen.add(values.data_ptr())
                self.records[values.nbytes()] -= 1
            if self.records[values.nbytes()] < 0:
                raise _RefusedError(f"a tensor of {values.nbytes()} bytes, beyond the record that has its values")
        if isinstance(value, dict):
            return {name: self.plain(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.plain(item) for item in value]
        return value


def _dense(x: Tensor) -> Tensor | list[Tensor] | Unread:
    """Return a tensor that has rows, the rows of a nested one, or what it is instead."""
    # Without what a file may have set on it: a name of its own for a method.
    x = Tensor.detach(x)
    if x.is_nested:
        return list(x.unbind())
    if x.layout != torch.strided or x.device.type != "cpu" or x.dtype not in READ:
        return Unread(f"a tensor of {x.dtype}, {x.layout}, on {x.device.type}")
    # A damaged Boolean may hold other values than 0 and 1, which torch.bool does not allow for.
    return x.view(torch.uint8) if x.dtype == torch.bool else x

"""Open .pt files: a zip archive, or the older format, of one pickle and the values of its tensors, which are mapped."""

from __future__ import annotations

import mmap
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, NamedTuple

from torch import Tensor

from rollout_corr.diagnose.read.pickles import STORAGES, PickleError, Storage, Unpickler, Unread, check_repeats
from rollout_corr.diagnose.read.problems import DumpError, cut_off

# What torch.save wrote before torch 1.6 begins with these two pickles.
OLD_MAGIC, OLD_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001

LOCAL_HEADER = struct.Struct("<4s22xHH")
# Flags of a zip entry: encrypted, strongly encrypted, its header masked.
ENCRYPTED = 1 | 1 << 6 | 1 << 13
# Bytes whose checksum is taken at once.
BLOCK = 1 << 20


class _Record(NamedTuple):
    """A member of the archive: where it lies in the file, and its checksum."""

    begin: int
    size: int
    crc: int


def load_pt(path: Path, whole: bool = True) -> tuple[Any, int]:
    """Load a .pt file of tensors, lists, mappings and numbers. Nothing in it is run as code.

    It is opened once: another file may take its place between two looks at the name.

    Args:
        path: The file.
        whole: Compare the checksums of all tensors that are in use, which reads the file once.

    Returns:
        What it holds, and its bytes.

    Raises:
        DumpError: It is damaged, or holds something else.
    """
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise PickleError("it is empty")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            found = _archive(file, mapped, whole) if zipfile.is_zipfile(file) else _old(file, mapped)
        check_repeats(found, len(mapped))
    except (PickleError, zipfile.BadZipFile, ValueError, LookupError, TypeError, struct.error) as error:
        # pickletools and zipfile answer damage with any of these, in words about themselves.
        reason = str(error) if isinstance(error, PickleError) else "its bytes are damaged, or of something else"
        raise DumpError(
            f"{path}: not a complete .pt file: {reason}. Expected one written by torch.save, holding only "
            f"tensors, lists, dicts and numbers; {cut_off('.pt')}"
        ) from error
    return found, len(mapped)


def _archive(file: IO[bytes], mapped: mmap.mmap, whole: bool) -> Any:
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    records = {entry.filename: _record(entry, mapped) for entry in entries}
    if len(records) != len(entries):
        raise PickleError("two records of one name")
    (pickled,) = [name for name in records if name.endswith("/data.pkl")] or [""]
    if not pickled:
        raise PickleError("no record data.pkl")
    folder = pickled.removesuffix("data.pkl")
    order = records.get(f"{folder}byteorder")
    if order is not None and mapped[order.begin : order.begin + order.size] != b"little":
        raise PickleError("written on a machine that is not little-endian")
    # torch.serialization.set_crc32_options(False) leaves every checksum wrong, that of this record too.
    checked = order is None or _crc(mapped, order) == order.crc

    def storage(key: str, count: int, name: str) -> Storage:
        dtype, record = STORAGES.get(name), records[f"{folder}data/{key}"]
        if dtype is not None and count * dtype.itemsize != record.size:
            raise PickleError(f"a tensor of {count * dtype.itemsize} bytes in the record data/{key} of {record.size}")
        if checked and whole and dtype is not None and key not in compared:
            compared.add(key)
            _compare(mapped, record, f"data/{key}")
        return Storage(dtype, record.begin, count, name)

    compared: set[str] = set()
    if checked:
        _compare(mapped, records[pickled], "data.pkl")
    begin, size, _ = records[pickled]
    return Unpickler(mapped, storage).load(mapped[begin : begin + size])


def _record(entry: zipfile.ZipInfo, mapped: mmap.mmap) -> _Record:
    if entry.flag_bits & ENCRYPTED:
        raise PickleError(f"the record {entry.filename!r} is encrypted")
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise PickleError(f"the record {entry.filename!r} is compressed, which torch.save does not do")
    begin = entry.header_offset + LOCAL_HEADER.size
    signature, name, more = LOCAL_HEADER.unpack(mapped[entry.header_offset : begin])
    begin += name + more
    if signature != b"PK\x03\x04" or begin + entry.file_size > len(mapped):
        raise PickleError(f"the record {entry.filename!r} is not where the index says")
    return _Record(begin, entry.file_size, entry.CRC)


def _crc(mapped: mmap.mmap, record: _Record) -> int:
    crc, end = 0, record.begin + record.size
    for begin in range(record.begin, end, BLOCK):
        crc = zlib.crc32(mapped[begin : min(end, begin + BLOCK)], crc)
    return crc


def _compare(mapped: mmap.mmap, record: _Record, name: str) -> None:
    if _crc(mapped, record) != record.crc:
        raise PickleError(f"the checksum of the record {name} does not fit: its bytes have changed")


def _old(file: IO[bytes], mapped: mmap.mmap) -> Any:
    """Read the format before torch 1.6: magic number, protocol, machine, the pickle, keys, and the storages."""
    storages: dict[str, Storage] = {}

    def first(key: str, count: int, name: str) -> Storage:
        # Where it lies is known when the keys have been read, behind the pickle.
        storages[key] = Storage(STORAGES.get(name), 0, 0, name)
        return storages[key]

    def second(key: str, count: int, name: str) -> Storage:
        return storages[key]._replace(name=name)

    file.seek(0)
    reader = Unpickler(mapped, first)
    if reader.load(file) != OLD_MAGIC or reader.load(file) != OLD_PROTOCOL:
        raise PickleError("no zip archive, and no older .pt file either")
    machine = reader.load(file)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise PickleError("written on a machine that is not little-endian")
    begin = file.tell()
    _Sizes(mapped, first).load(file)
    keys = reader.load(file)
    at = file.tell()
    for key in keys if isinstance(keys, list) else ():
        found = storages[key]
        if found.dtype is None:
            raise PickleError(f"values of {found.name}")
        (count,) = struct.unpack("<q", mapped[at : at + 8])
        at += 8
        if count < 0 or at + count * found.dtype.itemsize > len(mapped):
            raise PickleError(f"the file ends within the storage {key}")
        storages[key] = found._replace(begin=at, values=count)
        at += count * found.dtype.itemsize
    file.seek(begin)
    return Unpickler(mapped, second).load(file)


class _Sizes(Unpickler):
    """A first pass over a pickle, for its storages alone."""

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None) -> Tensor | Unread:
        return Unread("a tensor")

"""Dumps of one record per sequence (.jsonl, .parquet, lists in .pt files) as chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rollout_corr.diagnose.read.chunk import CHUNK_SLOTS, MISSING_INTEGER, Chunk
from rollout_corr.diagnose.read.fields import INTEGERS, LOG_PROBS, OFFSETS, REQUIRED, Wanted, choose
from rollout_corr.diagnose.read.problems import DumpError, Problem, Problems, cut_off, extra

# Number of a record; the record, or the problem with it; the share of the file read so far.
Numbered = tuple[int, Mapping[str, Any] | str, float]

# Rows of a .parquet file that are in memory at once.
PARQUET_ROWS = 64


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a record: fields of nested mappings get dotted names."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def json_lines(path: Path) -> Iterator[Numbered]:
    """Read the records of a .jsonl file; their numbers count lines, from 0."""
    size = max(1, path.stat().st_size)
    seen = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            seen += len(line)
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                cut = "" if line.endswith(b"\n") else "; the file ends within the line"
                yield number, f"line {number + 1} is not JSON ({error}){cut}", seen / size
                continue
            yield number, _flat_or_problem(record, dict, "an object"), seen / size


def _flat_or_problem(record: Any, kind: type, expected: str) -> dict[str, Any] | str:
    if isinstance(record, kind):
        return flat(cast("Mapping[str, Any]", record))
    return f"expected {expected}, got {type(record).__name__}"


def parquet_rows(path: Path, problems: Problems) -> Iterator[Numbered]:
    """Read the rows of a .parquet file."""
    pyarrow = extra("pyarrow", "parquet", "reading .parquet files")
    parquet = extra("pyarrow.parquet", "parquet", "reading .parquet files")
    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DumpError(f"{path}: not a complete .parquet file ({error}); {cut_off('.parquet')}") from error
    rows, number = max(1, file.metadata.num_rows), 0
    try:
        for batch in file.iter_batches(batch_size=PARQUET_ROWS):
            for i in range(batch.num_rows):
                yield (
                    number,
                    flat({name: _cell(batch.column(name)[i], pyarrow) for name in batch.schema.names}),
                    (number + 1) / rows,
                )
                number += 1
    except (pyarrow.ArrowInvalid, OSError) as error:
        problems.add(Problem(str(path), number, None, f"damaged from here on ({error})"))


def _cell(scalar: Any, pyarrow: Any) -> Any:
    """Return a cell as a tensor if it is a list of numbers, else as plain Python."""
    if isinstance(scalar, pyarrow.ListScalar) and scalar.is_valid:
        kind = scalar.type.value_type
        if pyarrow.types.is_floating(kind) or pyarrow.types.is_integer(kind) or pyarrow.types.is_boolean(kind):
            return torch.from_numpy(scalar.values.to_numpy(zero_copy_only=False).copy())
    return scalar.as_py()


def listed(found: Sequence[Any]) -> Iterator[Numbered]:
    """Return the records of a list in a .pt file."""
    for number, record in enumerate(found):
        yield number, _flat_or_problem(record, Mapping, "a mapping"), (number + 1) / len(found)


def transposed(fields: Mapping[str, Any], count: int) -> Iterator[Numbered]:
    """Make records of one list per field, each of `count` items."""
    for number in range(count):
        yield number, {name: value[number] for name, value in fields.items()}, (number + 1) / count


class RecordFile:
    """A file of records. One that cannot be read is noted and skipped.

    Args:
        records: The records, numbered.
        file: Path of the file, for messages.
        wanted: The fields that the user names.
        problems: Takes what cannot be read.

    Attributes:
        fields: The field of each role in the first record.
        progress: How much was read, 0 to 1.
    """

    def __init__(self, records: Iterator[Numbered], file: str, wanted: Wanted, problems: Problems) -> None:
        self.records, self.file, self.wanted, self.problems = records, file, wanted, problems
        self.progress = 0.0
        self.fields: dict[str, str] = {}
        self._chosen: dict[tuple[str, ...], dict[str, str]] = {}

    def chunks(self) -> Iterator[Chunk]:
        """Read chunk by chunk."""
        waiting: list[_Read] = []
        slots = 0
        for number, record, done in self.records:
            self.progress = done
            read = self._read(number, record)
            if read is None:
                continue
            if waiting and slots + read.train.numel() > CHUNK_SLOTS:
                yield self._chunk(waiting)
                waiting, slots = [], 0
            waiting.append(read)
            slots += read.train.numel()
        if waiting:
            yield self._chunk(waiting)

    def _roles(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Return the fields of a record by role; records may have different ones."""
        names = tuple(name for name, value in record.items() if value is not None)
        if names not in self._chosen:
            self._chosen[names] = choose(names, self.wanted, self.file)
            self.fields = self.fields or self._chosen[names]
        return self._chosen[names]

    def _read(self, number: int, record: Mapping[str, Any] | str) -> _Read | None:
        if isinstance(record, str):
            self.problems.add(Problem(self.file, number, None, record))
            return None
        try:
            roles = self._roles(record)
        except DumpError as error:
            found = error.problem or Problem(self.file, None, None, str(error))
            self.problems.add(found._replace(record=number))
            return None
        read = _Read(number)
        for role, name in roles.items():
            if role in OFFSETS:
                continue
            what = read.take(role, record[name])
            if what is None:
                continue
            essential = role in (*REQUIRED, "mask")
            self.problems.add(Problem(self.file, number, name, what + ("" if essential else " (left out)")))
            if essential:
                return None
        return read

    def _chunk(self, reads: Sequence[_Read]) -> Chunk:
        lengths = torch.tensor([0, *(read.train.numel() for read in reads)])
        columns: dict[str, Tensor] = {}
        for role in dict.fromkeys(role for read in reads for role in read.columns):
            columns[role] = torch.cat([read.column(role) for read in reads])
        masked = any(read.mask is not None for read in reads)
        texts: list[Sequence[str] | None] = [read.texts for read in reads]
        return Chunk(
            train=torch.cat([read.train for read in reads]),
            rollout=torch.cat([read.rollout for read in reads]),
            mask=torch.cat([read.known_mask() for read in reads]) if masked else None,
            offsets=lengths.cumsum(0),
            records=torch.tensor([read.number for read in reads]),
            file=self.file,
            columns=columns,
            texts=texts if any(text is not None for text in texts) else None,
        )


class _Read:
    """The values of one record, taken field by field."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.train = self.rollout = torch.zeros(0)
        self.mask: Tensor | None = None
        self.columns: dict[str, Tensor] = {}
        self.texts: list[str] | None = None

    def take(self, role: str, value: Any) -> str | None:
        """Take the field of a role; return the problem with it, or None. Train log-probs have to come first."""
        if role == "texts":
            return self._take_texts(value)
        try:
            values = _numbers(value, torch.float64 if role in INTEGERS else torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            return f"expected a list of numbers, got {_got(value)} ({str(error).partition(chr(10))[0]})"
        per_sequence = values.dim() == 0 and role not in (*LOG_PROBS, "mask")
        if per_sequence:
            values = values.expand(self.train.numel())
        if values.dim() != 1:
            return f"expected a flat list, got {_got(value)}"
        if role != "train_logp" and values.numel() != self.train.numel():
            return f"expected {self.train.numel()} values, as many as train log-probs, got {values.numel()}"
        if role in REQUIRED:
            values = values if values.is_floating_point() else values.float()
            setattr(self, "train" if role == "train_logp" else "rollout", values)
        elif role == "mask":
            self.mask = values != 0
        else:
            self.columns[role] = values
        return None

    def _take_texts(self, value: Any) -> str | None:
        if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
            return f"expected a list of strings, got {_got(value)}"
        if len(value) != self.train.numel():
            return f"expected {self.train.numel()} values, as many as train log-probs, got {len(value)}"
        self.texts = list(value)
        return None

    def known_mask(self) -> Tensor:
        return torch.ones(self.train.shape, dtype=torch.bool) if self.mask is None else self.mask

    def column(self, role: str) -> Tensor:
        dtype = torch.int64 if role in INTEGERS else torch.float32
        found = self.columns.get(role)
        if found is None:
            return torch.full(self.train.shape, MISSING_INTEGER if role in INTEGERS else torch.nan, dtype=dtype)
        return found.nan_to_num(MISSING_INTEGER).to(dtype) if role in INTEGERS else found.to(dtype)


def _numbers(value: Any, dtype: torch.dtype) -> Tensor:
    """Return a list of numbers as a tensor, null as NaN; a single number as a 0-d tensor."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (str, bytes)) or value is None:
        raise TypeError(f"{value!r:.40}")
    try:
        return torch.tensor(value, dtype=dtype)
    except TypeError:
        # Strict JSON writers turn NaN into null.
        return torch.tensor([torch.nan if item is None else item for item in value], dtype=dtype)


def _got(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        kinds = sorted({type(item).__name__ for item in value})
        return f"a list of {' and '.join(kinds) or 'nothing'}"
    return f"{type(value).__name__} {value!r:.40}"

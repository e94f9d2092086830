"""Dumps of one record per sequence (.jsonl, .json, .parquet, lists in .pt files) as chunks."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rollout_corr.diagnose.read.chunk import CHUNK_SEQUENCES, CHUNK_SLOTS, MISSING_INTEGER, Chunk
from rollout_corr.diagnose.read.fields import INTEGERS, LOG_PROBS, OFFSETS, REQUIRED, ChosenFields, choose, floating_of
from rollout_corr.diagnose.read.label_names import Names, names_in
from rollout_corr.diagnose.read.problems import DumpError, Problem, Problems

# Number of a record; the record, or the problem with it; the share of the file read so far.
Numbered = tuple[int, Mapping[str, Any] | str, float]

# Values of a field of a record.
MOST_VALUES = 1 << 24
# Fields of a record, mappings inside of one another, and letters of a dotted name. A mapping may contain itself.
MOST_FIELDS, MOST_DEPTH, LONGEST_NAME = 65_536, 32, 1_000
# Letters that are kept of the text of a token.
LONGEST_TEXT = 256


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a record: fields of nested mappings get dotted names.

    Raises:
        DumpError: It has too many fields, too deep ones, or two of one name.
    """
    found: dict[str, Any] = {}
    within = [("", iter(record.items()))]
    seen = 0
    while within:
        prefix, items = within[-1]
        item = next(items, None)
        if item is None:
            within.pop()
            continue
        name, value = item
        seen += 1
        if not isinstance(name, (str, int)) or (isinstance(name, str) and len(name) > LONGEST_NAME):
            raise DumpError(f"expected names of at most {LONGEST_NAME} letters, got {reprlib.repr(name)}")
        name = f"{prefix}{name}"
        if seen > MOST_FIELDS or len(within) > MOST_DEPTH or len(name) > LONGEST_NAME:
            raise DumpError(
                f"expected at most {MOST_FIELDS} fields, {MOST_DEPTH} mappings inside of one another and names of "
                f"{LONGEST_NAME} letters"
            )
        # An empty mapping stays a field: a record whose mask is one has not simply no mask.
        if isinstance(value, Mapping) and value:
            within.append((f"{name}.", iter(value.items())))
        elif name in found:
            raise DumpError(f"the field {reprlib.repr(name)} occurs twice")
        else:
            found[name] = value
    return found


def flat_or_problem(record: Any, kind: type, expected: str) -> dict[str, Any] | str:
    """Flatten a record of a kind, or say why it is none."""
    if not isinstance(record, kind):
        return f"expected {expected}, got {type(record).__name__}"
    try:
        return flat(cast("Mapping[str, Any]", record))
    except DumpError as error:
        return str(error)


def unwrapped(found: Any) -> Any:
    """Return the list of records that a mapping holds beside other values; anything else as it is."""
    if isinstance(found, Mapping):
        lists = [value for value in found.values() if isinstance(value, list) and value]
        if len(lists) == 1 and isinstance(lists[0][0], Mapping):
            return lists[0]
    return found


def listed(found: Sequence[Any]) -> Iterator[Numbered]:
    """Return the records of a list in a .pt or .json file."""
    for number, record in enumerate(found):
        yield number, flat_or_problem(record, Mapping, "a mapping"), (number + 1) / len(found)


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
        label_names: Names of labels that were asked for.
    """

    def __init__(self, records: Iterator[Numbered], file: str, wanted: ChosenFields, problems: Problems) -> None:
        self.records, self.file, self.wanted, self.problems = records, file, wanted, problems
        self.progress = 0.0
        self.fields: dict[str, str] = {}
        self.label_names: Names = {}
        self._chosen: dict[tuple[str, ...], dict[str, str]] = {}

    def chunks(self) -> Iterator[Chunk]:
        """Read chunk by chunk."""
        waiting: list[_Values] = []
        slots = 0
        try:
            for number, record, done in self.records:
                self.progress = done
                read = self._read(number, record)
                if read is None:
                    continue
                if waiting and (slots + read.tokens > CHUNK_SLOTS or len(waiting) == CHUNK_SEQUENCES):
                    yield self._chunk(waiting)
                    waiting, slots = [], 0
                waiting.append(read)
                slots += read.tokens
        except Exception:  # whatever a parser raises; the records before it are whole
            if waiting:
                yield self._chunk(waiting)
            raise
        if waiting:
            yield self._chunk(waiting)

    def _roles(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Return the fields of a record by role; records may have different ones."""
        names = tuple(name for name, value in record.items() if value is not None)
        if names not in self._chosen:
            if sum(map(len, self._chosen)) > MOST_FIELDS:
                self._chosen.clear()
            self._chosen[names] = choose(names, self.wanted, self.file)
            self.fields = self.fields or self._chosen[names]
        return self._chosen[names]

    def _read(self, number: int, record: Mapping[str, Any] | str) -> _Values | None:
        """Read a record, or note why it cannot be read."""
        if isinstance(record, str):
            self.problems.add(Problem(self.file, number, None, record))
            return None
        try:
            roles = self._roles(record)
        except DumpError as error:
            found = error.problem or Problem(self.file, None, None, str(error))
            self.problems.add(found._replace(record=number))
            return None
        if len(self.label_names) < len(self.wanted.by):
            self.label_names |= names_in(record, self.wanted.by)
        read = _Values(number)
        for role, name in roles.items():
            what = None if role in OFFSETS else read.take(role, record[name])
            if what is None:
                continue
            essential = role in (*REQUIRED, "mask")
            self.problems.add(Problem(self.file, number, name, what + ("" if essential else " (left out)")))
            if essential:
                return None
        return read

    def _chunk(self, reads: Sequence[_Values]) -> Chunk:
        roles = dict.fromkeys(role for read in reads for role in read.values)
        columns = {role: torch.cat([read.column(role) for read in reads]) for role in roles}
        return Chunk(
            train=columns.pop("train_logp"),
            rollout=columns.pop("rollout_logp"),
            mask=columns.pop("mask", None),
            offsets=torch.tensor([0, *(read.tokens for read in reads)]).cumsum(0),
            records=torch.tensor([read.number for read in reads]),
            file=self.file,
            columns=columns,
            texts=[read.texts for read in reads] if any(read.texts is not None for read in reads) else None,
        )


class _Values:
    """The values of one record by role. Train log-probs come first, and all others are as many."""

    def __init__(self, number: int) -> None:
        self.number, self.tokens = number, 0
        self.values: dict[str, Tensor] = {}
        self.texts: Sequence[str] | None = None

    def take(self, role: str, value: Any) -> str | None:
        """Take the field of a role; return the problem with it, or None."""
        if role == "texts":
            if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
                return f"expected a list of strings, got {_got(value)}"
            self.texts = [text[:LONGEST_TEXT] for text in value] if len(value) == self.tokens else None
            return self._wrong_count(len(value))
        try:
            values = _numbers(value, floating_of(role))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            return f"expected a list of numbers, got {_got(value)} ({str(error).partition(chr(10))[0]})"
        if values.numel() > MOST_VALUES:
            return f"expected at most {MOST_VALUES:,} values, got {values.numel():,}"
        if values.dim() == 0 and role not in (*LOG_PROBS, "mask"):
            values = values.expand(self.tokens)
        if values.dim() != 1:
            return f"expected a flat list, got {_got(value)}"
        if role == "train_logp":
            self.tokens = values.numel()
        wrong = self._wrong_count(values.numel())
        if wrong is None:
            self.values[role] = values
        return wrong

    def _wrong_count(self, count: int) -> str | None:
        return (
            None if count == self.tokens else f"expected {self.tokens} values, as many as train log-probs, got {count}"
        )

    def column(self, role: str) -> Tensor:
        """Return the values of a role for all tokens of the record, with the missing value if it has none."""
        found = self.values.get(role)
        if role == "mask":
            return torch.ones(self.tokens, dtype=torch.bool) if found is None else found != 0
        if role in INTEGERS:
            if found is None:
                return torch.full((self.tokens,), MISSING_INTEGER)
            return (found.nan_to_num(MISSING_INTEGER) if found.is_floating_point() else found).to(torch.int64)
        found = torch.full((self.tokens,), torch.nan) if found is None else found
        # Log-probs keep their precision.
        return found if role in REQUIRED and found.is_floating_point() else found.to(floating_of(role))


def _numbers(value: Any, dtype: torch.dtype) -> Tensor:
    """Return a list of numbers as a tensor, null as NaN; a single number as a 0-d tensor."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (str, bytes)) or value is None:
        raise TypeError(type(value).__name__)
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
    return f"{type(value).__name__} {reprlib.repr(value)}"

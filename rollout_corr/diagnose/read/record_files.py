"""Dumps of one record per sequence (.jsonl, lists in .pt files) as chunks."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .chunk import Chunk
from .columns import unused
from .fields import REQUIRED, ChosenFields, Names, choose, floating_of, kept, last_part, names_in, role_of
from .formats import signed
from .problems import DumpError, Problem, Problems

# Number of a record; the record, or the problem with it; the share of the file read so far.
Numbered = tuple[int, Mapping[str, Any] | str, float]

# Values of a field of a record.
MOST_VALUES = 1 << 24
# Fields of a record, mappings inside of one another, and letters of a dotted name. A mapping may contain itself.
MOST_FIELDS, MOST_DEPTH, LONGEST_NAME = 65_536, 32, 1_000
# Fields with the length of the response, where tokens hold the prompt too.
RESPONSE_LENGTHS = ("response_length", "response_lengths", "response_len")
# Letters that are kept of the text of a token.
LONGEST_TEXT = 256


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a record: fields of nested mappings get dotted names.

    Raises:
        DumpError: It has too many fields, too deep ones, or two of one name.
    """
    found: dict[str, Any] = {}
    seen = 0

    def add(fields: Mapping[Any, Any], prefix: str, depth: int) -> None:
        nonlocal seen
        for name, value in fields.items():
            seen += 1
            if not isinstance(name, (str, int)) or (isinstance(name, str) and len(name) > LONGEST_NAME):
                raise DumpError(f"expected names of at most {LONGEST_NAME} letters, got {reprlib.repr(name)}")
            name = f"{prefix}{name}"
            if seen > MOST_FIELDS or depth > MOST_DEPTH or len(name) > LONGEST_NAME:
                raise DumpError(
                    f"expected at most {MOST_FIELDS} fields, {MOST_DEPTH} mappings inside of one another and names of "
                    f"{LONGEST_NAME} letters"
                )
            # An empty mapping stays a field: a record whose mask is one has not simply no mask.
            if isinstance(value, Mapping) and value:
                add(value, f"{name}.", depth + 1)
            elif name in found:
                raise DumpError(f"the field {reprlib.repr(name)} occurs twice")
            else:
                found[name] = value

    add(record, "", 1)
    return found


def flat_or_problem(record: Any, kind: type, expected: str) -> dict[str, Any] | str:
    """Flatten a record of a kind, or say why it is none."""
    if not isinstance(record, kind):
        return f"expected {expected}, got {type(record).__name__}"
    try:
        return flat(cast("Mapping[str, Any]", record))
    except DumpError as error:
        return str(error)


def unwrapped(found: Any, wanted: ChosenFields) -> Any:
    """Return the list of records that a mapping holds: the only list in it, or the first one with both log-probs."""
    if isinstance(found, Mapping):
        lists = [value for value in found.values() if isinstance(value, list) and value]
        for records in lists:
            if isinstance(records[0], Mapping) and (len(lists) == 1 or _has_both(records[0], wanted)):
                return records
    return found


def _has_both(record: Mapping[str, Any], wanted: ChosenFields) -> bool:
    try:
        choose(flat(record), wanted, "")
    except DumpError:
        return False
    return True


def numbered(records: Iterable[Mapping[str, Any] | str], count: int) -> Iterator[Numbered]:
    """Number so many records, which are in memory."""
    for number, record in enumerate(records):
        yield number, record, (number + 1) / count


def listed(found: Sequence[Any]) -> Iterator[Numbered]:
    """Return the records of a list in a .pt file."""
    return numbered((flat_or_problem(record, Mapping, "a mapping") for record in found), len(found))


def transposed(fields: Mapping[str, Any], count: int) -> Iterator[Numbered]:
    """Make records of the fields that are lists, or tensors, of `count` items."""
    same = {
        name: value
        for name, value in fields.items()
        if (isinstance(value, list) or (isinstance(value, Tensor) and value.dim())) and len(value) == count
    }
    return numbered(({name: value[number] for name, value in same.items()} for number in range(count)), count)


class RecordFile:
    """A file of records. One that cannot be read is noted and skipped.

    Args:
        records: The records, numbered.
        file: Path of the file, for messages.
        wanted: The fields that the user names.
        problems: Takes what cannot be read.

    Its `fields`, `progress`, `label_names` and `unused` are those of a `Source`, of its first record.
    """

    def __init__(self, records: Iterator[Numbered], file: str, wanted: ChosenFields, problems: Problems) -> None:
        self.records, self.file, self.wanted, self.problems = records, file, wanted, problems
        self.progress = 0.0
        self.fields: dict[str, str] = {}
        self.label_names: Names = {}
        self.unused: dict[str, str] = {}
        self._looked = False
        self._chosen: dict[tuple[str, ...], dict[str, str]] = {}

    def chunks(self) -> Iterator[Chunk]:
        """Read record by record."""
        for number, record, done in self.records:
            self.progress = done
            chunk = self._read(number, record)
            if chunk is not None:
                yield chunk

    def _roles(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Return the fields of a record by role; records may have different ones."""
        names = tuple(name for name, value in record.items() if value is not None)
        if names not in self._chosen:
            if sum(map(len, self._chosen)) > MOST_FIELDS:
                self._chosen.clear()
            self._chosen[names] = choose(names, self.wanted, self.file, values=record)
            self.fields = self.fields or self._chosen[names]
        return self._chosen[names]

    def _read(self, number: int, record: Mapping[str, Any] | str) -> Chunk | None:
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
        response = _response(record)
        values: dict[str, Tensor] = {}
        texts: list[str] | None = None
        for role, name in roles.items():
            kind = role_of(role).kind
            if kind == "offsets":
                continue
            # Train log-probs come first, and all others are as many.
            count = values["train_logp"].shape[0] if values else None
            try:
                if kind == "texts":
                    texts = _texts(record[name], count)
                else:
                    values[role] = _values(role, record[name], count, response)
            except DumpError as error:
                if role == "rewards" and role not in self.wanted.roles:
                    continue  # rewards come in many forms, and the name alone promises none
                essential = role in REQUIRED or kind == "mask"
                self.problems.add(Problem(self.file, number, name, f"{error}{'' if essential else ' (left out)'}"))
                if essential:
                    return None
        shape = values["train_logp"].shape
        if not self._looked:
            self._looked, self.unused = True, unused(record, roles, shape, MOST_VALUES)
        return Chunk.of(
            values,
            offsets=torch.tensor([0, shape[0]]),
            records=torch.tensor([number]),
            file=self.file,
            texts=None if texts is None else [texts],
        )


def _texts(value: Any, count: int | None) -> list[str]:
    """Return the texts of tokens, each cut.

    Raises:
        DumpError: They are no strings, or not as many as tokens.
    """
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise DumpError(f"expected a list of strings, got {_got(value)}")
    _check_count(len(value), count)
    return [text[:LONGEST_TEXT] for text in value]


def _response(record: Mapping[str, Any]) -> int | None:
    """Return the length of the response that a record states; its tokens may be those of prompt and response."""
    for name, value in record.items():
        if last_part(name) in RESPONSE_LENGTHS and isinstance(value, (int, Tensor)):
            return int(value) if not isinstance(value, Tensor) or value.numel() == 1 else None
    return None


def _values(role: str, value: Any, count: int | None, response: int | None = None) -> Tensor:
    """Return the values of a role, [count].

    Raises:
        DumpError: They are no numbers, or not as many as tokens.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (list, tuple, Tensor)):
        # A batch of one.
        value = value[0]
    try:
        found = _numbers(value, floating_of(role))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise DumpError(f"expected a list of numbers, got {_got(value)} ({reason})") from error
    if found.numel() > MOST_VALUES:
        raise DumpError(f"expected at most {MOST_VALUES:,} values, got {found.numel():,}")
    if found.dim() == 2 and found.shape[0] == 1:
        found = found[0]
    if found.numel() == 1 and count is not None and not role_of(role).per_token:
        found = found.reshape(()).expand(count)
    if role == "token_ids" and count is not None and count == response and found.dim() == 1 and len(found) > count:
        found = found[-count:] if count else found[:0]
    if found.dim() != 1:
        raise DumpError(f"expected a flat list, got {_got(value)}")
    _check_count(found.shape[0], count)
    return kept(role, found)


def _check_count(got: int, count: int | None) -> None:
    if count is not None and got != count:
        raise DumpError(f"expected {count} values, as many as train log-probs, got {got}")


def _numbers(value: Any, dtype: torch.dtype) -> Tensor:
    """Return a list of numbers as a tensor, null as NaN; a single number as a 0-d tensor."""
    if isinstance(value, Tensor):
        return signed(value)
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

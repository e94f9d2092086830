"""Dumps of whole tensors (.pt, .safetensors, .npz), padded or packed, as chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rollout_corr.definition.offsets import OffsetsError, checked_lengths, checked_offsets, offsets_of
from rollout_corr.diagnose.read.chunk import CHUNK_SLOTS, MISSING_INTEGER, Chunk
from rollout_corr.diagnose.read.fields import (
    ALIASES,
    INTEGERS,
    LOG_PROBS,
    OFFSETS,
    ChosenFields,
    choose,
    floating_of,
    last_part,
)
from rollout_corr.diagnose.read.formats import Format
from rollout_corr.diagnose.read.label_names import Names
from rollout_corr.diagnose.read.problems import DumpError, Problem, Problems

# Offsets are in memory at once, 8 bytes a sequence; a sequence is in one chunk, with some 100 bytes a token.
MOST_SEQUENCES = 1 << 26
LONGEST_SEQUENCE = 1 << 24


class TensorFile:
    """A file of whole tensors.

    Args:
        tensors: Access to their rows.
        file: Path of the file, for messages.
        wanted: The fields that the user names.
        problems: Takes what cannot be read.

    Attributes:
        fields: The field of each role.
        progress: How much was read, 0 to 1.
        label_names: Names of labels that were asked for.

    Raises:
        DumpError: A field is missing, or has a shape, a dtype or offsets that cannot be.
    """

    def __init__(self, tensors: Format, file: str, wanted: ChosenFields, problems: Problems) -> None:
        self.tensors, self.file, self.problems = tensors, file, problems
        self.progress = 0.0
        self.label_names: Names = {}
        shapes = {name: shape for name, shape in tensors.shapes.items() if shape}
        first = choose(shapes, wanted, file)
        shape = shapes[first["train_logp"]]
        has_offsets = any(role in first for role in OFFSETS)
        if len(shape) == 2 and shape[0] == 1 and has_offsets:
            for name in [name for name, other in shapes.items() if other == shape]:
                tensors.flatten(name)
                shapes[name] = tensors.shapes[name]
            shape = shape[1:]
        self.padded = len(shape) == 2
        if len(shape) not in (1, 2):
            raise self._error(first["train_logp"], f"expected shape [N] or [B, T], got {list(shape)}")
        if not (self.padded or has_offsets):
            raise self._error(
                first["train_logp"],
                f"1-D log-probs of shape {list(shape)} need a field cu_seqlens or lengths, and the file has neither",
            )
        if self.padded and shape[0] and not shape[1]:
            raise self._error(first["train_logp"], f"expected tokens, got shape {list(shape)}")
        if math.prod(shape) > tensors.size:
            what = f"{math.prod(shape)} values, in a file of {tensors.size} bytes: they repeat one another"
            raise self._error(first["train_logp"], what)
        self.offsets = None if self.padded else self._offsets(first, shape[0])
        self.count = shape[0] if self.offsets is None else self.offsets.shape[0] - 1
        longest = shape[1] if self.offsets is None else int(self.offsets.diff().amax()) if self.count else 0
        if longest > LONGEST_SEQUENCE:
            what = f"a sequence of {longest} tokens; at most {LONGEST_SEQUENCE} are read"
            raise self._error(first["train_logp"], what)
        self.shape = shape
        self.fields = choose(shapes, wanted, file, self._fits)
        for role, name in self.fields.items():
            if role not in OFFSETS and not self._fits(role, name):
                raise self._error(
                    name,
                    f"as {role}: expected shape {list(shape)}, that of {self.fields['train_logp']}, got "
                    f"{list(shapes[name])}",
                )
        if wanted.guess and "mask" not in self.fields:
            self._check_no_mask()
        for role in LOG_PROBS:
            if role not in self.fields:
                continue
            name = self.fields[role]
            dtype = self.tensors.read(name, 0, 0).dtype
            if not dtype.is_floating_point:
                raise self._error(name, f"as {role}: expected floating log-probs, got {dtype!s}")

    def _error(self, name: str, what: str) -> DumpError:
        return Problem(self.file, None, name, what).error()

    def _check_no_mask(self) -> None:
        """Refuse a mask of another shape: without it, tokens that it hides would count."""
        for name, shape in self.tensors.shapes.items():
            alias = last_part(name).lower()
            # An attention mask covers the prompts too.
            if alias in ALIASES["mask"] and alias != "attention_mask":
                raise self._error(name, f"as mask: expected shape {list(self.shape)}, got {list(shape)}")

    def _fits(self, role: str, name: str) -> bool:
        shape = self.tensors.shapes[name]
        if role in OFFSETS:
            return len(shape) == 1
        if shape == self.shape:
            return True
        return role not in (*LOG_PROBS, "mask") and shape in (
            (self.count,),
            (self.count, 1),
        )

    def _offsets(self, fields: Mapping[str, str], tokens: int) -> Tensor:
        """Read the offsets of a packed file, or add up its lengths: [S + 1] int64."""
        role = "cu_seqlens" if "cu_seqlens" in fields else "lengths"
        name = fields[role]
        rows = self.tensors.rows(name)
        if self.tensors.shapes[name][0] > min(MOST_SEQUENCES, self.tensors.size):
            raise self._error(name, f"{self.tensors.shapes[name][0]} sequences; at most {MOST_SEQUENCES} are read")
        if rows == 0 < self.tensors.shapes[name][0]:
            # Cut off before them: there is no sequence to read.
            return torch.zeros(1, dtype=torch.int64)
        found = self.tensors.read(name, 0, rows).reshape(-1)
        try:
            return offsets_of(found, tokens, name) if role == "lengths" else checked_offsets(found, tokens, name)
        except OffsetsError as error:
            raise Problem(self.file, error.index, name, error.what).error() from error

    def _lengths(self, name: str, first: int, last: int) -> Tensor:
        """Read the lengths of rows of a padded field."""
        try:
            return checked_lengths(self.tensors.read(name, first, last).reshape(-1), self.shape[1], name)
        except OffsetsError as error:
            record = None if error.index is None else first + error.index
            raise Problem(self.file, record, name, error.what).error() from error

    def chunks(self) -> Iterator[Chunk]:
        """Read chunk by chunk; rows that a cut-off file lacks are noted."""
        limit = self._readable()
        if self.padded:
            width = self.shape[1]
            step = max(1, CHUNK_SLOTS // max(1, width))
            for start in range(0, limit, step):
                stop = min(limit, start + step)
                yield self._chunk(start, stop, start, stop, torch.arange(stop - start + 1) * width)
            return
        assert self.offsets is not None  # packed
        first = 0
        while first < limit:
            start = int(self.offsets[first])
            # As many sequences as fit, at least one, and not more than slots: they may be empty.
            fitting = int(torch.searchsorted(self.offsets, start + CHUNK_SLOTS, right=True)) - 1
            last = min(limit, first + CHUNK_SLOTS, max(first + 1, fitting))
            own = self.offsets[first : last + 1] - start
            yield self._chunk(first, last, start, int(self.offsets[last]), own)
            first = last

    def _readable(self) -> int:
        """Count the sequences that are complete in every field, and note the fields that are cut off."""
        limit = self.count
        for role, name in self.fields.items():
            shape, rows = self.tensors.shapes[name], self.tensors.rows(name)
            if role in OFFSETS or rows == shape[0]:
                continue
            whole = rows
            if self.offsets is not None and shape == self.shape:
                whole = int((self.offsets[1:] <= rows).sum())
            what = f"cut off: the file holds {rows} of {shape[0]} rows"
            self.problems.add(Problem(self.file, whole, name, what))
            limit = min(limit, whole)
        return limit

    def _chunk(self, first: int, last: int, start: int, stop: int, offsets: Tensor) -> Chunk:
        """Read sequences first to last, which lie in rows (packed: tokens) start to stop."""
        columns: dict[str, Tensor] = {}
        for role, name in self.fields.items():
            if role in (*OFFSETS, "texts"):
                continue
            shape = self.tensors.shapes[name]
            if shape == self.shape:
                values = self.tensors.read(name, start, stop).reshape(-1)
            else:
                values = self.tensors.read(name, first, last).reshape(-1).repeat_interleave(offsets.diff())
            if role in LOG_PROBS:
                columns[role] = values
            else:
                columns[role] = _integers(values) if role in INTEGERS else values.to(floating_of(role))
        mask = columns.pop("mask", None)
        if mask is None and self.padded and "lengths" in self.fields:
            lengths = self._lengths(self.fields["lengths"], first, last)
            mask = (torch.arange(self.shape[1]) < lengths[:, None]).reshape(-1)
        self.progress = last / max(1, self.count)
        return Chunk(
            train=columns.pop("train_logp"),
            rollout=columns.pop("rollout_logp"),
            mask=None if mask is None else mask != 0,
            offsets=offsets,
            records=torch.arange(first, last),
            file=self.file,
            columns=columns,
        )


def _integers(values: Tensor) -> Tensor:
    """Return values as int64; what is no integer that a float holds exactly is unknown."""
    if not values.is_floating_point():
        return values.to(torch.int64)
    values = values.double()
    return values.where(values.abs() <= 1 << 53, MISSING_INTEGER).to(torch.int64)

"""Dumps of whole tensors (.pt, or in memory), padded or packed, as chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...definition.offsets import OffsetsError, checked_lengths, checked_offsets, offsets_of
from . import chunk as chunks
from .chunk import Chunk
from .columns import unused
from .fields import ROLES, ChosenFields, choose, kept, last_part, names_in, role_of
from .formats import Unread, signed
from .problems import DumpError, Problem

# Offsets are in memory at once, 8 bytes a sequence; a sequence is in one chunk, with some 100 bytes a token.
MOST_SEQUENCES = 1 << 26
LONGEST_SEQUENCE = 1 << 24


class TensorFile:
    """A file of whole tensors.

    Args:
        fields: Its tensors by name, among other values.
        size: Bytes of the file.
        file: Path of the file, for messages.
        wanted: The fields that the user names.

    Its `fields`, `progress`, `label_names` and `unused` are those of a `Source`.

    Raises:
        DumpError: A field is missing, or has a shape, a dtype or offsets that cannot be.
    """

    def __init__(self, fields: Mapping[str, Any], size: int, file: str, wanted: ChosenFields) -> None:
        self.file, self.size = file, size
        self.progress = 0.0
        self.label_names = names_in(fields, wanted.by)
        self.tensors = {name: x for name, x in fields.items() if isinstance(x, Tensor) and x.dim()}
        first = choose(fields, wanted, file, values=fields)
        for role, name in first.items():
            if isinstance(fields[name], Unread):
                raise self._error(name, f"as {role}: {fields[name]}")
            needed = role_of(role).per_token or role_of(role).kind == "offsets"
            if needed and not isinstance(fields[name], Tensor):
                what = f"as {role}: expected a tensor, as the others are, got {type(fields[name]).__name__}"
                raise self._error(name, what)
        first = choose(self.tensors, wanted, file)
        train = first["train_logp"]
        shape = tuple(self.tensors[train].shape)
        has_offsets = any(role_of(role).kind == "offsets" for role in first)
        if len(shape) == 2 and shape[0] == 1 and has_offsets:
            self.tensors |= {name: x[0] for name, x in self.tensors.items() if x.shape[:2] == shape}
            shape = shape[1:]
        self.padded = len(shape) == 2
        if len(shape) not in (1, 2):
            raise self._error(train, f"expected shape [N] or [B, T], got {list(shape)}")
        if not (self.padded or has_offsets):
            raise self._error(
                train,
                f"1-D log-probs of shape {list(shape)} need a field cu_seqlens or lengths, and the file has neither",
            )
        if self.padded and shape[0] and not shape[1]:
            raise self._error(train, f"expected tokens, got shape {list(shape)}")
        if math.prod(shape) > size:
            what = f"{math.prod(shape)} values, in a file of {size} bytes: they repeat one another"
            raise self._error(train, what)
        self.shape = shape
        self.offsets = None if self.padded else self._offsets(first, shape[0])
        self.count = shape[0] if self.offsets is None else self.offsets.shape[0] - 1
        longest = shape[1] if self.offsets is None else int(self.offsets.diff().amax()) if self.count else 0
        if longest > LONGEST_SEQUENCE:
            raise self._error(train, f"a sequence of {longest} tokens; at most {LONGEST_SEQUENCE} are read")
        self.fields = choose(self.tensors, wanted, file, self._fits)
        for role, name in self.fields.items():
            kind = role_of(role).kind
            if kind != "offsets" and not self._fits(role, name):
                got = list(self.tensors[name].shape)
                raise self._error(name, f"as {role}: expected shape {list(shape)} like {train}, got {got}")
            if kind == "logp" and not self.tensors[name].dtype.is_floating_point:
                what = f"as {role}: expected floating log-probs, got {signed(self.tensors[name][:0]).dtype!s}"
                raise self._error(name, what)
        if wanted.guess and "mask" not in self.fields:
            self._check_no_mask()
        rest = self.tensors if wanted.guess else {}
        self.unused = unused(rest, self.fields, tuple(self.tensors[train].shape), chunks.CHUNK_SLOTS)

    def _error(self, name: str, what: str) -> DumpError:
        return Problem(self.file, None, name, what).error()

    def _check_no_mask(self) -> None:
        """Refuse a mask of another shape: without it, tokens that it hides would count."""
        for name, x in self.tensors.items():
            alias = last_part(name).lower()
            # An attention mask covers the prompts too.
            if alias in ROLES["mask"].names and alias != "attention_mask":
                raise self._error(name, f"as mask: expected shape {list(self.shape)}, got {list(x.shape)}")

    def _fits(self, role: str, name: str) -> bool:
        shape = self.tensors[name].shape
        if role_of(role).kind == "offsets":
            return len(shape) == 1
        by_sequence = shape in ((self.count,), (self.count, 1))
        return shape == self.shape or (by_sequence and not role_of(role).per_token)

    def _offsets(self, fields: Mapping[str, str], tokens: int) -> Tensor:
        """Read the offsets of a packed file, or add up its lengths: [S + 1] int64."""
        role = "cu_seqlens" if "cu_seqlens" in fields else "lengths"
        name = fields[role]
        count = self.tensors[name].shape[0]
        if count > min(MOST_SEQUENCES, self.size):
            raise self._error(name, f"{count} sequences; at most {MOST_SEQUENCES} are read")
        found = self._read(name, 0, count)
        try:
            return offsets_of(found, tokens, name) if role == "lengths" else checked_offsets(found, tokens, name)
        except OffsetsError as error:
            raise Problem(self.file, error.index, name, error.what).error() from error

    def _read(self, name: str, start: int, stop: int) -> Tensor:
        """Copy rows start to stop of a tensor that may be mapped, and may lie at any byte of its file."""
        return signed(self.tensors[name][start:stop].clone()).reshape(-1)

    def _lengths(self, name: str, first: int, last: int) -> Tensor:
        """Read the lengths of rows of a padded field."""
        try:
            return checked_lengths(self._read(name, first, last), self.shape[1], name)
        except OffsetsError as error:
            record = None if error.index is None else first + error.index
            raise Problem(self.file, record, name, error.what).error() from error

    def chunks(self) -> Iterator[Chunk]:
        """Read as many sequences at a time as fit into a chunk, at least one."""
        first = 0
        while first < self.count:
            if self.offsets is None:
                width = self.shape[1]
                last = min(self.count, first + max(1, chunks.CHUNK_SLOTS // max(1, width)))
                yield self._chunk(first, last, first, last, torch.arange(last - first + 1) * width)
            else:
                start = int(self.offsets[first])
                fitting = int(torch.searchsorted(self.offsets, start + chunks.CHUNK_SLOTS, right=True)) - 1
                # Not more than slots: sequences may be empty.
                last = min(self.count, first + chunks.CHUNK_SLOTS, max(first + 1, fitting))
                own = self.offsets[first : last + 1] - start
                yield self._chunk(first, last, start, int(self.offsets[last]), own)
            first = last

    def _chunk(self, first: int, last: int, start: int, stop: int, offsets: Tensor) -> Chunk:
        """Read sequences first to last, which lie in rows (packed: tokens) start to stop."""
        values: dict[str, Tensor] = {}
        for role, name in self.fields.items():
            if role_of(role).kind in ("offsets", "texts"):
                continue
            if self.tensors[name].shape == self.shape:
                read = self._read(name, start, stop)
            else:
                read = self._read(name, first, last).repeat_interleave(offsets.diff())
            values[role] = kept(role, read)
        if "mask" not in values and self.padded and "lengths" in self.fields:
            lengths = self._lengths(self.fields["lengths"], first, last)
            values["mask"] = (torch.arange(self.shape[1]) < lengths[:, None]).reshape(-1)
        self.progress = last / self.count
        return Chunk.of(values, offsets=offsets, records=torch.arange(first, last), file=self.file)

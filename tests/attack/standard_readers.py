"""Read a dump with the formats' own packages and count it in plain Python: what a right answer has to agree with."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

NAMES = ("train_logp", "rollout_logp", "mask", "cu_seqlens", "lengths")
# A sequence without tokens, as `_one` gives it.
EMPTY: tuple[list[float], list[float], list[bool]] = ([], [], [])


class Counts(NamedTuple):
    """The numbers of a report that are compared: valid tokens, sequences, and the mean of the finite D."""

    tokens: int
    sequences: int
    d_mean: float

    def agrees(self, other):
        return self[:2] == other[:2] and math.isclose(self.d_mean, other.d_mean, rel_tol=1e-3, abs_tol=1e-4)


def counts_of(path):
    """Count a dump by the format's own reader; None where that refuses it, or finds what it has no rule for."""
    try:
        return _counts(_sequences(_loaded(path)))
    except Exception:  # noqa: BLE001  # a reader that refuses a damaged file has no opinion on it
        return None


def _loaded(path):
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True, map_location="cpu")
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            # Any byte order becomes the machine's.
            known = [name for name in arrays if name in NAMES]
            return {name: torch.from_numpy(np.array(arrays[name]).astype(np.float64)) for name in known}
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".json":
        with contextlib.suppress(json.JSONDecodeError):  # lines, as in .jsonl
            return _records(json.loads(path.read_text(encoding="utf-8-sig")))
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.decode("utf-8-sig").split("\n") if line.strip()]


def _records(found):
    """Return the records of one JSON value: a list of them, one beside other things, one record, or lists of values."""
    if not isinstance(found, dict):
        return found
    lists = [value for value in found.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(lists) == 1:
        return lists[0]
    if not isinstance(found["train_logp"][0], list):
        return [found]
    same = {name: x for name, x in found.items() if isinstance(x, list) and len(x) == len(found["train_logp"])}
    return [dict(zip(same, row, strict=True)) for row in zip(*same.values(), strict=True)]


def _sequences(found):
    """Return (train, rollout, mask) of each sequence as lists."""
    if isinstance(found, dict):
        # Nested tensors, or records beside something else.
        inner = [value for value in found.values() if isinstance(value, dict)]
        inner += [value for value in found.values() if isinstance(value, list) and isinstance(value[0], dict)]
        found = inner[0] if inner and "train_logp" not in found else found
    if isinstance(found, list):
        rows = [row.get("sample", row) for row in found]
        # A .pt file may repeat one record 10,000 times.
        each = {
            id(row): _one(row["train_logp"], row["rollout_logp"], row.get("mask"))
            for row in {id(r): r for r in rows}.values()
        }
        return [each[id(row)] for row in rows]
    train, rollout, mask, offsets, lengths = (found.get(name) for name in NAMES)
    if isinstance(train, list) or train.is_nested:
        columns = [x if isinstance(x, list) else x.unbind() for x in (train, rollout, mask)]
        return [_one(*row) for row in zip(*columns, strict=True)]
    if train.dim() == 2 and offsets is None and (lengths is None or len(train) > 1):
        mask = torch.arange(train.shape[1]) < lengths[:, None] if mask is None and lengths is not None else mask
        return [_one(train[i], rollout[i], None if mask is None else mask[i]) for i in range(len(train))]
    train, rollout, mask = (None if x is None else x.reshape(-1).tolist() for x in (train, rollout, mask))
    if offsets is None:
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    # Slices of lists, and none for what is empty: a small file may claim half a million sequences.
    bounds = pairwise(int(x) for x in offsets.tolist())
    return [_one(train[a:b], rollout[a:b], None if mask is None else mask[a:b]) if a != b else EMPTY for a, b in bounds]


def _one(train, rollout, mask):
    # One by one, the numbers of a tensor take ten times as long.
    train, rollout, mask = (x.tolist() if isinstance(x, torch.Tensor) else x for x in (train, rollout, mask))
    train, rollout = ([math.nan if x is None else float(x) for x in values] for values in (train, rollout))
    mask = [True] * len(train) if mask is None else [x is None or float(x) != 0 for x in mask]
    assert len(train) == len(rollout) == len(mask)
    return train, rollout, mask


def _counts(sequences):
    found = [[t - r for t, r, m in zip(*one, strict=True) if m] for one in sequences]
    # A report takes means of D saturated at +-1024.
    finite = [max(min(d, 1024.0), -1024.0) for ds in found for d in ds if math.isfinite(d)]
    mean = math.fsum(finite) / len(finite) if finite else 0.0
    return Counts(sum(map(len, found)), sum(1 for ds in found if ds), mean)

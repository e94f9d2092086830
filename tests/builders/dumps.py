"""Dumps of log-probs on disk, in every kind and layout that is read, and what a test asks of them."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise

import torch

import rollout_corr as rc
from rollout_corr.testing import example_batch, pad

NAMES = ("train_logp", "rollout_logp", "mask", "token_ids", "advantages")


def packed(sequences=12, seed=0, median_length=20):
    """Make the columns of a small packed batch with `cu_seqlens`; advantages are per sequence."""
    batch = example_batch(sequences, median_length, seed=seed)
    ids = torch.randint(0, 1000, batch.mask.shape, generator=torch.Generator().manual_seed(seed))
    return {
        "train_logp": batch.train_logp,
        "rollout_logp": batch.rollout_logp,
        "mask": batch.mask,
        "token_ids": ids,
        "advantages": torch.arange(sequences) * 0.25 - 1.0,
        "cu_seqlens": batch.cu_seqlens,
    }


def padded(columns):
    """Pad packed columns to [B, T]."""
    lengths = columns["cu_seqlens"].diff()
    per_token = {name: x for name, x in columns.items() if name not in ("cu_seqlens", "advantages")}
    return {name: pad(x, lengths) for name, x in per_token.items()} | {"advantages": columns["advantages"]}


def records(columns):
    """Cut packed columns into records: one mapping of tensors and numbers per sequence."""
    bounds = columns["cu_seqlens"].tolist()
    found = []
    for i, (start, stop) in enumerate(pairwise(bounds)):
        record = {name: columns[name][start:stop] for name in columns if name not in ("cu_seqlens", "advantages")}
        found.append(record | ({"advantages": float(columns["advantages"][i])} if "advantages" in columns else {}))
    return found


def plain(record):
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in record.items()}


def with_lengths(columns):
    rest = {name: x for name, x in columns.items() if name != "cu_seqlens"}
    return rest | {"lengths": columns["cu_seqlens"].diff()}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_gzip(path, rows):
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def one_row(columns):
    return {name: x[None] if x.shape == columns["train_logp"].shape else x for name, x in columns.items()}


def ragged(columns):
    return transposed(records(columns))


def transposed(rows):
    rows = list(rows)
    return {name: [row[name] for row in rows] for name in rows[0]}


def jagged(columns):
    rows = ragged(columns)
    per_token = {
        name: torch.nested.nested_tensor(rows[name], layout=torch.jagged) for name in rows if name != "advantages"
    }
    return per_token | {"advantages": columns["advantages"]}


# Suffix and writer of each kind of dump.
WRITERS = {
    "pt padded": (".pt", lambda path, columns: torch.save(padded(columns), path)),
    "pt packed": (".pt", lambda path, columns: torch.save(columns, path)),
    "pt lengths": (".pt", lambda path, columns: torch.save(with_lengths(columns), path)),
    "pt one row": (".pt", lambda path, columns: torch.save(one_row(columns), path)),
    "pt nested": (".pt", lambda path, columns: torch.save({"step": 3, "batch": padded(columns)}, path)),
    "pt records": (".pt", lambda path, columns: torch.save(records(columns), path)),
    "pt samples": (".pt", lambda path, columns: torch.save({"step": 3, "samples": records(columns)}, path)),
    "pt jagged": (".pt", lambda path, columns: torch.save(jagged(columns), path)),
    "pt lists": (".pt", lambda path, columns: torch.save(ragged(columns), path)),
    "jsonl": (".jsonl", lambda path, columns: write_jsonl(path, map(plain, records(columns)))),
    "jsonl nested": (
        ".jsonl",
        lambda path, columns: write_jsonl(path, ({"sample": plain(record)} for record in records(columns))),
    ),
    "jsonl gz": (".jsonl.gz", lambda path, columns: write_gzip(path, map(plain, records(columns)))),
}


def write(kind, folder, columns, name="dump"):
    """Write a dump and return its path."""
    suffix, writer = WRITERS[kind]
    path = folder / f"{name}{suffix}"
    writer(path, columns)
    return path


def statistics(columns, spec=None):
    """Run `correct` on the whole batch and return its statistics."""
    train, rollout, mask = (columns[name] for name in NAMES[:3])
    return rc.correct(
        train, rollout, mask=mask, cu_seqlens=columns["cu_seqlens"], spec=spec or rc.Spec(detail="full")
    ).statistics


def sequences_of(dump):
    """Return the valid tokens of every sequence as plain data: (record, {name: values})."""
    found = []
    for block in dump.chunks():
        per_token = {"train_logp": block.train, "rollout_logp": block.rollout, **block.columns}
        bounds = block.offsets.tolist()
        assert bounds[0] == 0 and bounds[-1] == block.train.numel()
        for s in range(block.sequences):
            piece = slice(bounds[s], bounds[s + 1])
            valid = slice(None) if block.mask is None else block.mask[piece]
            values = {name: x[piece][valid].tolist() for name, x in per_token.items()}
            found.append((int(block.records[s]), values))
    return found


def wanted_of(columns):
    bounds = columns["cu_seqlens"].tolist()
    found = []
    for s, (start, stop) in enumerate(pairwise(bounds)):
        valid = columns["mask"][start:stop]
        values = {name: columns[name][start:stop][valid].tolist() for name in ("train_logp", "rollout_logp")}
        values["token_ids"] = columns["token_ids"][start:stop][valid].tolist()
        values["advantages"] = [float(columns["advantages"][s])] * len(values["token_ids"])
        found.append((s, values))
    return found


def json_of(text):
    """Parse JSON strictly: NaN and infinity are not JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)

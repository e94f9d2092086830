"""A step of which every rank wrote a file: each sample once, and the parts of context parallelism put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .fields import last_part
from .problems import DumpError
from .record_files import Numbered

# The columns of a rank's file lie in this mapping.
COLUMNS = "rollout_data"
LENGTHS = ("total_lengths", "response_lengths")
# What tells samples apart, the likeliest first.
IDS = ("sample_indices", "partition")


def is_of_a_rank(found: Any) -> bool:
    """Tell the file of one rank: columns of samples, with their lengths."""
    columns = found.get(COLUMNS) if isinstance(found, Mapping) else None
    return isinstance(columns, Mapping) and all(isinstance(columns.get(name), (list, Tensor)) for name in LENGTHS)


def assembled(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Numbered]:
    """Put the samples of a step together.

    Ranks of tensor parallelism repeat samples, of pipeline parallelism lack fields, and of context parallelism hold
    parts of the fields of tokens.

    Args:
        ranks: What the files hold, in the order of the ranks.
    """
    places: dict[tuple[Any, int], list[tuple[int, int]]] = {}
    for i, rank in enumerate(ranks):
        seen: Counter[Any] = Counter()
        for row, key in enumerate(_ids(rank[COLUMNS])):
            places.setdefault((key, seen[key]), []).append((i, row))
            seen[key] += 1
    for number, found in enumerate(places.values()):
        try:
            record: dict[str, Any] | str = _sample(ranks, found)
        except DumpError as error:
            record = str(error)
        yield number, record, (number + 1) / len(places)


def _ids(columns: Mapping[str, Any]) -> list[Any]:
    count = len(columns[LENGTHS[1]])
    for name in IDS:
        ids = columns.get(name)
        if isinstance(ids, (list, Tensor)) and len(ids) == count and not any(each is None for each in ids):
            return [int(each) for each in ids]
    # Nothing names a sample: its tokens do.
    tokens = columns.get("tokens")
    if not isinstance(tokens, list) or len(tokens) != count:
        return list(range(count))
    return [tuple(each.tolist()) if isinstance(each, Tensor) else tuple(each) for each in tokens]


def _sample(ranks: Sequence[Mapping[str, Any]], places: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Make the record of one sample, which lies in these ranks at these rows."""
    held: dict[str, list[tuple[int, Any]]] = {}
    for i, row in places:
        columns = ranks[i][COLUMNS]
        count = len(columns[LENGTHS[1]])
        for name, values in columns.items():
            if isinstance(values, (list, Tensor)) and len(values) == count:
                held.setdefault(name, []).append((i, values[row]))
    total, response = (int(held[name][0][1]) for name in LENGTHS)
    if not 0 <= response <= total:
        raise DumpError(f"expected a response within {total} tokens, got one of {response}")
    record = {}
    for name, found in held.items():
        whole = [x for _, x in found if not _is_part(x, total, response)]
        parts = [(i, x) for i, x in found if _is_part(x, total, response)]
        record[name] = whole[0] if whole else _together(ranks, name, parts, total, response)
    return record


def _is_part(values: Any, total: int, response: int) -> bool:
    return isinstance(values, Tensor) and values.dim() == 1 and values.shape[0] not in (total, response)


def _together(
    ranks: Sequence[Mapping[str, Any]], name: str, parts: Sequence[tuple[int, Tensor]], total: int, response: int
) -> Tensor:
    """Put the parts of a field of tokens together, [response]."""
    if any(ranks[i].get("qkv_format", "thd") != "thd" for i, _ in parts):
        raise DumpError(f"{last_part(name)}: parts of context parallelism in another layout than thd")
    for size, held in _layouts(ranks, parts, total, response):
        owner = _owners(total, response, size)
        fits = all(int((owner == r).sum()) == part.shape[0] for r, part in held.items())
        if fits and sum(part.shape[0] for part in held.values()) == response:
            whole = parts[0][1].new_zeros(response)
            for r, part in held.items():
                whole[owner == r] = part
            return whole
    raise DumpError(
        f"{last_part(name)}: expected all parts of {response} values from ranks of context parallelism, got parts of "
        f"{[part.shape[0] for _, part in parts]}"
    )


def _layouts(
    ranks: Sequence[Mapping[str, Any]], parts: Sequence[tuple[int, Tensor]], total: int, response: int
) -> Iterator[tuple[int, dict[int, Tensor]]]:
    """Return how many ranks there may be, with the part of each."""
    if all(ranks[i].get("cp_size") for i, _ in parts):
        yield int(ranks[parts[0][0]]["cp_size"]), {int(ranks[i].get("cp_rank") or 0): part for i, part in parts}
        return
    # Older files do not say which part is whose: they are in the order of the ranks, and some of them repeat.
    several: list[Tensor] = []
    for _, part in parts:
        if part.numel() and not any(torch.equal(part, other) for other in several):
            several.append(part)
    for size in range(max(1, len(several)), len(parts) + 1):
        filled = _owners(total, response, size).unique().tolist()
        if len(filled) == len(several):
            yield size, dict(zip(filled, several, strict=True))


def _owners(total: int, response: int, size: int) -> Tensor:
    """Return the rank of each token of the response: that of the token before it, in chunk r or 2 R - 1 - r of 2 R."""
    chunk = max(1, -(-total // (2 * size)))
    at = torch.arange(total - response - 1, total - 1) // chunk
    return torch.minimum(at, 2 * size - 1 - at)

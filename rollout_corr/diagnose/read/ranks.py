"""Put the files that ranks wrote for one step together: each sample once, parts of context parallelism joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .fields import ROLES, last_part
from .record_files import Numbered, numbered

# The columns of a rank's file lie in this mapping.
COLUMNS = "rollout_data"
LENGTHS = ("total_lengths", "response_lengths")
# What tells samples apart, the likeliest first.
IDS = ("sample_indices", "partition")
# Fields that a sample needs: others are left out where their parts do not fit.
NEEDED = frozenset(name for role in ROLES.values() if role.kind in ("logp", "mask") for name in role.names)


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
        ids = _ids(rank[COLUMNS])
        if ids is None and len(ranks) > 1:
            # Row 0 of two ranks may be one sample or two.
            yield 0, f"nothing tells the samples of the ranks apart: add {IDS[0]}", 1.0
            return
        for row, key in enumerate(range(len(rank[COLUMNS][LENGTHS[1]])) if ids is None else ids):
            places.setdefault((key, seen[key]), []).append((i, row))
            seen[key] += 1
    yield from numbered((_sample(ranks, found) for found in places.values()), len(places))


def _ids(columns: Mapping[str, Any]) -> list[Any] | None:
    """Return what names each sample of a rank; None if nothing does."""
    count = len(columns[LENGTHS[1]])
    for name in IDS:
        ids = columns.get(name)
        if isinstance(ids, (list, Tensor)) and len(ids) == count and not any(each is None for each in ids):
            return [each.item() if isinstance(each, Tensor) else each for each in ids]
    # Nothing names a sample: its tokens do.
    tokens = columns.get("tokens")
    if not isinstance(tokens, list) or len(tokens) != count:
        return None
    return [tuple(each.tolist()) if isinstance(each, Tensor) else tuple(each) for each in tokens]


def _sample(ranks: Sequence[Mapping[str, Any]], places: Sequence[tuple[int, int]]) -> dict[str, Any] | str:
    """Return what these ranks hold at these rows, as one record, or the problem with it."""
    found: dict[str, list[tuple[Mapping[str, Any], Any]]] = {}
    for i, row in places:
        columns = ranks[i][COLUMNS]
        count = len(columns[LENGTHS[1]])
        for name, values in columns.items():
            if isinstance(values, (list, Tensor)) and len(values) == count:
                found.setdefault(name, []).append((ranks[i], values[row]))
    total, response = (int(found[name][0][1]) for name in LENGTHS)
    record: dict[str, Any] = {}
    for name, each in found.items():
        wholes = [x for _, x in each if not _is_part(x, total, response)]
        if wholes:
            record[name] = wholes[0]
            continue
        thd = all(rank.get("qkv_format", "thd") == "thd" for rank, _ in each)
        # Ranks of tensor parallelism repeat the part of their rank of context parallelism.
        parts = {int(rank.get("cp_rank") or 0): part for rank, part in each}
        whole = _together(parts, int(each[0][0].get("cp_size") or 0) if thd else 0, total, response)
        if whole is not None:
            record[name] = whole
        elif last_part(name).lower() in NEEDED:
            return (
                f"{last_part(name)}: expected all parts of {response} values, from ranks of context parallelism (thd), "
                f"got parts of {[part.shape[0] for part in parts.values()]}"
            )
    return record


def _together(parts: Mapping[int, Tensor], size: int, total: int, response: int) -> Tensor | None:
    """Put the parts of a field that `size` ranks of context parallelism have together; None if they do not fit."""
    if size < 1 or sum(part.shape[0] for part in parts.values()) != response:
        return None
    # A rank has the chunks r and 2 R - 1 - r of 2 R, and a token lies where the token before it does.
    chunk = max(1, -(-total // (2 * size)))
    at = torch.arange(total - response - 1, total - 1) // chunk
    owner = torch.minimum(at, 2 * size - 1 - at)
    whole = next(iter(parts.values())).new_zeros(response)
    for rank, part in parts.items():
        if int((owner == rank).sum()) != part.shape[0]:
            return None
        whole[owner == rank] = part
    return whole


def _is_part(values: Any, total: int, response: int) -> bool:
    return isinstance(values, Tensor) and values.dim() == 1 and values.shape[0] not in (total, response)

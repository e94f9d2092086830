"""Put the files that ranks wrote for one step together: each sample once, parts of context parallelism joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .fields import ALIASES, LOG_PROBS, MASKS, last_part
from .record_files import Numbered

# The columns of a rank's file lie in this mapping.
COLUMNS = "rollout_data"
LENGTHS = ("total_lengths", "response_lengths")
# What tells samples apart, the likeliest first.
IDS = ("sample_indices", "partition")
# Fields that a sample needs: others are left out where their parts do not fit.
LOG_PROB_NAMES = frozenset(name for role in LOG_PROBS for name in ALIASES[role])
NEEDED = LOG_PROB_NAMES.union(*(ALIASES[role] for role in MASKS))


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
    held = [_held(ranks, found) for found in places.values()]
    size = next((size for size in range(2, len(ranks) + 1) if all(one.fits(size) for one in held)), 0)
    for number, one in enumerate(held):
        yield number, one.record(size), (number + 1) / len(held)


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


@dataclass
class _Held:
    """The parts of one sample that ranks hold.

    Attributes:
        total: Tokens of prompt and response.
        response: Tokens of the response.
        fields: The fields that a rank has as a whole.
        parts: The parts of the others, in the order of the ranks, with their ranks of context parallelism and how many
            there are; None and 0 where the file does not say so.
    """

    total: int
    response: int
    fields: dict[str, Any]
    parts: dict[str, list[tuple[int | None, int, Tensor]]]

    def fits(self, size: int) -> bool:
        """Return whether the parts of the log-probs fit so many ranks."""
        return all(
            self._together(parts, size) is not None
            for name, parts in self.parts.items()
            if last_part(name).lower() in LOG_PROB_NAMES
        )

    def record(self, size: int) -> dict[str, Any] | str:
        """Return the whole sample, or the problem with it; `size`: as many ranks as fit all samples."""
        record = dict(self.fields)
        for name, parts in self.parts.items():
            whole = self._together(parts, size)
            if whole is not None:
                record[name] = whole
            elif last_part(name).lower() in NEEDED:
                return (
                    f"{last_part(name)}: expected all parts of {self.response} values, from ranks of context "
                    f"parallelism (thd), got parts of {[part.shape[0] for _, _, part in parts]}"
                )
        return record

    def _together(self, parts: Sequence[tuple[int | None, int, Tensor]], size: int) -> Tensor | None:
        """Put the parts of a field together, [response]; None if they do not fit."""
        if all(known for _, known, _ in parts):
            size, by_rank = parts[0][1], {rank or 0: part for rank, _, part in parts}
        else:
            # In the order of the ranks; some have none.
            by_rank = dict(enumerate(part for _, _, part in parts if part.numel()))
        if size < 1 or sum(part.shape[0] for part in by_rank.values()) != self.response:
            return None
        # A rank has the chunks r and 2 R - 1 - r of 2 R, and a token lies where the token before it does.
        chunk = max(1, -(-self.total // (2 * size)))
        at = torch.arange(self.total - self.response - 1, self.total - 1) // chunk
        owner = torch.minimum(at, 2 * size - 1 - at)
        if not all(known for _, known, _ in parts):
            by_rank = dict(zip(owner.unique().tolist(), by_rank.values(), strict=False))
        whole = parts[0][2].new_zeros(self.response)
        for rank, part in by_rank.items():
            if int((owner == rank).sum()) != part.shape[0]:
                return None
            whole[owner == rank] = part
        return whole


def _held(ranks: Sequence[Mapping[str, Any]], places: Sequence[tuple[int, int]]) -> _Held:
    """Collect what these ranks hold of a sample at these rows."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for i, row in places:
        columns = ranks[i][COLUMNS]
        count = len(columns[LENGTHS[1]])
        for name, values in columns.items():
            if isinstance(values, (list, Tensor)) and len(values) == count:
                found.setdefault(name, []).append((i, values[row]))
    total, response = (int(found[name][0][1]) for name in LENGTHS)
    held, repeats = _Held(total, response, {}, {}), _repeats(found, total, response)
    for name, each in found.items():
        parts = [(i, x) for i, x in each if _is_part(x, total, response) and i not in repeats]
        wholes = [x for _, x in each if not _is_part(x, total, response)]
        if wholes:
            held.fields[name] = wholes[0]
            continue
        thd = all(ranks[i].get("qkv_format", "thd") == "thd" for i, _ in parts)
        held.parts[name] = [
            (ranks[i].get("cp_rank"), int(ranks[i].get("cp_size") or 0) if thd else -1, part) for i, part in parts
        ]
    return held


def _repeats(found: Mapping[str, list[tuple[int, Any]]], total: int, response: int) -> set[int]:
    """Return the ranks that only repeat an earlier rank, as in tensor parallelism."""
    parts: dict[int, dict[str, Tensor]] = {}
    for name, each in found.items():
        for i, x in each:
            if _is_part(x, total, response):
                parts.setdefault(i, {})[name] = x
    ranks = sorted(parts)
    return {
        i
        for place, i in enumerate(ranks)
        for j in ranks[:place]
        if parts[i].keys() <= parts[j].keys() and all(torch.equal(x, parts[j][name]) for name, x in parts[i].items())
    }


def _is_part(values: Any, total: int, response: int) -> bool:
    return isinstance(values, Tensor) and values.dim() == 1 and values.shape[0] not in (total, response)

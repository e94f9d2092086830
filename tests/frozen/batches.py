"""Batches of a seed in any layout. Nothing here uses the package, and nothing calls exp, log or a normal generator."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

LAYOUTS = ("packed", "packed_row", "packed_gaps", "padded_right", "padded_left", "padded_holes", "padded_strided")
LAYOUTS += ("jagged", "list")
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# Of the policy that trains, and of the engine. As many as have no divisor in common with the numbers of layouts and
# masks, so that fifty seeds meet every pair of layout and dtype.
DTYPES = ((FP32, FP32), (BF16, BF16), (FP16, FP16), (FP64, FP64), (BF16, FP32))
MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, FP16, BF16, FP32, FP64, None)
GARBAGE = (math.nan, math.inf, -math.inf, -9999.0, -1e10, 0.0)
# Spreads and means of D of a sequence. The narrowest bounds of a preset are 1e-4 around 1, the widest factors of 1e4.
SPREADS = (0.00005, 0.0005, 0.005, 0.05, 0.3, 0.8, 1.6)
MEANS = (0.0, 0.0, 0.0, 0.05, -0.05, 0.7, -0.7, 2.0, -2.0, 5.0, -9.5)
# Of these sequences nothing is far from anything, so that some pass all bounds.
QUIET = 0.3
# From here on seeds make batches of thousands of tokens.
LARGE = 1000


@dataclass
class Batch:
    """Tensors of one seed.

    Attributes:
        seed: The seed.
        tokens: Per token in the layout, by name.
        sequences: [S] by name.
        offsets: [S + 1], or None where the layout needs none.
        turns: [U + 1] offsets, ids in the layout, or "runs".
        turn_labels: [U], where `turns` are offsets; else None.
        current_version: The version of the policy that trains.
    """

    seed: int
    tokens: dict[str, Any]
    sequences: dict[str, torch.Tensor]
    offsets: torch.Tensor | None
    turns: Any
    turn_labels: torch.Tensor | None
    current_version: int = 9

    def either(self, name: str, of_sequences: bool) -> Any:
        """What may be given per token or per sequence."""
        return self.sequences[name] if of_sequences else self.tokens[name]


def on_grid(x: float) -> float:
    """The nearest multiple of 2^-20."""
    return round(x * 2**20) / 2**20


@cache
def make(seed: int) -> Batch:
    """Make the batch of a seed, which draws sizes and values; layout and dtypes go round."""
    rng = random.Random(seed)
    layout, dtypes, mask_dtype = LAYOUTS[seed % 9], DTYPES[seed % 5], MASKS[seed % 11]
    lengths = [rng.choice((0, 1, 1, 2, 3, 5, 8, 12)) for _ in range(rng.randint(4, 8))]
    if seed >= LARGE:
        lengths = [rng.choice((0, 1, 90, 260, 400, 700)) for _ in range(12)]
    elif seed % 25 == 24:
        lengths = [0] * len(lengths)
    if mask_dtype is None and layout.startswith("padded"):
        lengths = [max(lengths)] * len(lengths)
    rows = [_sequence(rng, length, seed, masked=mask_dtype is not None) for length in lengths]
    places, size, shape, starts = _places(rng, layout, lengths, exact=mask_dtype is None)

    def lay(values: list[list[Any]], kind: torch.dtype, fill: tuple[Any, ...]) -> Any:
        flat = (rng.choices(fill, k=min(size, 97)) * (size // 97 + 1))[:size]
        for row, picked in zip(values, places, strict=True):
            for value, place in zip(row, picked, strict=True):
                flat[place] = value
        x = torch.tensor(flat, dtype=torch.float64).to(kind)
        if layout == "list":
            return list(x.split(lengths))
        if layout == "jagged":
            return torch.nested.nested_tensor_from_jagged(x, torch.tensor(starts))
        x = x.reshape(shape)
        if layout == "padded_strided":
            wide = torch.zeros(shape[0], shape[1] + 5, dtype=kind)
            wide[:, 3 : 3 + shape[1]] = x
            return wide[:, 3 : 3 + shape[1]]
        return x

    train, rollout = dtypes
    computes = FP64 if FP64 in dtypes else FP32
    kinds = {"rollout": rollout, "old": train, "new": train, "ref": train, "mass": computes, "weights": computes}
    kinds |= {"versions": torch.int64, "label": torch.int64, "trains": (torch.bool, FP32, torch.int64)[seed % 3]}
    fills = {"versions": (-1, 10**9), "label": (-5, 10**6, 0), "trains": (0, 1)}
    tokens = {
        name: lay([row[name] for row in rows], kinds.get(name, computes), fills.get(name, GARBAGE))
        for name in (rows[0] if rows else ())
        if name != "mask"
    }
    in_gaps = 1.0 if layout == "packed_gaps" else 0.0
    tokens["mask"] = None if mask_dtype is None else lay([row["mask"] for row in rows], mask_dtype, (in_gaps,))
    count = len(lengths)
    sequences = {
        "advantages": torch.tensor([rng.choice((-0.5, 0.25, 1.0)) for _ in lengths], dtype=computes),
        "versions": torch.tensor([rng.choice((0, 1, 4, 8, 9)) for _ in lengths]),
        "label": torch.tensor([rng.choice((0, 1, 2, 2, 5, -1)) for _ in lengths]),
        "groups": torch.tensor([rng.randrange(max(1, count // 2)) for _ in lengths]),
        "ids": torch.tensor(rng.sample(range(100), count)),
    }
    turns, labels = _turns(rng, seed, layout, places, starts, lay)
    cu_dtype = torch.int32 if seed % 2 else torch.int64
    offsets = torch.tensor(starts, dtype=cu_dtype) if layout.startswith("packed") else None
    return Batch(seed, tokens, sequences, offsets, turns, labels)


def _sequence(rng: random.Random, length: int, seed: int, masked: bool) -> dict[str, list[Any]]:
    """Values of the tokens of a sequence by name; garbage where the mask is 0."""
    quiet, invalid = rng.random() < QUIET, rng.choice((0.0, 0.0, 0.2, 0.6, 1.0))
    prompt = rng.choice((0, 0, length // 3))
    spread, mean, of_new = rng.choice(SPREADS), rng.choice(MEANS), rng.choice(SPREADS[:-1])
    mass, versions = rng.choice((0, 2, 32)), rng.choice(((8, 9), (5, 8, 9, 9), (0, 4, 6, 9)))
    if quiet:
        spread, mean, of_new, mass, versions = SPREADS[0], 0.0, SPREADS[0], 0, (8, 9)

    def noise(scale: float) -> float:
        return on_grid(scale * (sum(rng.random() for _ in range(6)) - 3.0))

    rows: list[dict[str, Any]] = []
    for place in range(length):
        rollout = -rng.randrange(1, 256) / 64
        old = min(rollout + on_grid(mean) + noise(spread), 0.0)
        if seed % 4 == 1 and rng.random() < 0.05:
            old, rollout = rng.choice(((-0.5, -30.5), (-40.5, -0.5), (-2.0, -2.0), (-0.0009765625, -(2.0**-40))))
        row = {
            "rollout": rollout,
            "old": old,
            "new": min(old + noise(of_new), 0.0),
            "ref": min(old + noise(0.3), 0.0),
            "mass": -rng.randrange(mass + 1) / 256,
            "weights": rng.randrange(1, 64) / 32,
            "trains": int(rng.random() < 0.8),
            "scale": rng.randrange(1, 64) / 32,
            "advantages": rng.choice((-2, -1, -1, 0, 1, 1, 3)) / 4,
            "entropy": rng.randrange(1, 200) / 64,
            "surprise": noise(1.0),
            "versions": rng.choice(versions),
            "label": rng.choice((0, 0, 1, 3)),
        }
        if seed % 4 == 3 and rng.random() < 0.04:
            row[rng.choice(("rollout", "old", "new", "ref"))] = rng.choice((math.nan, math.inf, -math.inf))
        valid = not masked or (place >= prompt and rng.random() >= invalid)
        if not valid:
            row |= {name: rng.choice(GARBAGE) for name in row if name not in ("trains", "versions", "label")}
            row |= {"versions": -1, "label": 10**6}
        rows.append(row | {"mask": (1 if rng.random() < 0.9 else 2) if valid else 0})
    names = [*_sequence(rng, 1, 0, masked=False)] if not rows and length == 0 else list(rows[0])
    return {name: [row[name] for row in rows] for name in names}


def _places(rng: random.Random, layout: str, lengths: list[int], exact: bool) -> tuple[Any, int, Any, list[int]]:
    """Where each token lies, how many slots there are, their shape, and where sequences begin and the last one ends."""
    total, count = sum(lengths), len(lengths)
    if layout.startswith("padded"):
        width = max([*lengths, 1]) + (0 if exact and max(lengths) else 2)
        left = {"padded_left": lambda n: range(width - n, width), "padded_holes": lambda n: _sample(rng, width, n)}
        columns = [left.get(layout, range)(n) for n in lengths]
        places = [[row * width + column for column in picked] for row, picked in enumerate(columns)]
        return places, count * width, (count, width), [row * width for row in range(count + 1)]
    before, after = (3, 2) if layout == "packed_gaps" else (0, 0)
    starts = [before + x for x in itertools.accumulate(lengths, initial=0)]
    size = before + total + after
    places = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
    return places, size, (1, size) if layout == "packed_row" else (size,), starts


def _sample(rng: random.Random, width: int, count: int) -> list[int]:
    return sorted(rng.sample(range(width), count))


def _turns(rng: random.Random, seed: int, layout: str, places: Any, starts: list[int], lay: Any) -> tuple[Any, Any]:
    """Turns as offsets, as ids or as "runs", and labels of those that are given as offsets."""
    found = []
    for picked, start in zip(places, starts, strict=False):
        cuts = sorted(rng.choices(picked[1:], k=rng.randint(0, 3))) if picked[1:] else []
        found += [start, *cuts]
    form = ("offsets", "ids", "runs")[seed % 3]
    if form == "runs":
        return "runs", None
    if form == "ids":
        number = [[sum(place >= cut for cut in found) % 7 for place in picked] for picked in places]
        return lay(number, torch.int16 if layout != "packed" else torch.int64, (0,)), None
    labels = torch.tensor([rng.choice((0, 1, 1, 4)) for _ in found], dtype=torch.int64)
    return torch.tensor([*found, starts[-1]], dtype=torch.int64), labels

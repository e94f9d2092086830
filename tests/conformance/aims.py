"""Batches whose log-ratios lie where the numbers of a Spec or a loss act: next to a bound, beyond a clamp.

The field that holds a number says what has to have its value, the ratio or a statistic of a token; a sequence gets
there with one token, with all of them, or with one that the others make up for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conformance.batches import Batch
from rollout_corr import KL, Criterion, Weight

# Where a number stands in a Spec or a loss: names of fields and places in tuples.
Where = tuple[str | int, ...]

WIDTH = 4
# The log-prob of a token whose log-ratios are moderate: its probability is 0.3, which lets divergences grow.
BASE = -1.2
# Beyond it a weight leaves the others of its batch below rounding, so such sequences are batches of their own.
FAR = 6.0


class Number(NamedTuple):
    """A number, and the Spec, the surrogate or the term that has it."""

    value: float
    owner: Any


# A statistic of a token from its log-ratio and its probability under the policy that sampled it.
STATISTICS: dict[str, Callable[[float, float], float]] = {
    "ratio": lambda d, p: math.exp(d),
    "k1": lambda d, p: -d,
    "k2": lambda d, p: d * d / 2,
    "k3": lambda d, p: math.expm1(d) - d,
    "k3_reverse": lambda d, p: math.expm1(-d) + d,
    "abs": lambda d, p: abs(d),
    "ratio_error": lambda d, p: math.exp(abs(d)),
    "ratio_deviation": lambda d, p: abs(math.expm1(d)),
    "prob_diff": lambda d, p: p * math.expm1(d),
    "tv": lambda d, p: p * abs(math.expm1(d)),
    "binary_kl": lambda d, p: _binary_kl(p, p * math.exp(d)),
    "binary_kl_reverse": lambda d, p: _binary_kl(p * math.exp(d), p),
    "binary_kl_symmetric": lambda d, p: max(_binary_kl(p, p * math.exp(d)), _binary_kl(p * math.exp(d), p)),
}


def _binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) if max(p, q) < 1 else math.inf


def _same(value: float) -> float:
    return value


DIVERGENCES = (("tv", _same), ("binary_kl", _same), ("abs", _same))
BELOW = (("ratio", lambda value: 1 - value), *DIVERGENCES)
ABOVE = (("ratio", lambda value: 1 + value), *DIVERGENCES)
RATIO, CLAMP = (("ratio", _same),), (("abs", _same),)
KL_VALUE = (*CLAMP, ("k2", _same), ("k3", _same), ("k3_reverse", _same))
# What has the value of a number, by the number's field.
FIELDS: dict[str, tuple[tuple[str, Callable[[float], float]], ...]] = {
    **dict.fromkeys(("lower", "upper", "dual", "delta"), RATIO),
    **dict.fromkeys(("low", "far_low"), BELOW),
    **dict.fromkeys(("high", "far_high"), ABOVE),
    **dict.fromkeys(("clamp", "token_clamp", "log_clamp"), CLAMP),
    **dict.fromkeys(("value_clamp", "bound"), KL_VALUE),
}


class Aim(NamedTuple):
    """Two sequences, of advantages 1 and -1, with some log-ratio.

    Attributes:
        moved: "old": old and new have it to rollout; "new": new has it to old; "ref": new has it to ref.
        shape: "one": a token has it, and the others 0; "all": each has it; "even": a token has it, and the others
            make up for it.
        at: The log-ratio.
    """

    moved: str
    shape: str
    at: float


def aims_at(found: Mapping[Where, Number], *nearness: float) -> dict[Where, list[Aim]]:
    """Aim at each number that has a place: at such parts of its value above and below it."""
    made = {path: [aim for near in nearness for aim in _aims(str(path[-1]), x, near)] for path, x in found.items()}
    return {path: aims for path, aims in made.items() if aims}


def _aims(name: str, number: Number, nearness: float) -> Iterator[Aim]:
    owner, value = number.owner, number.value * (1 + nearness)
    reached = FIELDS.get(name, ())
    moves = ("ref", "new") if isinstance(owner, KL) else ("old", "new")
    if isinstance(owner, Criterion) and name in ("lower", "upper"):
        reached = ((owner.stat, _same),)
    if isinstance(owner, Weight) or (isinstance(owner, Criterion) and owner.of == "train/rollout"):
        moves = ("old",)
    ends = {d for statistic, of in reached for d in _solved(statistic, of(value))}
    yield from (Aim(moved, shape, d) for d in sorted(ends) for moved in moves for shape in ("one", "all", "even"))


def _solved(statistic: str, value: float) -> Iterator[float]:
    """The log-ratios, of either sign, at which a statistic has a value."""
    of = STATISTICS.get(statistic)
    if of is None or not math.isfinite(value):
        return
    p = math.exp(BASE)
    # A token is not more than certain.
    most = -BASE if statistic.startswith(("tv", "prob", "binary")) else 40.0
    for far in (most, -40.0):
        low, high = 0.0, far
        begin, end = of(low, p), of(high * (1 - 1e-12), p)
        if not min(begin, end) <= value <= max(begin, end) or value == begin:
            continue
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if (of(middle, p) < value) == (begin < end) else (low, middle)
        yield float(f"{low:.6g}")


def aimed(aims: Iterable[Aim], seed: int = 0) -> Batch:
    """Make the batch; odd seeds are in float32 and even ones in float64."""
    columns: list[list[Tensor]] = [[], [], [], []]
    signs: list[float] = []
    for place, (moved, shape, at) in enumerate(aims):
        others = {"one": 0.0, "all": at, "even": -at / (WIDTH - 1)}[shape]
        d = torch.full((WIDTH,), others, dtype=torch.float64)
        d[place % WIDTH] = at
        rollout = torch.full_like(d, BASE if abs(at) < -BASE - 0.05 else -abs(at) - 0.5)
        old = rollout + d if moved == "old" else rollout
        new = old + d if moved == "new" else old
        ref = new - d if moved == "ref" else new
        for column, x in zip(columns, (new, old, rollout, ref), strict=True):
            column += [x, x]
        signs += [1.0 + place / 16, -1.0 - place / 16]
    dtype = (torch.float64, torch.float32)[seed % 2]
    policies = [torch.stack(column).to(dtype) for column in columns]
    return Batch("aimed", seed, *policies, torch.tensor(signs, dtype=dtype), torch.ones(len(signs), WIDTH).bool())


def parted(aims: Iterable[Aim]) -> list[list[Aim]]:
    """Part what is far off from the rest."""
    made: Any = ([], [])
    for aim in dict.fromkeys(aims):
        made[abs(aim.at) > FAR].append(aim)
    return [part for part in made if part]

"""`selection`: compares kept with rejected sequences by length, reward and advantage."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..metrics.limits import prefers_short

LOG_LENGTH = "log_length"
# What is compared, in the order of the rows of `Selection.sums`.
QUANTITIES = ("length", LOG_LENGTH, "reward", "advantage")


@dataclass(frozen=True)
class Selected:
    """A quantity of sequences, by what became of their tokens."""

    name: str  # "length", "reward", "advantage" or "log_length"
    kept: float  # its mean over sequences, weighted by the share of their trained tokens; 0 where none does
    rejected: float  # its mean, weighted by the share that does not train; 0 where all tokens do
    errors: float  # kept - rejected in standard errors of a rejection that does not look at the quantity


@dataclass(frozen=True, eq=False, repr=False)
class Selection:
    """The sums of `selection`. Those of micro-batches and ranks add up: `first + second`, or an all-reduce of `sums`.

    Attributes:
        names: Q names, of `QUANTITIES`.
        sums: [Q, 6] float64, sums over sequences, see `sums_of`.
    """

    names: tuple[str, ...]
    sums: Tensor

    def __repr__(self) -> str:
        """Name no value: reading one would wait for the device."""
        return f"Selection(names={self.names}, device={str(self.sums.device)!r})"

    def __add__(self, other: Selection) -> Selection:
        """Merge two batches, whose quantities are the same."""
        if not isinstance(other, Selection):
            return NotImplemented
        if self.names != other.names:
            raise ValueError(f"other: expected the quantities {list(self.names)}, got {list(other.names)}")
        return replace(self, sums=self.sums + other.sums)

    def compared(self) -> tuple[Selected, ...]:
        """Compare kept with rejected, quantity by quantity; waits for the device once."""
        return tuple(_compared(name, row) for name, row in zip(self.names, self.sums.tolist(), strict=True))

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Means of what is kept and of what is rejected: "kept/length_mean", "rejected/length_mean" and so on.

        Args:
            prefix: Goes in front of every key.
        """
        found = {}
        for one in self.compared():
            if one.name != LOG_LENGTH:
                found[f"{prefix}kept/{one.name}_mean"] = one.kept
                found[f"{prefix}rejected/{one.name}_mean"] = one.rejected
        return found

    def warnings(self) -> list[str]:
        """Say whether rejection prefers short answers."""
        return warnings_of(self.compared())


def selection(
    kept: Tensor, lengths: Tensor, *, rewards: Tensor | None = None, advantages: Tensor | None = None
) -> Selection:
    """Compare the sequences that rejection keeps with those that it rejects, by length, reward and advantage.

    A bound on a product or on the worst token of a sequence rejects long answers first, so training is biased
    toward short ones. It does not wait for the device.

    Args:
        kept: [S] bool, `Correction.keep`; or floating, the share of each sequence's trained tokens, from 0 to 1.
            Sequences whose share is not finite count in nothing.
        lengths: [S] numbers of valid tokens; sequences without one count in nothing.
        rewards: [S] floating, one per sequence; those that are not finite are left out.
        advantages: [S] floating, one per sequence, for advantages per token their mean over the sequence; those that
            are not finite are left out.

    Returns:
        A `Selection`, with `metrics()` and `warnings()`.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        TypeError: An argument that is not a tensor.
    """
    given = {"kept": kept, "lengths": lengths, "rewards": rewards, "advantages": advantages}
    for name, x in given.items():
        if x is None and name in ("rewards", "advantages"):
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.dim() != 1 or x.shape != kept.shape:
            of = "" if name == "kept" else f" {list(kept.shape)} (of kept)"
            raise ValueError(f"{name}: expected shape{of or ' [S]'}, got {list(x.shape)}")
        if x.device != kept.device:
            raise ValueError(f"{name}: expected device {kept.device} (of kept), got {x.device}")
        if name != "lengths" and not (x.is_floating_point() or (name == "kept" and x.dtype == torch.bool)):
            expected = "bool or floating" if name == "kept" else "floating"
            raise ValueError(f"{name}: expected dtype {expected}, got {str(x.dtype)[6:]}")
    values = by_name(lengths, rewards, advantages)
    return Selection(tuple(values), sums_of(kept.detach().double(), torch.stack([*values.values()])))


def by_name(lengths: Tensor, rewards: Tensor | None, advantages: Tensor | None) -> dict[str, Tensor]:
    """Return the quantities that are known, each [S] float64, with NaN at sequences without a token."""
    counts = torch.where(lengths > 0, lengths.double(), math.nan)
    found = dict(zip(QUANTITIES, (counts, counts.log(), rewards, advantages), strict=True))
    return {name: x.detach().double().where(lengths > 0, math.nan) for name, x in found.items() if x is not None}


def sums_of(kept: Tensor, values: Tensor) -> Tensor:
    """[Q, 6] float64, what comparisons need: how many sequences, and the sums of k, k^2, x, x^2 and k x.

    k is `kept`, [S], the share of each sequence that trains, and x the values, [Q, S]. A pair that is not finite counts
    in nothing.
    """
    finite = values.isfinite() & kept.isfinite()
    x, k = values.where(finite, 0.0), kept.where(finite, 0.0)
    return torch.stack([finite.double(), k, k * k, x, x * x, k * x]).sum(2).T


def _compared(name: str, sums: list[float]) -> Selected:
    """Compare two weighted means; under no preference, weights and values are paired by chance."""
    n, k, k2, x, x2, kx = sums
    r = n - k
    if k <= 0.0 or r <= 0.0:
        return Selected(name, kx / k if k > 0.0 else 0.0, (x - kx) / r if r > 0.0 else 0.0, 0.0)
    kept, rejected = kx / k, (x - kx) / r
    # The difference is the sum of x (k / K - (1 - k) / R): the squares of these factors, times the variance of x.
    factors = k2 / (k * k) - 2.0 * (k - k2) / (k * r) + (n - 2.0 * k + k2) / (r * r)
    variance = max(0.0, x2 / n - (x / n) ** 2) * max(0.0, factors)
    return Selected(name, kept, rejected, (kept - rejected) / math.sqrt(variance) if variance > 0.0 else 0.0)


def warnings_of(compared: tuple[Selected, ...]) -> list[str]:
    """Say whether rejection prefers short answers, from comparisons of length and its logarithm."""
    by = {one.name: one for one in compared}
    length, log = by.get("length"), by.get(LOG_LENGTH)
    if length is None or log is None or not prefers_short(math.exp(log.kept - log.rejected), log.errors):
        return []
    return [
        f"rejection prefers short answers: kept sequences have {length.kept:.0f} tokens on average, rejected ones "
        f"{length.rejected:.0f} ({-log.errors:.1f} standard errors of the log-length apart); a bound on a geometric "
        "mean, or on tokens, does not grow with the length"
    ]

"""Tokens: formulas, exact sums, and reading log-probs under a Spec. Read this with correction.py.

1. `read_tokens` subtracts the log-probs, applies `Spec.nonfinite` and gives `Tokens`: 0 where not measured.
   `KeptMass` brings log-probs over the whole vocabulary to the set that truncated sampling kept, before anything else.
2. `k3`, `probability`, `binary_kl`: formulas of a token that do not cancel.
3. `sum_of_d`, `sum_of_statistic`: sums that decide, as sums of integers.

A backend that may read values hands in what it knows of tokens as data: the ends of D, and what else is `derived`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from ..specs.correction import Spec
from .sequences import Sequences

if TYPE_CHECKING:
    from .turns import Turns

# Sums that decide are integer sums, so that order cannot matter. D: one limb on a 2^-28 grid, saturated at 2^10, which
# leaves room for 2^25 tokens a sequence. Other statistics: two limbs, whole part (saturated at 2^37) and fraction.
GRID_OF_D, LARGEST_D = 2.0**28, 2.0**10
GRID_OF_FRACTION, LARGEST_STATISTIC = 2**38, 2.0**37

# exp of a mean log-prob (a perplexity) is capped, so that log-probs of -1e10 leave it finite.
LARGEST_LOG_PERPLEXITY = 500.0


# Integers of as many bytes.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# 0-d, or a number that is known on the host.
Number = Tensor | float


# --- formulas ---


def select(keep: Tensor | None, x: Tensor) -> Tensor:
    """x where `keep`, else 0. None keeps everything."""
    return x if keep is None else torch.where(keep, x, 0.0)


def tensor_of(x: Number) -> Tensor:
    """x as a tensor on its own device; `as_tensor` would move one to a default device that a caller has set."""
    return x if isinstance(x, Tensor) else torch.as_tensor(x)


def k3(d: Tensor) -> Tensor:
    """e^D - 1 - D without cancellation: a Taylor polynomial for |D| <= 1/2, the formula beyond."""
    terms = 14 if d.dtype == torch.float64 else 8
    x = d.clamp(-0.5, 0.5)
    # D^2/2! + D^3/3! + ...: so many terms that the next is below a rounding.
    series = x * (1.0 / math.factorial(terms + 1)) + 1.0 / math.factorial(terms)
    for n in range(terms - 1, 1, -1):
        series = series.mul_(x).add_(1.0 / math.factorial(n))
    series = series.mul_(x).mul_(x)
    return torch.where(d.abs() <= 0.5, series, d.exp().sub_(1.0).sub_(d))


def squares(x: Tensor) -> Tensor:
    """0-d: the sum of squares."""
    return (x * x).sum()


def extrema(x: Tensor, among: Tensor | None) -> tuple[Tensor, Tensor]:
    """(-minimum, maximum) over the chosen elements; -inf, -inf when there is none."""
    if x.numel() == 0:
        nothing = x.new_full((), -torch.inf)
        return nothing, nothing
    if among is None:
        low, high = torch.aminmax(x)
        return -low, high
    return torch.where(among, -x, -torch.inf).amax(), torch.where(among, x, -torch.inf).amax()


def probability(logp: Tensor) -> Tensor:
    """exp of a log-prob; a log-prob above 0 is read as 0, so that the result is at most 1."""
    return logp.clamp(max=0.0).exp()


def complement(logp: Tensor) -> Tensor:
    """1 - exp of a log-prob, without the cancellation that most tokens, being nearly certain, would suffer."""
    return -logp.clamp(max=0.0).expm1()


def ulps(one: Tensor, other: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """How many numbers of a dtype lie between two finite ones, each rounded to it: int64. Both zeros are the same."""
    integers = _INTEGERS[dtype.itemsize]
    bits = (x.to(dtype).view(integers).long() for x in (one, other))
    # Those below 0 have the highest bit set, and grow away from 0.
    place, other_place = (torch.where(x < 0, torch.iinfo(integers).min - x, x) for x in bits)
    return (place - other_place).abs()


def binary_kl(log_p: Tensor, log_q: Tensor, d: Tensor, eps: float) -> Tensor:
    """KL(p || q) of the distributions {p, 1-p} and {q, 1-q}, where d = log q - log p."""
    not_p, not_q = complement(log_p).clamp(min=eps), complement(log_q).clamp(min=eps)
    return not_p * (not_p.log() - not_q.log()) - probability(log_p) * d


# --- sums that decide ---


def truncated(x: Tensor) -> Tensor:
    """x without its fraction. On a CPU a division does that in a twentieth of the time of `trunc`."""
    return torch.div(x, 1.0, rounding_mode="trunc")


def to_grid(x: Tensor, grid: float) -> Tensor:
    """The nearest multiples of 1/grid, as whole numbers. The caller has removed NaN and infinity."""
    # grid * x is exact, so that trunc(grid * x + copysign(0.5, x)) is rounded once, whether its steps are fused or not,
    # and also where all of it is twice as large until the division.
    return x.sign().add_(x, alpha=2.0 * grid).div_(2.0, rounding_mode="trunc")


def sum_of_d(
    saturated: Tensor, sequences: Sequences, propagate: bool, d: Tensor, largest: float | None = None
) -> Tensor:
    """[S] float64: the sum of D, -D or |D| saturated at +-1024, exact and so independent of any order.

    It is 0 where a token does not count. With `propagate` NaN and infinity of `d`, before saturation, go into the sum.
    `largest` is a bound of |saturated|, where one was read.
    """
    finite = _finite(saturated, propagate)
    if d.dtype == torch.float64:
        total = sequences.sum(finite)
    else:
        whole = to_grid(finite, GRID_OF_D)
        total = sequences.sum_integers(whole, None if largest is None else GRID_OF_D * largest + 1.0)
        total = total.double() / GRID_OF_D
    return total + sequences.sum(d - _finite(d, True)) if propagate else total


def sum_of_statistic(x: Tensor, sequences: Sequences, propagate: bool) -> Tensor:
    """[S] float64: the sum of any other statistic, saturated per token at +-2^37, exact in two limbs."""
    x_finite = _finite(x, propagate).clamp(-LARGEST_STATISTIC, LARGEST_STATISTIC)
    if x.dtype == torch.float64:
        total = sequences.sum(x_finite)
    else:
        whole = truncated(x_finite)
        limbs = whole, to_grid(x_finite - whole, GRID_OF_FRACTION)
        high, low = (sequences.sum_integers(limb).double() for limb in limbs)
        total = high + low / GRID_OF_FRACTION
    return total + sequences.sum(x - _finite(x, True)) if propagate else total


def _finite(x: Tensor, propagate: bool) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0) if propagate else x


# --- reading ---


class KeptMass(NamedTuple):
    """The probability mass that truncated sampling (top-k, top-p, min-p) kept, and the side that knows of it.

    Attributes:
        log_mass: The log of the mass, at most 0 up to rounding: in the layout of the log-probs, any of their dtypes.
        of: The side whose log-probs are over the kept set already: "rollout", an engine that returns log p - log_mass,
            so that D = train_logp - log_mass - rollout_logp; or "train", a trainer that replays the kept set, so that
            D = train_logp - (rollout_logp - log_mass).
    """

    log_mass: Tensor
    of: Literal["rollout", "train"] = "rollout"

    def each(self, change: Callable[[Tensor], Tensor]) -> KeptMass:
        """Apply a function to the tensor."""
        return KeptMass(change(self.log_mass), self.of)

    def taken_from(self, train: Tensor, rollout: Tensor) -> tuple[Tensor, Tensor]:
        """Both log-probs over the kept set. Garbage at an invalid token stays garbage there."""
        if self.of == "train":
            return train, rollout - self.log_mass
        return train - self.log_mass, rollout


@dataclass(eq=False, repr=False)
class Tokens:
    """The tokens of some sequences, read under a Spec. Tensors are per token, [N] or [B, T], unless they say [S].

    `valid` (the mask is not 0) and `measured` (valid, and D finite or taken as it is) are bool, or None if all are.
    Log-probs and D are 0 where a token is not measured. What is `derived` is computed once, here or as whoever read the
    tokens knows to: that hands in the tensor, or a function that gives it.
    """

    sequences: Sequences
    train: Tensor
    rollout: Tensor
    d: Tensor
    valid: Tensor | None
    measured: Tensor | None
    nonfinite: Tensor | None  # [S] int64: valid tokens whose D is NaN or infinite; None: there is none
    clamp: float
    propagate: bool
    turns: Turns | None = None  # where the Spec measures them
    bad: Tensor | None = None  # bool: valid, and D is NaN or infinite; None: there is none
    ends: tuple[float, float] | None = None  # -min D and max D, where they were read; then no D is NaN or infinite
    derived: dict[str, Tensor | Callable[[], Tensor]] = field(default_factory=dict)

    def count(self, which: Tensor) -> Tensor:
        """[S] int64: how many tokens of each sequence are True in `which`."""
        return self.sequences.sum_integers(which)

    @property
    def differing(self) -> Tensor:
        """Bool per token: valid, and D is not 0, or NaN or infinite."""
        which = self.d != 0.0
        return which if self.bad is None else which | self.bad

    @property
    def n_differing(self) -> Tensor:
        """[S] int64: how many tokens of each sequence differ."""
        return self.once("n_differing", lambda: self.count(self.differing))

    @property
    def largest(self) -> float:
        """The largest |D|, infinite where nobody has read it."""
        return math.inf if self.ends is None else max(self.ends)

    def units(self, over: str) -> Sequences:
        """Which tokens belong together in a unit above the token, a "turn" or a "sequence"."""
        if over == "sequence":
            return self.sequences
        assert self.turns is not None
        return self.turns.units

    def limited(self, limit: float) -> Tensor:
        """D within +-limit."""
        return self.d if self.largest <= limit else self.d.clamp(-limit, limit)

    def clamped(self, token_clamp: float | None = None) -> Tensor:
        """D after the token clamp, and after the clamp that guards every exp."""
        if token_clamp is not None:
            return self.limited(min(self.clamp, token_clamp))
        return self.once("clamped", lambda: self.limited(self.clamp))

    @property
    def saturated(self) -> Tensor:
        """D within +-1024, as it enters every sum."""
        return self.once("saturated", lambda: self.limited(LARGEST_D))

    @property
    def size(self) -> Tensor:
        """|D|, saturated."""
        return self.once("size", lambda: self.saturated.abs())

    @property
    def k3(self) -> Tensor:
        """k3 of the clamped D."""
        return self.once("k3", lambda: k3(self.clamped()))

    @property
    def excess(self) -> Tensor:
        """e^D - 1 of the clamped D, without cancellation."""
        return self.once("excess", lambda: self.clamped() + self.k3)

    @property
    def sum_d(self) -> Tensor:
        """[S] float64: the sum of D over measured tokens."""
        return self.sum_d_over("sequence")

    def sum_d_over(self, over: str) -> Tensor:
        """[S] or [U] float64: the sum of D over the measured tokens of a unit."""
        largest = None if self.ends is None else min(self.largest, LARGEST_D)
        return self.once(
            f"sum_d/{over}", lambda: sum_of_d(self.saturated, self.units(over), self.propagate, self.d, largest)
        )

    @property
    def sums_of_log_probs(self) -> tuple[Tensor, Tensor]:
        """[S] float64 each: the sums of train_logp and of rollout_logp over measured tokens."""
        train = self.sequences.sum(self.train)
        # Where it is known that no D was saturated, the sum of D is exact.
        return train, train - self.sum_d if self.largest <= LARGEST_D else self.sequences.sum(self.rollout)

    def sum_weights(self, name: str, weight: Tensor) -> Tensor:
        """[S] float64: the sum over measured tokens of a weight per token, the "ratio" or the "weight"."""
        return self.once(f"sum/{name}", lambda: self.sequences.sum(select(self.measured, weight)))

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """A derived tensor by name, computed the first time."""
        found = self.derived.get(name, compute)
        if not isinstance(found, Tensor):
            found = self.derived[name] = found()
        return found


def read_tokens(
    train: Tensor, rollout: Tensor, valid: Tensor | None, sequences: Sequences, spec: Spec, turns: Turns | None = None
) -> Tokens:
    """Subtract log-probs in the dtype that computes, find what is not finite and apply `Spec.nonfinite`."""
    d = train - rollout
    bad = ~d.isfinite()
    counted = bad if valid is None else bad & valid
    nonfinite = sequences.sum_integers(counted)
    if turns is not None:
        turns = replace(turns, nonfinite=turns.units.sum_integers(counted))
    measured = valid
    if spec.nonfinite == "reject":
        measured = ~bad if valid is None else valid & ~bad
    if spec.nonfinite == "neutral":
        train, rollout, d = (torch.where(bad, 0.0, x) for x in (train, rollout, d))
    train, rollout, d = (select(measured, x) for x in (train, rollout, d))
    propagate = spec.nonfinite == "propagate"
    return Tokens(sequences, train, rollout, d, valid, measured, nonfinite, spec.clamp, propagate, turns, counted)


Policies = tuple[Tensor, Tensor]


def policies(two: Policies, pairs: Mapping[str, Policies], mass: KeptMass | None) -> dict[str, Policies]:
    """The two log-probs of every D by `Criterion.of`, "train/rollout" first; `pairs` are the others."""
    every = {"train/rollout": two, **pairs}
    # The mass lies between a policy of the trainer and the rollout's, so not in new/old.
    return every if mass is None else {of: x if of == "new/old" else mass.taken_from(*x) for of, x in every.items()}

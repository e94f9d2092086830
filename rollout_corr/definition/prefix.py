"""Prefixes: what the tokens of a sequence up to and with each of them add up to.

Running sums are sums of integers on the grids of tokens.py, taken to a float at the end, so a token's prefix depends on
no neighbor, layout or split, and at the last token it is the sum that sequences aggregate. Log-probs in float64 have
limbs of their own here, because a running float sum would let sequences of one pack take part in each other's rounding.

A token that does not count (`among` is False there) adds nothing: it has the prefix of the token before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..specs.correction import Criterion, Weight
from .sequences import Sequences
from .tokens import GRID_OF_D, GRID_OF_FRACTION, LARGEST_D, LARGEST_STATISTIC, Tokens, select, to_grid, truncated

# The fraction of a float64 is two limbs of 31 bits: 62 bits, so that nothing of a value above 2^-9 is cut off.
GRID_OF_LIMB = 2.0**31


def running_sum(x: Tensor, sequences: Sequences, propagate: bool, one_limb: bool) -> Tensor:
    """Add x, 0 where a token does not count, up along each sequence: float64 per token.

    With `propagate` NaN and infinity go into the sums from their token on. With `one_limb` x is D, -D or |D|: saturated
    at +-1024 and summed on D's grid; else at +-2^37 and in two limbs.
    """
    largest = LARGEST_D if one_limb else LARGEST_STATISTIC
    finite = (torch.where(x.isfinite(), x, 0.0) if propagate else x).clamp(-largest, largest)
    if x.dtype == torch.float64:
        whole = truncated(finite)
        rest = (finite - whole) * GRID_OF_LIMB
        high = truncated(rest)
        low = ((rest - high) * GRID_OF_LIMB).round()
        fraction = _running(high, sequences) + _running(low, sequences) / GRID_OF_LIMB
        total = _running(whole, sequences) + fraction / GRID_OF_LIMB
    elif one_limb:
        total = _running(to_grid(finite, GRID_OF_D), sequences) / GRID_OF_D
    else:
        whole = truncated(finite)
        fraction = to_grid(finite - whole, GRID_OF_FRACTION)
        total = _running(whole, sequences) + _running(fraction, sequences) / GRID_OF_FRACTION
    return total + _broken(x, sequences) if propagate else total


def _running(x: Tensor, sequences: Sequences) -> Tensor:
    """The running sum of floating whole numbers, exact until it becomes a float64."""
    return sequences.running(x.to(torch.int64)).double()


def _broken(x: Tensor, sequences: Sequences) -> Tensor:
    """0, infinite or NaN per token, as a running sum of floats would be after those that are not finite."""
    found = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for value, which in ((torch.nan, x.isnan()), (torch.inf, x == torch.inf), (-torch.inf, x == -torch.inf)):
        found = torch.where(sequences.running(which) > 0, found + value, found)
    return found


def value_of(criterion: Criterion, x: Tensor, tokens: Tokens, among: Tensor | None) -> Tensor:
    """A criterion's value of each token's prefix, float64; infinite for an extremum before the first that counts.

    `x` is its statistic, or what that is compared by; tokens in `among` count, or all.
    """
    row, sequences = criterion.statistic, tokens.units(criterion.within)
    if criterion.reduce in ("max", "min"):
        sign = 1.0 if criterion.reduce == "max" else -1.0
        return sign * sequences.running_max(_among(sign * x, among)).double()
    propagate = tokens.propagate or row.may_be_nan()
    total = running_sum(select(among, x), sequences, propagate, row.one_limb)
    return total if criterion.reduce == "sum" else total / places(tokens, among, criterion.within)


def log_of_weight(weight: Weight, tokens: Tokens, among: Tensor | None) -> Tensor:
    """The log of each token's prefix weight, float64; tokens in `among` count, or all."""
    limit, units = weight.token_clamp, tokens.units(weight.within)
    d = select(among, tokens.d if limit is None else tokens.d.clamp(-limit, limit))
    if weight.reduce == "min":
        before = units.running_max(_among(-d, among), before=True)
        some = units.running(_counted(tokens, among)) > _counted(tokens, among)
        return d.double() - select(some, before).double()
    total = running_sum(d, units, tokens.propagate, one_limb=True)
    return total if weight.reduce == "sum" else total / places(tokens, among, weight.within)


def places(tokens: Tokens, among: Tensor | None, within: str) -> Tensor:
    """The place of each token among the tokens of its sequence or turn that count, from 1; 1 before the first, too."""
    return tokens.units(within).running(_counted(tokens, among)).clamp(min=1)


def rest(failed: Tensor, tokens: Tokens, within: str) -> Tensor:
    """Bool per token: it is valid, and it or a token before it failed."""
    found = tokens.units(within).running(failed) > 0
    return found if tokens.valid is None else found & tokens.valid


def _counted(tokens: Tokens, among: Tensor | None) -> Tensor:
    return torch.ones_like(tokens.d, dtype=torch.bool) if among is None else among


def _among(x: Tensor, among: Tensor | None) -> Tensor:
    return x if among is None else torch.where(among, x, -torch.inf)


def growth(name: str | None, tokens: Tokens, among: Tensor | None, within: str) -> Tensor | None:
    """By what bounds grow, float64 per token; None where they do not."""
    return None if name is None else places(tokens, among, within).double().sqrt()

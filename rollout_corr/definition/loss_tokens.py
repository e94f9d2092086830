"""Formulas of one token in the policy loss: comparisons of its ratio, and the penalty for leaving a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rollout_corr.definition.tokens import LARGEST_D, k3
from rollout_corr.spec.loss import KL, KLKind
from rollout_corr.spec.thresholds import float32_at_least, float32_at_most, log_of


def over(x: Tensor, bound: float) -> Tensor:
    """Bool per token: e^x is above a bound, decided in log space, where rounding of exp cannot matter. NaN is not."""
    cut = log_of(bound)
    return x > (float32_at_most(cut) if x.dtype == torch.float32 else cut)


def under(x: Tensor, bound: float) -> Tensor:
    """Bool per token: e^x is below a bound, decided in log space. NaN is not."""
    cut = log_of(bound)
    return x < (float32_at_least(cut) if x.dtype == torch.float32 else cut)


def cuts(bounds: tuple[float, ...], side: Literal["lower", "upper"], like: Tensor) -> Tensor:
    """Bounds of a ratio as log-ratios of the dtype and device of `like` are compared with: as `under`, as `over`."""
    exact = [log_of(bound) for bound in bounds]
    if like.dtype == torch.float32:
        exact = [(float32_at_least if side == "lower" else float32_at_most)(cut) for cut in exact]
    # Filled, because a copy from the host would wait for the device.
    return torch.stack([like.new_full((), cut) for cut in exact])


def saturated(x: Tensor) -> Tensor:
    """Log-ratios clamped to +-1024, as they enter sums and squares."""
    return x.clamp(-LARGEST_D, LARGEST_D)


def kl(term: KL, k: Tensor) -> Tensor:
    """Compute the penalty of a token; with `gradient` it has the value of one kind and the gradient of another."""
    k = saturated(-k if term.swapped else k)
    value = kl_value(term, term.kind, k)
    if term.gradient is None or term.gradient == term.kind:
        return value
    other = kl_value(term, term.gradient, k)
    return value.detach() + (other - other.detach())


def kl_value(term: KL, kind: KLKind, k: Tensor) -> Tensor:
    """Compute the penalty of one kind within the term's bound."""
    value = KL_VALUES[kind](term, k)
    return value if term.bound is None else value.clamp(-term.bound, term.bound)


def kl_k3(term: KL, k: Tensor) -> Tensor:
    """Compute e^-k - 1 + k within the term's clamps."""
    k = k.clamp(-term.log_clamp, term.log_clamp)
    # The value and its slope 1 - e^-k both cancel where k is small, so each is computed without cancellation.
    at = k.detach()
    value = k3(-at) - torch.expm1(-at) * (k - at)
    return value if term.value_clamp is None else value.clamp(max=term.value_clamp)


KL_VALUES: dict[str, Callable[[KL, Tensor], Tensor]] = {
    "k1": lambda term, k: k,
    "abs": lambda term, k: k.abs(),
    "k2": lambda term, k: 0.5 * k * k,
    "k3": kl_k3,
}

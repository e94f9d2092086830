"""What the peers' schemes share: sums without the native clamps, and how moments are finished.

Moments of weights are sums around 1, so that a small spread does not cancel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollout_corr.definition.findings import Findings, Named
from rollout_corr.definition.tokens import LARGEST_D, LARGEST_LOG_PERPLEXITY, Tokens, k3, select
from rollout_corr.spec.correction import Spec


def log_difference(block: Findings) -> Tensor:
    """[S] float64: the sum of rollout_logp - train_logp, with every token in full: D's native sum saturates."""
    tokens = block.tokens
    if tokens.largest is not None and tokens.largest <= LARGEST_D:
        return -block.facts.d
    return -block.facts.d - tokens.sequences.sum(tokens.d - tokens.saturated)


def k3_beyond_clamp(tokens: Tokens) -> Tensor:
    """0-d: what the native sum of k3 lacks where |D| lies beyond Spec.clamp."""
    if tokens.largest is not None and tokens.largest <= tokens.clamp:
        return torch.zeros((), dtype=torch.float64)
    return select(tokens.d.abs() > tokens.clamp, k3(tokens.d) - tokens.k3).sum()


def perplexity(log_perplexity: Tensor) -> Tensor:
    """exp with the native cap."""
    return log_perplexity.clamp(max=LARGEST_LOG_PERPLEXITY).exp()


def log_weight(block: Findings, spec: Spec) -> Tensor:
    """[S] float64: the logarithm of a product or geometric weight without Spec.clamp; 0 for an empty sequence."""
    if spec.weight is None or block.weighing is None:
        raise ValueError("spec: expected one with a weight")
    if spec.weight.token_clamp is not None or block.decision.n is not block.n_measured:
        # Its sum is not D's own, and only the clamped one was kept.
        return block.weighing.log_ratio
    return block.facts.d if spec.weight.level == "product" else block.facts.d / block.n_measured.clamp(min=1)


def count(which: Tensor, among: Tensor | None) -> Tensor:
    """0-d int64: how many are true."""
    return torch.count_nonzero(which if among is None else which & among)


def negated(bound: float | None) -> float | None:
    """The bound of -x that `bound` is of x."""
    return None if bound is None else -bound


def prefixed(scheme: str, found: Named) -> Named:
    """Names as they stand in the statistics."""
    return {f"{scheme}/{name}": x for name, x in found.items()}


def mean(total: float, units: float) -> float:
    """total / units, and 0 for 0 of 0."""
    return total / units if units else 0.0


def population_std(total: float, squares: float, units: float) -> float:
    """Standard deviation over all units, from sums of x and x^2 around any centre; 0 for a single one."""
    if units <= 1:
        return 0.0
    return math.sqrt(max(squares / units - (total / units) ** 2, 0.0))


def unbiased_std(total: float, squares: float, units: float) -> float:
    """Standard deviation with units - 1 below, from sums of x and x^2 around any centre; 0 for a single one."""
    if units <= 1:
        return 0.0
    return math.sqrt(max(squares - total * total / units, 0.0) / (units - 1))


def exp(x: float) -> float:
    """e^x, infinite where it overflows."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf

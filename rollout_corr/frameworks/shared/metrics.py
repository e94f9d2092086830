"""Sums without the native clamps, and parts of formulas, for the metrics of several frameworks."""

from __future__ import annotations

import torch
from torch import Tensor

from ...definition.bounds import outside
from ...definition.facts import Named
from ...definition.findings import Findings
from ...definition.tokens import Tokens, extrema, k3, select
from ...metrics.all_sequences import perplexity as perplexity
from ...specs.correction import Spec

SIDES = ("above", "below")

# --- on the device ---


def log_difference(found: Findings) -> Tensor:
    """[S] float64: the sum of rollout_logp - train_logp, with every token in full; the native sum of D saturates."""
    tokens = found.tokens
    if tokens.saturated is tokens.d:
        return -found.facts.d
    return -found.facts.d - tokens.sequences.sum(tokens.d - tokens.saturated)


def k3_beyond_clamp(tokens: Tokens) -> Tensor:
    """0-d: the part of the sum of k3 that the native one lacks, where |D| lies beyond Spec.clamp."""
    if tokens.clamped() is tokens.d:
        return torch.zeros((), dtype=torch.float64, device=tokens.d.device)
    return select(tokens.d.abs() > tokens.clamp, k3(tokens.d) - tokens.k3).sum()


def log_weight(found: Findings, spec: Spec) -> Tensor:
    """[S] float64: the logarithm of a product or geometric weight without Spec.clamp; 0 for an empty sequence."""
    if spec.weight is None or found.weighing is None:
        raise ValueError("spec: expected one with a weight")
    if spec.weight.token_clamp is not None or found.decision.n is not found.n_measured:
        # Its sum is not D's own, and only the clamped one was kept.
        return found.weighing.log_ratio
    return found.facts.d if spec.weight.is_product else found.facts.d / found.n_measured.clamp(min=1)


def sides(name: str, x: Tensor, low: float | None, high: float | None, among: Tensor | None = None) -> Named:
    """Bools "name_above" and "name_below": which values lie beyond the bounds, of those among some."""
    beyond = zip(SIDES, outside(x, low, high), strict=True)
    return {f"{name}_{side}": which if among is None else which & among for side, which in beyond}


def weight_sides(
    found: Findings, spec: Spec, low: float | None, high: float | None, rows: Named, maxima: Named
) -> None:
    """Mark the sequences whose mean weight lies beyond the log bounds, and of a weight per sequence its logarithm."""
    some = found.n_measured > 0
    rows.update(sides("means", found.facts.log_weight, low, high, some))
    if not spec.weighs_tokens:
        unclamped = log_weight(found, spec)
        rows.update(sides("rows", unclamped, low, high, some))
        maxima["-min_log_weight"], maxima["max_log_weight"] = extrema(unclamped, some)


def count(which: Tensor, among: Tensor | None) -> Tensor:
    """0-d int64: how many are true among some."""
    return torch.count_nonzero(which if among is None else which & among)


def prefixed(scheme: str, found: Named) -> Named:
    """The names as they stand in the statistics."""
    return {f"{scheme}/{name}": x for name, x in found.items()}


# --- on the host ---

# The guard of verl and xtuner against dividing by 0.
EPSILON = 1e-8


def beyond_one(lower: float | None, upper: float | None) -> tuple[bool, bool]:
    """Return whether 1, the ratio of an empty row, lies above the upper bound, and whether below the lower one."""
    return upper is not None and upper < 1.0, lower is not None and lower > 1.0


def with_empty(total: str, empty: str, counts: bool) -> str:
    """The formula of a count of rows, to which the empty ones belong if they count."""
    return f"({total} + {empty})" if counts else total


def negated(bound: float | None) -> float | None:
    """The bound of -x, from one of x."""
    return None if bound is None else -bound

"""Weights of tokens, turns and sequences, and what is handed back: steps 4 and 5 of correction.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..specs.correction import Spec, Weight
from .bounds import BoundsOfBatch, WeightBounds, after_bounds, bounds_in_numbers, with_found
from .correction import Decision, total_of_d
from .tokens import Tokens, k3, select

# --- weights ---


class Ratios(NamedTuple):
    """The ratios of a weight before its bounds."""

    log: Tensor  # clamped to +-Spec.clamp; per token, or float64 per turn or sequence
    excess: Callable[[], Tensor]  # ratio - 1, without cancellation: statistics may not need it of every token
    among: Tensor | None  # those that there are; None: all
    growth: Tensor | None = None  # by what the log of the bounds grows, per token; None: nothing


class Weighing:
    """An importance weight: per token at token level, per prefix in float64, per turn or sequence (float64) otherwise.

    `asked` has the unit of its ratio, and what happens outside the bounds.
    """

    def __init__(self, asked: Weight, ratios: Ratios, bounds: WeightBounds) -> None:
        self.asked, self._excess = asked, ratios.excess
        self.log_ratio, self.growth, self.bounds = ratios.log, ratios.growth, bounds
        ratio = ratios.log.exp()
        self.weight = after_bounds(bounds, asked.outside, ratio, ratios.log, 0.0, ratios.growth)
        self.ratio = ratio
        self._known: dict[str, Tensor] = {}

    @property
    def excess(self) -> Tensor:
        """Ratio - 1 before the bounds."""
        if "excess" not in self._known:
            self._known["excess"] = self._excess()
        return self._known["excess"]

    @property
    def weight_excess(self) -> Tensor:
        """Ratio - 1 after the bounds."""
        if "weight_excess" not in self._known:
            known = after_bounds(self.bounds, self.asked.outside, self.excess, self.log_ratio, 1.0, self.growth)
            self._known["weight_excess"] = known
        return self._known["weight_excess"]


def weigh(tokens: Tokens, decision: Decision, spec: Spec, found: BoundsOfBatch | None = None) -> Weighing | None:
    """The weight before batch normalization and before anything is zeroed; None without `Spec.weight`.

    `found` gives the bounds that the batch decides, where the weight has such.
    """
    weight = spec.weight
    if weight is None:
        return None
    ratios = ratios_of(weight, tokens, decision, spec)
    bounds = bounds_in_numbers(weight.low, weight.high)
    if weight.rules:
        assert found is not None
        bounds = with_found(weight, *found.of_weight(weight, ratios.log, ratios.among))
    return Weighing(weight, ratios, bounds)


def ratios_of(weight: Weight, tokens: Tokens, decision: Decision, spec: Spec) -> Ratios:
    """The ratios of a weight."""
    if weight.over == "prefix":
        from . import prefix

        log_ratio = prefix.log_of_weight(weight, tokens, decision.survivors).clamp(-spec.clamp, spec.clamp)
        growth = prefix.growth(weight.growth, tokens, decision.survivors, weight.within)
        if decision.standing is not None:
            # A sequence that a token criterion took has no survivor, so prefixes of none.
            stands = tokens.sequences.spread(decision.standing).expand(log_ratio.shape)
            log_ratio = torch.where(stands, log_ratio, 0.0)
            growth = None if growth is None else torch.where(stands, growth, 1.0)
        return Ratios(log_ratio, log_ratio.expm1, tokens.measured, growth)
    if weight.over == "token":
        log_ratio = tokens.clamped(weight.token_clamp)
        if weight.is_token_ratio:
            return Ratios(log_ratio, lambda: tokens.excess, tokens.measured)
        return Ratios(log_ratio, lambda: log_ratio + k3(log_ratio), tokens.measured)
    n = decision.n_turns if weight.per_turn else decision.n
    assert n is not None
    total = total_of_d(weight.token_clamp, tokens, decision.survivors, weight.unit)
    aggregate = torch.where(n > 0, total, 0.0)
    if weight.reduce == "mean":
        aggregate = aggregate / n.clamp(min=1)
    log_ratio = aggregate.clamp(-spec.clamp, spec.clamp)
    # Units without a survivor too, whose ratio is 1.
    n_measured = decision.n_measured_turns if weight.per_turn else decision.n_measured
    assert n_measured is not None
    return Ratios(log_ratio, log_ratio.expm1, n_measured > 0)


# --- what is handed back ---


def weights_of(tokens: Tokens, decision: Decision, weighing: Weighing | None, spec: Spec) -> Tensor | None:
    """The weights handed back, per token, before batch normalization; None when the Spec hands none back."""
    if not spec.returns_weights:
        return None
    if weighing is None:
        weights = torch.ones_like(tokens.d)
    elif spec.weight is None or spec.weight.per_token:
        weights = weighing.weight.to(tokens.d.dtype)
    else:
        units = tokens.units(spec.weight.unit)
        weights = units.spread(weighing.weight.to(tokens.d.dtype)).expand(tokens.d.shape)
    weights = select(tokens.measured, weights)
    # A sequence that a non-finite token rejects has no weight, whatever `rejected` says.
    finite = None if tokens.nonfinite is None or spec.nonfinite != "reject" else tokens.nonfinite == 0
    standing = decision.keep if spec.rejected != "mask" else finite
    if standing is not None:
        weights = select(tokens.sequences.spread(standing), weights)
    if spec.rejected != "mask":
        if decision.dropped is not None:
            weights = select(~decision.dropped, weights)
        if decision.keep_turns is not None:
            weights = select(tokens.units("turn").spread(decision.keep_turns), weights)
    return weights


def kept_tokens(tokens: Tokens, decision: Decision) -> Tensor:
    """Bool per token: valid and not rejected."""
    kept = tokens.sequences.spread(decision.keep).expand(tokens.d.shape)
    if tokens.valid is not None:
        kept = kept & tokens.valid
    if decision.keep_turns is not None:
        kept = kept & tokens.units("turn").spread(decision.keep_turns)
    return kept if decision.dropped is None else kept & ~decision.dropped

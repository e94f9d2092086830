"""The loss of one token: the formulas of rollout_corr/definition/loss.py, each with its derivative.

Everything is computed at every token and selected at the end. A derivative is 0 where a clamp or a bound holds, as in
autograd. Tensors are [PARTS, LANES, VEC] of the dtype that computes unless said otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..tables import number
from ..tokens import LARGEST_D, binary_kl, exponential, limited, probability


class Token(NamedTuple):
    """The quantities that the loss of a token is computed from."""

    new: tl.tensor  # new_logp
    compared: tl.tensor  # new_logp as the ratio reads it, over the set that truncated sampling kept
    x: tl.tensor  # its log-ratio
    advantage: tl.tensor
    weight: tl.tensor  # the factor of the loss
    level: tl.tensor  # the mean or the total log-ratio of its sequence, where the surrogate needs it
    pull: tl.tensor  # GMPO: the loss of the sequence; GSPO through the sequence: its derivative. Weights are in both
    chosen: tl.tensor  # non-zero where the surrogate chose the token from the whole batch


class Clipped(NamedTuple):
    """PPO's bounded ratio and the tokens at which it is bounded."""

    ratio: tl.tensor
    held: tl.tensor
    low: tl.tensor  # bounded from below
    high: tl.tensor  # from above
    far: tl.tensor  # from far above, where the advantage is negative


class Term(NamedTuple):
    """The loss of a token, its derivative, and what its statistics need."""

    value: tl.tensor
    slope: tl.tensor  # d(value) / d(new_logp)
    low: tl.tensor  # where a bound held from below
    high: tl.tensor
    dual: tl.tensor
    used: tl.tensor  # the clamped log-ratio
    excess: tl.tensor  # e^used - 1
    k3: tl.tensor  # e^used - 1 - used


@triton.jit
def clipped(ratio, clamped, advantage, numbers: tl.tuple, PLAN: tl.constexpr) -> Clipped:
    """Bound a ratio as PPO does. clamped: its logarithm, clamped. Any shape."""
    down = advantage < 0
    above = clamped > number(numbers, PLAN, "clip/upper").to(clamped.dtype)
    low, far = tl.zeros_like(down), tl.zeros_like(down)
    bounded = tl.where(above & (down == 0), number(numbers, PLAN, "most").to(ratio.dtype), ratio)
    if PLAN.has_lower:
        low = down & (clamped < number(numbers, PLAN, "clip/lower").to(clamped.dtype))
        bounded = tl.where(low, number(numbers, PLAN, "least").to(ratio.dtype), bounded)
    if PLAN.has_upper:
        far = down & (clamped > number(numbers, PLAN, "far/upper").to(clamped.dtype))
        bounded = tl.where(far, number(numbers, PLAN, "furthest").to(ratio.dtype), bounded)
    return Clipped(bounded, low | far | (above & (down == 0)), low, (advantage > 0) & above, far)


@triton.jit
def log_ratio(x, level, numbers: tl.tuple, PLAN: tl.constexpr):
    """Return the log-ratio of the surrogate's ratio: a token's or its sequence's."""
    if PLAN.takes == "token":
        return x
    elif PLAN.surrogate == "VESPO":
        return tl.maximum(level, number(numbers, PLAN, "log_smallest").to(x.dtype))
    else:
        return level


@triton.jit
def tapered(ratio, clamped, advantage, numbers: tl.tuple, PLAN: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Compute TOPR's factor, and find the tokens whose ratio it bounds."""
    good = advantage > number(numbers, PLAN, "threshold").to(ratio.dtype)
    above = clamped > number(numbers, PLAN, "taper/upper").to(ratio.dtype)
    bounded = tl.where(above, number(numbers, PLAN, "upper").to(ratio.dtype), ratio)
    bounded = number(numbers, PLAN, "negative").to(ratio.dtype) * bounded
    return tl.where(good, number(numbers, PLAN, "positive").to(ratio.dtype), bounded), (good == 0) & above


@triton.jit
def ringed(ratio, clamped, advantage, numbers: tl.tuple, PLAN: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Compute REC's factor, 0 where its mask leaves a token out; those below, and those above."""
    factor = tl.where(number(numbers, PLAN, "by_ratio") != 0.0, ratio, 1.0).to(ratio.dtype)
    high = clamped > number(numbers, PLAN, "inside/upper").to(ratio.dtype)
    low = clamped < number(numbers, PLAN, "inside/lower").to(ratio.dtype)
    if PLAN.option == "one_side":
        high, low = high & (advantage > 0), low & (advantage < 0)
    elif PLAN.option == "ring":
        beyond = (clamped < number(numbers, PLAN, "ring/lower").to(ratio.dtype)) == 0
        high = high & (((advantage <= 0) & beyond) == 0)
        beyond = (clamped > number(numbers, PLAN, "ring/upper").to(ratio.dtype)) == 0
        low = low & (((advantage >= 0) & beyond) == 0)
    return tl.where(low | high, 0.0, factor), low, high


@triton.jit
def policy(token: Token, numbers: tl.tuple, PLAN: tl.constexpr) -> Term:
    """Compute the surrogate's loss of a token times its weight. A new surrogate gets its branch here."""
    new, x, advantage, weight = token.new, token.x, token.advantage, token.weight
    used = log_ratio(x, token.level, numbers, PLAN)
    clamp = number(numbers, PLAN, "clamp").to(x.dtype)
    free = tl.abs(used) <= clamp
    clamped = limited(used, -clamp, clamp, PLAN)
    ratio, excess, k3 = exponential(clamped)
    low, high, dual = tl.zeros_like(free), tl.zeros_like(free), tl.zeros_like(free)
    if PLAN.clips:
        bound = clipped(ratio, clamped, advantage, numbers, PLAN)
        low, high, dual = bound.low, bound.high, bound.far
        value, slope = -advantage * bound.ratio, -advantage * ratio
        free = free & (bound.held == 0)
        if PLAN.surrogate == "ClipCov":
            left = token.chosen == 0
            value, free = tl.where(left, value, 0.0), free & left
    elif PLAN.surrogate == "Reinforce":
        value, slope = -ratio * advantage, -ratio * advantage
    elif PLAN.surrogate == "KLCov":
        value, slope = ratio * advantage, tl.where(free, ratio * advantage, 0.0)
        away, flows = limited(x, -LARGEST_D, LARGEST_D, PLAN), tl.abs(x) <= LARGEST_D
        factor = tl.where(token.chosen != 0, number(numbers, PLAN, "penalty").to(x.dtype), 0.0)
        sign = tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0)).to(x.dtype)
        value, slope = factor * tl.abs(away) - value, tl.where(flows, factor * sign, 0.0) - slope
        free = free | (free == 0)
    elif PLAN.surrogate == "SAPO":
        tau = tl.where(advantage > 0, number(numbers, PLAN, "positive"), number(numbers, PLAN, "negative"))
        tau = tau.to(x.dtype)
        gate = 1.0 / (1.0 + tl.exp(-tau * excess))
        value, slope = -(4.0 / tau) * gate * advantage, -4.0 * gate * (1.0 - gate) * advantage * ratio
        if PLAN.option == "stopped":
            slope = value
            value = value * new
            free = free | (free == 0)
    elif PLAN.surrogate == "GMPO":
        high = (advantage > 0) & (clamped > number(numbers, PLAN, "high").to(x.dtype))
        low = (advantage < 0) & (clamped < -number(numbers, PLAN, "low").to(x.dtype))
        value, slope = token.pull, token.pull
        free = free & ((low | high) == 0)
    elif PLAN.surrogate == "DRO":
        beta, saturated = number(numbers, PLAN, "beta").to(x.dtype), limited(x, -LARGEST_D, LARGEST_D, PLAN)
        square, pull, flows = saturated * saturated, saturated, tl.abs(x) <= LARGEST_D
        if PLAN.sequence_value == "total":
            # The gradient of the whole sum's square, to which this token adds its share.
            pull, flows = limited(token.level, -LARGEST_D, LARGEST_D, PLAN), tl.abs(token.level) <= LARGEST_D
            square = pull * saturated
        value = -(advantage * new - 0.5 * beta * square)
        slope = -advantage + tl.where(flows, beta * pull, 0.0)
        free = free | (free == 0)
    else:
        # The score function: its ratio is a constant.
        factor = tl.full(x.shape, 1.0, x.dtype)
        if PLAN.surrogate == "TOPR":
            factor, high = tapered(ratio, clamped, advantage, numbers, PLAN)
        elif PLAN.surrogate == "REC":
            factor, low, high = ringed(ratio, clamped, advantage, numbers, PLAN)
        elif PLAN.surrogate == "VESPO":
            up = advantage >= 0
            k = tl.where(up, number(numbers, PLAN, "k_positive"), number(numbers, PLAN, "k_negative")).to(x.dtype)
            rate = tl.where(up, number(numbers, PLAN, "rate_positive"), number(numbers, PLAN, "rate_negative"))
            factor = tl.exp(k * clamped - rate.to(x.dtype) * excess)
        elif PLAN.surrogate != "GPG" and PLAN.own_ratio:
            factor, low, high, dual = stopped_ratio(ratio, clamped, numbers, PLAN)
        value, slope = -factor * advantage * new, -factor * advantage
        free = free | (free == 0)
        if PLAN.surrogate == "DPPO":
            low, high = pushed_far(token.compared, x, advantage, numbers, PLAN)
            free = (low | high) == 0
            value = tl.where(free, value, 0.0)
    if PLAN.weighted and PLAN.surrogate != "GMPO" and PLAN.surrogate != "VESPO":
        value, slope = value * weight, slope * weight
    if PLAN.surrogate == "GSPO" and PLAN.option == "sequence":
        slope, free = token.pull, tl.abs(x) <= LARGEST_D
    if PLAN.scaled:
        coef = number(numbers, PLAN, "coef").to(x.dtype)
        value, slope = value * coef, slope * coef
    return Term(value, tl.where(free, slope, 0.0), low, high, dual, clamped, excess, k3)


@triton.jit
def stopped_ratio(ratio, clamped, numbers: tl.tuple,
                  PLAN: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Bound the ratio of Score or DPPO: the ratio; tokens below, above, and for DPPO above its `upper`."""
    known = ratio == ratio
    below, above, dual = tl.zeros_like(known), tl.zeros_like(known), tl.zeros_like(known)
    if PLAN.surrogate == "DPPO":
        if PLAN.has_upper:
            dual = clamped > number(numbers, PLAN, "score/upper").to(ratio.dtype)
            ratio = tl.where(dual, number(numbers, PLAN, "upper").to(ratio.dtype), ratio)
    else:
        if PLAN.has_lower:
            below = (clamped >= number(numbers, PLAN, "score/lower").to(ratio.dtype)) == 0
        if PLAN.has_upper:
            above = (clamped <= number(numbers, PLAN, "score/upper").to(ratio.dtype)) == 0
        if PLAN.option == "zero":
            ratio = tl.where(below | above, 0.0, ratio)
        else:
            if PLAN.has_lower:
                least = number(numbers, PLAN, "lower").to(ratio.dtype)
                ratio = tl.where(ratio < least, least, ratio)
            if PLAN.has_upper:
                most = number(numbers, PLAN, "upper").to(ratio.dtype)
                ratio = tl.where(ratio > most, most, ratio)
    return ratio, below, above, dual


@triton.jit
def pushed_far(new, x, advantage, numbers: tl.tuple, PLAN: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Find DPPO's tokens that moved with their advantage, down or up, and further than allowed."""
    base = new - x
    p, q = probability(base), probability(new)
    if PLAN.option == "tv":
        moved = tl.abs(q - p)
    else:
        moved = binary_kl(base, new, x, number(numbers, PLAN, "eps").to(x.dtype), PLAN)
    high = (advantage > 0) & (q > p) & (moved > number(numbers, PLAN, "high").to(x.dtype))
    low = (advantage < 0) & (q < p) & (moved > number(numbers, PLAN, "low").to(x.dtype))
    return low, high


@triton.jit
def penalty(k, KIND: tl.constexpr, numbers: tl.tuple, PLAN: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Compute a KL penalty of one kind and its derivative; k is new_logp less the reference policy's."""
    if PLAN.kl_swapped:
        k = -k
    saturated, flows = limited(k, -LARGEST_D, LARGEST_D, PLAN), tl.abs(k) <= LARGEST_D
    if KIND == "k1":
        value, slope = saturated, tl.full(k.shape, 1.0, k.dtype)
    elif KIND == "abs":
        value, slope = tl.abs(saturated), tl.where(k > 0.0, 1.0, tl.where(k < 0.0, -1.0, 0.0)).to(k.dtype)
    elif KIND == "k2":
        value, slope = 0.5 * (saturated * saturated), saturated
    else:
        most = number(numbers, PLAN, "kl_log_clamp").to(k.dtype)
        flows = tl.abs(k) <= most
        _, excess, value = exponential(-limited(saturated, -most, most, PLAN))
        slope = -excess
        if PLAN.value_clamp:
            most_value = number(numbers, PLAN, "kl_value_clamp").to(k.dtype)
            flows = flows & (value <= most_value)
            value = tl.where(value > most_value, most_value, value)
    if PLAN.kl_bound:
        bound = number(numbers, PLAN, "kl_bound").to(k.dtype)
        flows = flows & (tl.abs(value) <= bound)
        value = limited(value, -bound, bound, PLAN)
    if PLAN.kl_swapped:
        slope = -slope
    return value, tl.where(flows, slope, 0.0)


@triton.jit
def penalty_factor(x, weight, numbers: tl.tuple, PLAN: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Compute the factor of a token's KL besides the coefficient, and its derivative."""
    factor, slope = tl.full(x.shape, 1.0, x.dtype), tl.full(x.shape, 0.0, x.dtype)
    if PLAN.kl_weight == "weights":
        if PLAN.weighted:
            factor = weight
    elif PLAN.kl_weight is not None:
        clamp = number(numbers, PLAN, "clamp").to(x.dtype)
        clamped, flows = limited(x, -clamp, clamp, PLAN), tl.abs(x) <= clamp
        factor, _, _ = exponential(clamped)
        slope = tl.where(flows, factor, 0.0)
    return factor, slope

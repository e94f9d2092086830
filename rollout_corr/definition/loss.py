"""The policy loss, in plain torch: values, and by autograd of them the gradient.

Read reference.py and tokens.py first; the same habits hold. Every formula of a token is a small function of tensors.
What does not count is selected away before anything is computed from it, so that no gradient reaches it, whatever
stands there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_corr.definition.sequences import Sequences
from rollout_corr.definition.statistics import Named, outside
from rollout_corr.definition.thresholds import float32_at_least, float32_at_most, log_bound, log_of
from rollout_corr.definition.tokens import (
    LARGEST_D,
    binary_kl,
    extrema,
    k3,
    probability,
    select,
    sum_of_d,
    sum_of_statistic,
)
from rollout_corr.spec.loss import DPPO, DRO, GMPO, GPG, GSPO, KL, PPO, SAPO, Objective, Reinforce, Score, Surrogate

SMALLEST_WEIGHT = 1e-10


# --- one token ---


@dataclass
class Loss:
    """A surrogate's loss per token, and which tokens it clipped."""

    value: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    dual: Tensor | None = None


def ppo(surrogate: PPO, x: Tensor, advantages: Tensor) -> Loss:
    """-min(r A, clip(r) A) is -A times r, cut from above where A > 0 and from below where A < 0."""
    least, most, most_negative = surrogate.ratio_bounds
    down = advantages < 0
    above, far_above, below = over(x, most), over(x, most_negative), under(x, least)
    ratio = torch.where(down & below, least, x.exp())
    ratio = torch.where(down, torch.where(far_above, most_negative, ratio), torch.where(above, most, ratio))
    return Loss(-advantages * ratio, low=down & below, high=(advantages > 0) & above, dual=down & far_above)


def over(x: Tensor, bound: float) -> Tensor:
    """Whether e^x is above a bound, decided in log space, where no exponential has a say. NaN is not."""
    cut = log_of(bound)
    return x > (float32_at_most(cut) if x.dtype == torch.float32 else cut)


def under(x: Tensor, bound: float) -> Tensor:
    """Whether e^x is below a bound."""
    cut = log_of(bound)
    return x < (float32_at_least(cut) if x.dtype == torch.float32 else cut)


def score(surrogate: Score, new: Tensor, x: Tensor, advantages: Tensor, own_ratio: bool) -> Loss:
    """The gradient is the score function's, the ratio a constant; 1 where weights take its place."""
    if not own_ratio:
        return Loss(-advantages * new)
    x = x.detach()
    ratio = x.exp()
    above, below = outside(x, log_bound(surrogate.lower), log_bound(surrogate.upper))
    if surrogate.outside == "clamp":
        if surrogate.lower is not None or surrogate.upper is not None:
            ratio = ratio.clamp(surrogate.lower, surrogate.upper)
    else:
        ratio = torch.where(above | below, 0.0, ratio)
    return Loss(-ratio * advantages * new, low=below, high=above)


def dppo(surrogate: DPPO, new: Tensor, x: Tensor, advantages: Tensor, own_ratio: bool) -> Loss:
    """`x` is not clamped yet: it leads from new to base, whose probability the divergence needs."""
    stopped, d = new.detach(), x.detach()
    p, q = probability(stopped - d), probability(stopped)
    if surrogate.divergence == "tv":
        moved = (q - p).abs()
    else:
        moved = binary_kl(stopped - d, stopped, d, surrogate.eps)
    high = (advantages > 0) & (q > p) & (moved > surrogate.high)
    low = (advantages < 0) & (q < p) & (moved > surrogate.low)
    ratio, dual = torch.ones_like(d), None
    if own_ratio:
        clamped = d.clamp(-surrogate.clamp, surrogate.clamp)
        ratio = clamped.exp()
        if surrogate.upper is not None:
            dual = over(clamped, surrogate.upper)
            ratio = torch.where(dual, surrogate.upper, ratio)
    return Loss(select(~(high | low), -ratio * advantages * new), low=low, high=high, dual=dual)


def sapo(surrogate: SAPO, ratio: Tensor, advantages: Tensor) -> Loss:
    """A gate that closes smoothly: its slope at r = 1 is that of -r A."""
    positive, negative = ratio.new_full((), surrogate.positive), ratio.new_full((), surrogate.negative)
    tau = torch.where(advantages > 0, positive, negative)
    return Loss(-(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages)


def gmpo_log_ratio(surrogate: GMPO, x: Tensor, advantages: Tensor) -> Loss:
    """The clipped log-ratio of a token, whose mean makes the sequence's loss."""
    up, down = advantages > 0, advantages < 0
    high, low = up & (x > surrogate.high), down & (x < -surrogate.low)
    return Loss(
        torch.where(up, x.clamp(max=surrogate.high), torch.where(down, x.clamp(min=-surrogate.low), x)),
        low=low,
        high=high,
    )


def kl(term: KL, k: Tensor) -> Tensor:
    """The penalty of a token; with `gradient` the value of one kind and the gradient of another."""
    value = kl_value(term.kind, term, k)
    if term.gradient is None or term.gradient == term.kind:
        return value
    other = kl_value(term.gradient, term, k)
    return value.detach() + (other - other.detach())


def kl_value(kind: str, term: KL, k: Tensor) -> Tensor:
    """k, |k|, k^2 / 2 or e^-k - 1 + k."""
    k = k.clamp(-LARGEST_D, LARGEST_D)
    if kind == "k1":
        return k
    if kind == "abs":
        return k.abs()
    if kind == "k2":
        return 0.5 * k * k
    k = k.clamp(-term.log_clamp, term.log_clamp)
    # Both the value and its slope 1 - e^-k cancel where k is small, so each is given as it should come out.
    at = k.detach()
    value = k3(-at) - torch.expm1(-at) * (k - at)
    return value if term.value_clamp is None else value.clamp(max=term.value_clamp)


# --- a batch of whole sequences ---


@dataclass
class Operands:
    """What the loss of some whole sequences is made of; [N] or [B, T] in the dtype that computes.

    A mask of None says that all tokens count.
    """

    sequences: Sequences
    n_valid: Tensor  # [S] int64
    new: Tensor
    base: Tensor | None  # None: new itself, detached
    advantages: Tensor
    weights: Tensor | None
    ref: Tensor | None
    valid: Tensor | None
    trains: Tensor | None


def both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The intersection of two masks."""
    if one is None or other is None:
        return one if other is None else other
    return one & other


def finite(given: Operands, objective: Objective) -> Tensor:
    """Bool per token: all that the loss needs of it is finite."""
    new = given.new.detach()
    found = new.isfinite() if given.base is None else (new - given.base).isfinite()
    if objective.nonfinite == "neutral" and given.base is not None:
        found = found | new.isfinite()
    found = found & given.advantages.isfinite()
    if given.weights is not None:
        found = found & given.weights.isfinite()
    return found if given.ref is None else found & (new - given.ref).isfinite()


def log_ratio(given: Operands, new: Tensor, among: Tensor | None, objective: Objective) -> Tensor:
    """x per token, 0 where it does not count."""
    if given.base is None:
        return new - new.detach()
    base = given.base
    if objective.nonfinite == "neutral":
        base = torch.where((new.detach() - base).isfinite(), base, new.detach())
    return new - select(among, base)


def mean_of_d(x: Tensor, sequences: Sequences, n: Tensor, propagate: bool) -> Tensor:
    """The mean per sequence of selected log-ratios, at each token: exact sums, with the gradient of plain ones."""
    saturated = x.clamp(-LARGEST_D, LARGEST_D)
    total = sum_of_d(saturated.detach(), sequences, propagate, x.detach())
    if x.requires_grad:
        total = sequences.with_gradient(total, saturated)
    return at_each_token(total, x, sequences, n)


def at_each_token(total: Tensor, like: Tensor, sequences: Sequences, n: Tensor) -> Tensor:
    """Sums per sequence as means at its tokens."""
    return sequences.spread((total / n.clamp(min=1)).to(like.dtype)).expand(like.shape)


def surrogate_loss(
    objective: Objective, new: Tensor, x: Tensor, advantages: Tensor, sequences: Sequences, n: Tensor
) -> tuple[Loss, Tensor]:
    """The loss per token before weights, and the log-ratio that it used. All arguments are 0 where nothing counts."""
    surrogate, own_ratio = objective.surrogate, not objective.weights_are_the_ratio
    propagate = objective.nonfinite == "propagate"
    if isinstance(surrogate, GSPO):
        through_sequence = surrogate.through == "sequence"
        mean = mean_of_d(x if through_sequence else x.detach(), sequences, n, propagate)
        step = select(x.isfinite(), x)
        x = mean if through_sequence else mean + (step - step.detach())
    clamped = x.clamp(-surrogate.clamp, surrogate.clamp)
    if isinstance(surrogate, PPO):
        return ppo(surrogate, clamped, advantages), clamped
    if isinstance(surrogate, Reinforce):
        return Loss(-clamped.exp() * advantages), clamped
    if isinstance(surrogate, Score):
        return score(surrogate, new, clamped, advantages, own_ratio), clamped
    if isinstance(surrogate, DPPO):
        return dppo(surrogate, new, x, advantages, own_ratio), clamped
    if isinstance(surrogate, SAPO):
        return sapo(surrogate, clamped.exp(), advantages), clamped
    if isinstance(surrogate, GMPO):
        loss = gmpo_log_ratio(surrogate, clamped, advantages)
        advantage = at_each_token(sum_of_statistic(advantages, sequences, propagate), x, sequences, n)
        loss.value = -advantage * mean_of_d(loss.value, sequences, n, propagate).exp()
        return loss, clamped
    if isinstance(surrogate, DRO):
        square = x.clamp(-LARGEST_D, LARGEST_D).square()
        return Loss(-(advantages * new - 0.5 * surrogate.beta * square)), clamped
    assert isinstance(surrogate, GPG), surrogate
    return Loss(-advantages * new), clamped


def evaluate(given: Operands, objective: Objective, look: bool = False) -> tuple[Tensor, Named, Named]:
    """The loss summed over some whole sequences, before it is divided, and its statistics.

    Args:
        given: The sequences.
        objective: What to compute.
        look: Leave out selections that select everything. Reads a value, so CPU tensors only.

    Returns:
        The sum, 0-d float64, with a graph to `given.new`; sums and maxima of the statistics.
    """
    sequences = given.sequences
    known: Tensor | None = finite(given, objective)
    trains = given.trains
    if look:
        known, trains = (None if x is None or bool(x.all()) else x for x in (known, trains))
    everywhere = given.valid if objective.nonfinite == "propagate" else both(given.valid, known)
    counted = both(everywhere, trains)
    n = given.n_valid if counted is None else sequences.sum_integers(counted)
    new = select(everywhere, given.new)
    x = log_ratio(given, new, everywhere, objective)
    advantages = select(counted, given.advantages)
    weights = None if given.weights is None else select(everywhere, given.weights)

    loss, used = surrogate_loss(objective, select(counted, new), select(counted, x), advantages, sequences, n)
    policy = loss.value
    if weights is not None:
        policy = policy * effective(weights, counted, objective, sequences, n)
    policy = total = select(counted, policy)
    more: Named = {}
    if objective.kl is not None and given.ref is not None:
        among = everywhere if objective.kl.scope == "all" else counted
        penalty = kl(objective.kl, new - select(everywhere, given.ref))
        more["ref_kl"] = select(among, penalty.detach()).sum(dtype=torch.float64)
        factor = kl_factor(objective.kl, x, weights, objective.surrogate)
        total = total + select(among, objective.kl.coef * penalty * factor)
    if objective.regulariser is not None:
        among = everywhere if objective.regulariser.scope == "all" else counted
        square = x.clamp(-LARGEST_D, LARGEST_D).square()
        more["log_ratio2"] = select(among, square.detach()).sum(dtype=torch.float64)
        total = total + select(among, objective.regulariser.coef * square)
    if objective.reduction == "sequence_mean_token_mean":
        inner = (n if objective.denominator == "kept" else given.n_valid).clamp(min=1).double()
        total = total * sequences.spread((1.0 / inner).to(total.dtype))
    sums, maxima = statistics(given, known, counted, n, policy, loss, x, used)
    return total.sum(dtype=torch.float64), {**sums, **more}, maxima


def effective(weights: Tensor, counted: Tensor | None, objective: Objective, sequences: Sequences, n: Tensor) -> Tensor:
    """What multiplies a token's loss: its weight, or for GMPO the geometric mean of its sequence's."""
    if not isinstance(objective.surrogate, GMPO):
        return weights
    log_weights = select(counted, weights.clamp(min=SMALLEST_WEIGHT).log())
    return mean_of_d(log_weights, sequences, n, objective.nonfinite == "propagate").exp()


def kl_factor(term: KL, x: Tensor, weights: Tensor | None, surrogate: Surrogate) -> Tensor | float:
    """What multiplies a token's KL besides the coefficient."""
    if term.weight is None:
        return 1.0
    if term.weight == "weights":
        return 1.0 if weights is None else weights
    x = x.clamp(-surrogate.clamp, surrogate.clamp)
    ratio = x.exp()
    if term.weight_upper is not None:
        ratio = torch.where(over(x, term.weight_upper), term.weight_upper, ratio)
    return ratio if term.weight == "ratio" else ratio.detach()


def statistics(
    given: Operands,
    known: Tensor | None,
    counted: Tensor | None,
    n: Tensor,
    policy: Tensor,
    loss: Loss,
    x: Tensor,
    used: Tensor,
) -> tuple[Named, Named]:
    """Sums and maxima over the tokens that train; `used` is the log-ratio at the surrogate's own level."""
    x, used = select(counted, x.detach()), select(counted, used.detach())
    beyond = k3(used)
    excess = beyond + used
    valid, broken = given.n_valid.sum(), None if known is None else both(given.valid, ~known)

    def count(which: Tensor | None, among: Tensor | None = None) -> Tensor:
        which = both(which, among) if which is not None else None
        return torch.zeros_like(valid) if which is None else torch.count_nonzero(which)

    sums: Named = {
        "loss_valid_tokens": valid,
        "loss_valid_sequences": torch.count_nonzero(given.n_valid),
        "loss_tokens": n.sum(),
        "loss_sequences": torch.count_nonzero(n),
        "loss_tokens_nonfinite": count(broken),
        "loss_policy": policy.detach().sum(dtype=torch.float64),
        "clip_low": count(loss.low, counted),
        "clip_high": count(loss.high, counted),
        "clip_dual": count(loss.dual, counted),
        "ppo_d": x.clamp(-LARGEST_D, LARGEST_D).sum(dtype=torch.float64),
        "ppo_ratio": excess.sum(dtype=torch.float64),
        "ppo_ratio2": excess.square().sum(dtype=torch.float64),
        "ppo_k3": beyond.sum(dtype=torch.float64),
    }
    low, high = extrema(used, counted)
    return sums, {"max_ppo_log_ratio": high, "-min_ppo_log_ratio": low}


def divisor(sums: Named, objective: Objective) -> Tensor:
    """What the sum is divided by: 0-d float64, from the statistics of the whole batch."""
    if objective.reduction == "sum":
        return torch.ones_like(sums["loss_policy"])
    unit = "tokens" if objective.reduction == "token_mean" else "sequences"
    return sums[f"loss_{unit}" if objective.denominator == "kept" else f"loss_valid_{unit}"].double()

"""PPO's loss of a block with its gradient, in half of the operations of definition/loss.py and autograd.

It has the definition's bits: the same products in the same order. What decides is compared in log space, into floats,
which a CPU does in a quarter of the time of bools, and products select, in a tenth of the time of `where`. So it is for
CPU tensors of which all is finite, and for PPO alone, which most losses are, with ClipCov, which is PPO but for a few
tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from rollout_corr.backends.cpu_sums import SMALL, CpuPacked, ExactSums, k3_within
from rollout_corr.definition.bounds import limits
from rollout_corr.definition.loss import Operands
from rollout_corr.definition.tokens import LARGEST_D, Number
from rollout_corr.spec.loss import Objective
from rollout_corr.spec.ratio_losses import PPO
from rollout_corr.spec.surrogate import Surrogate
from rollout_corr.spec.thresholds import log_of

if TYPE_CHECKING:
    from rollout_corr.spec.batch_losses import KLCov

# Tokens up to which float32 adds ones up exactly; and a number beyond every log-ratio.
MOST, FAR = 2**24, 1e30

Sums = dict[str, Number]

NO_CLIPS: Sums = {"clip_low": 0.0, "clip_high": 0.0, "clip_dual": 0.0}

# The sum over tokens, 0-d float64, its gradient, and the sums and maxima of the statistics.
Found = tuple[Tensor, Tensor | None, Sums, Sums]


def _of_ppo(surrogate: Surrogate) -> TypeGuard[PPO | KLCov]:
    """Tell whether this file computes a surrogate."""
    if type(surrogate) is PPO:
        return True
    if not surrogate.traits.chooses_tokens:
        return False
    # Rare, so that the package's import leaves it out.
    from rollout_corr.spec.batch_losses import ClipCov, KLCov

    return type(surrogate) in (ClipCov, KLCov)


def run(given: Operands, objective: Objective, differentiable: bool) -> Found | None:
    """Compute what `loss.evaluate` and autograd do of a block; None where something is not for it.

    Args:
        given: The block, of which compaction has chosen the tokens.
        objective: Everything that is fixed about the loss.
        differentiable: Compute the gradient too.
    """
    surrogate, base = objective.surrogate, given.base
    if not _of_ppo(surrogate):
        return None
    if surrogate.coef != 1.0 or base is None or not 0 < given.new.numel() <= MOST:
        return None
    if objective.kl or objective.regulariser or objective.weights_are_the_ratio:
        return None
    if given.mass is not None or given.scales is not None:
        return None
    x, advantages, weights = given.new.detach() - base, given.advantages, given.weights
    low, high = (end.item() for end in torch.aminmax(x))
    largest = max(-low, high)
    # A NaN fails every comparison.
    if not largest <= min(surrogate.clamp, LARGEST_D):
        return None
    n = given.n_valid
    # Compaction has left valid tokens alone.
    trained = valid = float(x.shape[0]), float(torch.count_nonzero(n).item())
    if given.trains is not None:
        ones = given.trains.to(x.dtype)
        n = given.sequences.sum_integers(given.trains)
        trained = n.sum().item(), torch.count_nonzero(n).item()
        x.mul_(ones)
        low, high = _ends(x, ones) if trained[0] else (math.inf, -math.inf)
        advantages = advantages * ones
    chosen = None if given.decided is None or type(surrogate) is PPO else given.decided.tokens[0].to(x.dtype)
    counts, kept, bound = NO_CLIPS, None, None
    if isinstance(surrogate, PPO):
        counts, kept, bound = _clipped(surrogate, x, advantages, low, high)
    ratio, negated = x.exp(), -advantages
    policy = negated * (ratio if kept is None or bound is None else torch.addcmul(bound, ratio, kept))
    left = penalised = None
    if chosen is not None and not isinstance(surrogate, PPO):
        penalised = chosen.mul_(surrogate.penalty)
        policy.add_(penalised * x.abs())
    elif chosen is not None:
        left = chosen.neg_().add_(1.0)
        policy.mul_(left)
    if weights is not None:
        policy.mul_(weights)
    of_policy = policy.sum(dtype=torch.float64)
    total, factor, read = of_policy, weights, of_policy.item()
    # No ratio is 0 or infinite, so NaN or infinity in an advantage or a weight is seen here.
    if not math.isfinite(read):
        return None
    if objective.reduced.averages:
        inner = (n if objective.denominator == "kept" else given.n_valid).clamp(min=1).double()
        averaging = given.sequences.spread((1.0 / inner).to(x.dtype))
        total = (policy * averaging).sum(dtype=torch.float64)
        factor = averaging if weights is None else averaging * weights
    slope = None
    if differentiable:
        slope = (negated if factor is None else negated.mul_(factor)).mul_(ratio)
        slope = slope if kept is None else slope.mul_(kept)
        slope = slope if left is None else slope.mul_(left)
        if penalised is not None:
            penalised.mul_(x.sign())
            slope.add_(penalised if factor is None else penalised.mul_(factor))
    sums: Sums = {
        "loss_valid_tokens": valid[0],
        "loss_valid_sequences": valid[1],
        "loss_tokens": trained[0],
        "loss_sequences": trained[1],
        "loss_tokens_nonfinite": 0.0,
        "loss_policy": read,
        **counts,
        **_of_ratios(x, given, largest),
    }
    return total, slope, sums, {"max_ppo_log_ratio": high, "-min_ppo_log_ratio": -low}


def _ends(x: Tensor, ones: Tensor) -> tuple[float, float]:
    """The least and the largest x, [N], where `ones` is 1; elsewhere both are 0."""
    low, high = (end.item() for end in torch.aminmax(x))
    # An end beyond 0 is that of a token that trains.
    if low >= 0.0:
        low = x.add(1.0 - ones, alpha=FAR).amin().item()
    if high <= 0.0:
        high = x.sub(1.0 - ones, alpha=FAR).amax().item()
    return low, high


def _clipped(
    surrogate: PPO, x: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Sums, Tensor | None, Tensor | None]:
    """Count the clipped tokens, and select them.

    Args:
        surrogate: Its bounds are read.
        x: [N], log-ratios.
        advantages: [N].
        low: The least x of tokens that train.
        high: The largest.

    Returns:
        The counts; [N], 0 at clipped tokens and 1 elsewhere; [N], the bound at clipped tokens and 0 elsewhere. None for
        both where no token is clipped.
    """
    least, most, furthest = surrogate.ratio_bounds
    lower, upper = limits(x.dtype, log_of(least), log_of(most))
    _, far = limits(x.dtype, None, log_of(furthest))
    counts = dict(NO_CLIPS)
    kept = bounds = None
    for name, compare, end, cut, where, bound in (
        ("clip_low", torch.lt, low, lower, torch.lt, least),
        ("clip_high", torch.gt, high, upper, torch.gt, most),
        ("clip_dual", torch.gt, high, far, torch.lt, furthest),
    ):
        # The ends tell where no token is beyond, which on the far side is the rule.
        if not isinstance(cut, float) or not (end < cut if compare is torch.lt else end > cut):
            continue
        which = compare(x, cut, out=torch.empty_like(x)).mul_(where(advantages, 0.0, out=torch.empty_like(x)))
        counts[name] = which.sum().item()
        if counts[name]:
            bounds = which * bound if bounds is None else bounds.add_(which, alpha=bound)
            kept = which.neg_().add_(1.0) if kept is None else kept.sub_(which)
    return counts, kept, bounds


def _of_ratios(x: Tensor, given: Operands, largest: float) -> Sums:
    """The sums of log-ratios and ratios of the tokens that train, 0 elsewhere."""
    if isinstance(given.sequences, CpuPacked) and x.shape[0] <= SMALL:
        each = ExactSums(x, given.sequences, largest, largest)
        return {
            "ppo_d": each.sum,
            "ppo_ratio": each.excess(given.n_valid),
            "ppo_ratio2": each.excess2,
            "ppo_k3": each.k3,
        }
    k3 = k3_within(x, largest)
    ratio = k3 + x
    parts = {"ppo_d": x, "ppo_ratio": ratio, "ppo_ratio2": ratio.square(), "ppo_k3": k3}
    return {name: part.sum(dtype=torch.float64).item() for name, part in parts.items()}

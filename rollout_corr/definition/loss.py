"""The policy loss in plain torch: its value, and by autograd of that its gradient.

Read correction.py and tokens.py first; their conventions hold here too. The formula of a surrogate is in its class in
specs/surrogates.py, which reads its tokens through `TokensThatTrain`. Tokens that do not count are replaced before
anything is computed from them, so that no gradient reaches them, whatever they hold.

A surrogate that gives the slope of its ratio needs no graph where nothing else has a gradient: `has_slope`. A backend
that may read values says so, and hands in how it clips and adds up (backends/loss_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..specs.statistics import float32_at_least, float32_at_most, log_bound, log_of
from ..specs.surrogate import Decided, Surrogate, TokenLoss
from ..specs.terms import KL, KLKind, Objective
from . import tokens as formulas
from .bounds import outside
from .sequences import Sequences
from .tokens import LARGEST_D, KeptMass, Number, extrema, k3, select, sum_of_d, sum_of_statistic


class OfBackend(NamedTuple):
    """How a backend that may read values, and keeps valid tokens alone, does a part of what `TokensThatTrain` does."""

    ends: Callable[[Tensor], tuple[float, float] | None]  # (-minimum, maximum); None of no token
    counts: Callable[[Tensor, int | None], tuple[float, float]]  # `TokensThatTrain.counts`; the tokens, where known
    # `TokensThatTrain.clip` and `sums_of_ratios`; None where the definition has to do it.
    clip: Callable[[TokensThatTrain, float, float, float], TokenLoss | None]
    ratios: Callable[[TokensThatTrain, Tensor], dict[str, Number] | None]


@dataclass(eq=False, repr=False)
class Operands:
    """Tensors of some whole sequences, [N] or [B, T] in the dtype that computes; a mask of None is True everywhere."""

    sequences: Sequences
    n_valid: Tensor  # [S] int64
    new: Tensor
    base: Tensor | None  # None: new itself, detached
    advantages: Tensor
    weights: Tensor | None
    ref: Tensor | None
    valid: Tensor | None
    trains: Tensor | None
    mass: KeptMass | None = None  # between new and base, where base is the rollout's
    turns: Sequences | None = None  # for a surrogate of turns
    scales: Tensor | None = None  # factors of all that a token adds to the loss
    decided: Decided | None = None  # for a surrogate that sees the whole batch
    all_finite: bool = False  # of every token all that the loss needs is known to be finite
    by_slope: bool = False  # the gradient is wanted without a graph, where `has_slope` allows that
    of_backend: OfBackend | None = None

    def compared(self, new: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        """Both log-probs as the ratio compares them: over the set that truncated sampling kept."""
        return (new, base) if self.mass is None else self.mass.taken_from(new, base)


# --- one token ---


def over(x: Tensor, bound: float) -> Tensor:
    """Bool per token: e^x is above a bound, decided in log space, where rounding of exp cannot matter. NaN is not."""
    cut = log_of(bound)
    return x > (float32_at_most(cut) if x.dtype == torch.float32 else cut)


def under(x: Tensor, bound: float) -> Tensor:
    """Bool per token: e^x is below a bound, decided in log space. NaN is not."""
    cut = log_of(bound)
    return x < (float32_at_least(cut) if x.dtype == torch.float32 else cut)


def saturated(x: Tensor) -> Tensor:
    """Log-ratios clamped to +-1024, as they enter sums and squares."""
    return x.clamp(-LARGEST_D, LARGEST_D)


def kl(term: KL, k: Tensor) -> Tensor:
    """The penalty of a token; with `gradient` it has the value of one kind and the gradient of another."""
    k = saturated(-k if term.swapped else k)
    value = kl_value(term, term.kind, k)
    if term.gradient is None or term.gradient == term.kind:
        return value
    other = kl_value(term, term.gradient, k)
    return value.detach() + (other - other.detach())


def kl_value(term: KL, kind: KLKind, k: Tensor) -> Tensor:
    """The penalty of one kind within the term's bound."""
    value = KL_VALUES[kind](term, k)
    return value if term.bound is None else value.clamp(-term.bound, term.bound)


def kl_k3(term: KL, k: Tensor) -> Tensor:
    """e^-k - 1 + k within the term's clamps."""
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


# --- some sequences ---


def both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The tokens of both masks; None is all."""
    if one is None or other is None:
        return one if other is None else other
    return one & other


def finite(given: Operands, objective: Objective) -> Tensor:
    """Bool per token: everything that the loss needs of it is finite."""
    new = given.new.detach()
    found = new.isfinite() if given.base is None else gap(given, new, given.base).isfinite()
    if objective.nonfinite == "neutral" and given.base is not None:
        found = found | new.isfinite()
    found = found & given.advantages.isfinite()
    for factor in (given.weights, given.scales):
        if factor is not None:
            found = found & factor.isfinite()
    return found if given.ref is None else found & (new - given.ref).isfinite()


def gap(given: Operands, new: Tensor, base: Tensor) -> Tensor:
    """The log-ratio of every token, whatever it holds."""
    one, other = given.compared(new, base)
    return one - other


def log_ratio(given: Operands, new: Tensor, among: Tensor | None, objective: Objective) -> tuple[Tensor, Tensor]:
    """x per token, and new_logp as the ratio reads it; both are 0 at tokens not in `among`, if that is given."""
    if given.base is None:
        return new - new.detach(), new
    base, mass = given.base, given.mass
    if objective.nonfinite == "neutral":
        known = gap(given, new.detach(), base).isfinite()
        base = torch.where(known, base, new.detach())
        mass = None if mass is None else mass.each(lambda log: torch.where(known, log, 0.0))
    base = select(among, base)
    if mass is not None:
        new, base = mass.each(lambda log: select(among, log)).taken_from(new, base)
    return new - base, new


def mean_of_d(x: Tensor, sequences: Sequences, n: Tensor, propagate: bool) -> Tensor:
    """Average selected log-ratios per sequence, at each of its tokens: exact sums, with the gradient of plain ones."""
    limited = saturated(x)
    total = sum_of_d(limited.detach(), sequences, propagate, x.detach())
    if x.requires_grad:
        total = sequences.with_gradient(total, limited)
    return at_each_token(total, x, sequences, n)


def at_each_token(total: Tensor, like: Tensor, sequences: Sequences, n: Tensor) -> Tensor:
    """Divide sums per sequence into means, at each of its tokens."""
    return sequences.spread((total / n.clamp(min=1)).to(like.dtype)).expand(like.shape)


# The statistics of log-ratios.
RATIOS = "ppo_d", "ppo_ratio", "ppo_ratio2", "ppo_k3"


class TokensThatTrain:
    """The trained tokens, 0 elsewhere, as a surrogate reads them: `LossTokens` of specs/surrogate.py."""

    def __init__(
        self,
        given: Operands,
        objective: Objective,
        new: Tensor,
        compared: Tensor,
        x: Tensor,
        weights: Tensor | None,
        counted: Tensor | None,
        n: Tensor,
    ) -> None:
        self.counted, self._units, self._n, self._valid = counted, given.sequences, n, given.n_valid
        self.multiplies, self.by_slope, self._backend = given.all_finite, given.by_slope, given.of_backend
        self._ones: Tensor | None = None
        self.ends: tuple[float, float] | None = None  # (-minimum, maximum) of `clamped`, where they were read
        self.new, self.x, self.advantages = self.chosen(new), self.chosen(x), self.chosen(given.advantages)
        self.compared = self.new if compared is new else self.chosen(compared)
        self.weights = None if weights is None else self.chosen(weights)
        self.own_ratio = not objective.weights_are_the_ratio
        self._propagate = objective.nonfinite == "propagate"
        surrogate = objective.surrogate
        if surrogate.mean_unit == "turn" and given.turns is not None:
            trained = torch.ones_like(x, dtype=torch.bool) if counted is None else counted
            self._units, self._n = given.turns, given.turns.sum_integers(trained)
        if given.decided is not None:
            self.decided = given.decided
        self.clamped = self.limited(surrogate.log_ratio(self), surrogate.clamp)

    decided = Decided((), {})
    over = staticmethod(over)
    under = staticmethod(under)
    saturated = staticmethod(saturated)
    probability = staticmethod(formulas.probability)
    binary_kl = staticmethod(formulas.binary_kl)

    def outside(self, x: Tensor, lower: float | None, upper: float | None) -> tuple[Tensor, Tensor]:
        return outside(x, log_bound(lower), log_bound(upper))

    def mean(self, x: Tensor) -> Tensor:
        return mean_of_d(x, self._units, self._n, self._propagate)

    def total(self, x: Tensor) -> Tensor:
        found = sum_of_d(saturated(x), self._units, self._propagate, x)
        return self._units.spread(found.to(x.dtype)).expand(x.shape)

    def mean_advantage(self) -> Tensor:
        total = sum_of_statistic(self.advantages, self._units, self._propagate)
        return at_each_token(total, self.x, self._units, self._n)

    def trained(self, x: Tensor) -> Tensor:
        return select(self.counted, x)

    def chosen(self, x: Tensor) -> Tensor:
        """Values of trained tokens, 0 elsewhere."""
        if self.counted is None or not self.multiplies:
            return select(self.counted, x)
        # Where all are finite: on a CPU five times as fast as `where`, forward and backward.
        self._ones = self.counted.to(x.dtype) if self._ones is None else self._ones
        return x * self._ones

    def clip(self, least: float, most: float, furthest: float) -> TokenLoss | None:
        return None if self._backend is None else self._backend.clip(self, least, most, furthest)

    def limited(self, x: Tensor, clamp: float) -> Tensor:
        """The log-ratio that is `clamped`: as it is where none is known to lie beyond."""
        ends = None if self._backend is None else self._backend.ends(x)
        if ends is not None and max(ends) <= clamp:
            self.ends = ends
            return x
        return x.clamp(-clamp, clamp)

    def counts(self, n: Tensor) -> tuple[Number, Number]:
        """The tokens and the sequences of n tokens each, [S] int64."""
        if self._backend is not None:
            return self._backend.counts(n, self.x.shape[0] if n is self._valid else None)
        return n.sum(), torch.count_nonzero(n)

    def number(self, which: Tensor | None) -> Number:
        """The trained tokens that are True, or 1 in floats of a backend's `clip`; None: no token is."""
        if which is None:
            return self._n.new_zeros(()) if self._backend is None else 0.0
        if which.dtype != torch.bool:
            return which.sum(dtype=torch.float64)
        return torch.count_nonzero(which if self.counted is None else which & self.counted)

    def sums_of_ratios(self, used: Tensor) -> dict[str, Number]:
        """The sums of x, r - 1, its square and k3; r from `clamped`, 0 at tokens that do not train."""
        found = None if self._backend is None else self._backend.ratios(self, used)
        return self.sums_by_k3(used, k3(used)) if found is None else found

    def sums_by_k3(self, used: Tensor, of_tokens: Tensor) -> dict[str, Number]:
        """The sums of x, r - 1, its square and k3, from k3 per token."""
        excess = of_tokens + used
        parts = self.saturated(self.x.detach()), excess, excess.square(), of_tokens
        return dict(zip(RATIOS, [part.sum(dtype=torch.float64) for part in parts], strict=True))

    def extrema(self, used: Tensor) -> tuple[Number, Number]:
        """(-minimum, maximum) of `clamped` over the trained tokens."""
        # A 0 at a token that does not train may be an end, and with a sequence's mean the mean itself.
        return extrema(used, self.counted) if self.ends is None or self.counted is not None else self.ends


class Read(NamedTuple):
    """The tokens of some whole sequences, read. A mask of None is True everywhere."""

    known: Tensor | None  # bool per token: all that the loss needs of it is finite
    everywhere: Tensor | None  # bool per token: it is valid, and known or passed on
    counted: Tensor | None  # bool per token: it trains too
    n: Tensor  # [S] int64, the trained tokens
    new: Tensor  # as of `everywhere`, 0 elsewhere; so are x and weights
    x: Tensor
    weights: Tensor | None
    tokens: TokensThatTrain  # those that train, as a surrogate reads them


def read(given: Operands, objective: Objective) -> Read:
    """Read the tokens of some whole sequences."""
    known = None if given.all_finite else finite(given, objective)
    everywhere = given.valid if objective.nonfinite == "propagate" else both(given.valid, known)
    counted = both(everywhere, given.trains)
    n = given.n_valid if counted is None else given.sequences.sum_integers(counted)
    new = select(everywhere, given.new)
    x, compared = log_ratio(given, new, everywhere, objective)
    weights = None if given.weights is None else select(everywhere, given.weights)
    tokens = TokensThatTrain(given, objective, new, compared, x, weights, counted, n)
    return Read(known, everywhere, counted, n, new, x, weights, tokens)


class Evaluated(NamedTuple):
    """The loss of some whole sequences."""

    total: Tensor  # the sum over tokens, 0-d float64, with a graph to `given.new`
    gradient: Tensor | None  # its derivative by `given.new`, where that needs no graph; else None
    sums: dict[str, Number]
    maxima: dict[str, Number]


def evaluate(given: Operands, objective: Objective) -> Evaluated:
    """Sum the loss over some whole sequences, before it is divided, and collect its statistics."""
    known, everywhere, counted, n, new, x, weights, tokens = read(given, objective)
    sequences, chosen = given.sequences, tokens.chosen
    loss = objective.surrogate.loss(tokens)
    policy = loss.value if objective.surrogate.coef == 1.0 else objective.surrogate.coef * loss.value
    if weights is not None:
        policy = policy * objective.surrogate.factor(tokens, weights)
    policy = total = chosen(policy)
    more: dict[str, Number] = {}
    if objective.kl is not None and given.ref is not None:
        among = everywhere if objective.kl.scope == "all" else counted
        penalty = kl(objective.kl, new - select(everywhere, given.ref))
        more["ref_kl"] = select(among, penalty.detach()).sum(dtype=torch.float64)
        factor = kl_factor(objective.kl, x, weights, objective.surrogate)
        total = total + select(among, objective.kl.coef * penalty * factor)
    if objective.regularizer is not None:
        among = everywhere if objective.regularizer.scope == "all" else counted
        square = saturated(x).square()
        more["log_ratio2"] = select(among, square.detach()).sum(dtype=torch.float64)
        total = total + select(among, objective.regularizer.coef * square)
    if given.scales is not None:
        scales = select(everywhere, given.scales)
        if objective.nonfinite == "propagate":
            # Times infinity the gradient of a clipped token, which is 0, would be NaN, or 0, as it is computed.
            scales = select(scales.isfinite(), scales)
        total = total * scales
    averaging = None
    if objective.mean.averages:
        inner = (n if objective.mean.over == "kept" else given.n_valid).clamp(min=1).double()
        averaging = sequences.spread((1.0 / inner).to(total.dtype))
        total = total * averaging
    used = chosen(tokens.clamped.detach())
    summed = policy.sum(dtype=torch.float64)
    sums, maxima = statistics(given, known, n, summed.detach(), loss, tokens, used)
    gradient = None
    if given.by_slope and loss.slope is not None and tokens.clamped is tokens.x:
        # In the order of the products that autograd would take.
        factors = [x for x in (averaging, weights) if x is not None]
        gradient, of_ratio = loss.slope
        if factors:
            gradient.mul_(factors[0] * factors[1] if factors[1:] else factors[0])
        gradient.mul_(of_ratio)
    summed = summed if total is policy else total.sum(dtype=torch.float64)
    return Evaluated(summed, gradient, {**sums, **more}, maxima)


def has_slope(given: Operands, objective: Objective) -> bool:
    """True if a token's loss is the surrogate's of its own x, times its weight and 1 / the tokens of its sequence."""
    if objective.kl is not None or objective.regularizer is not None or objective.weights_are_the_ratio:
        return False
    if given.base is None or given.mass is not None or given.scales is not None:
        return False
    return objective.surrogate.traits.slope and objective.surrogate.coef == 1.0


def kl_factor(term: KL, x: Tensor, weights: Tensor | None, surrogate: Surrogate) -> Tensor | float:
    """The factor of a token's KL, without its coefficient."""
    if term.weight is None:
        return 1.0
    if term.weight == "weights":
        return 1.0 if weights is None else weights
    return x.clamp(-surrogate.clamp, surrogate.clamp).exp()


def statistics(
    given: Operands,
    known: Tensor | None,
    n: Tensor,
    policy: Tensor,
    loss: TokenLoss,
    tokens: TokensThatTrain,
    used: Tensor,
) -> tuple[dict[str, Number], dict[str, Number]]:
    """Sums and maxima over the trained tokens.

    Args:
        given: The sequences.
        known: Bool per token: all that the loss needs of it is finite.
        n: [S] int64, how many do.
        policy: The sum of the policy loss, 0-d.
        loss: The surrogate's loss per token.
        tokens: The trained tokens.
        used: The log-ratio at the surrogate's own level, 0 where a token does not train.
    """
    low, high = tokens.extrema(used)
    broken = None if known is None else both(given.valid, ~known)
    valid, valid_sequences = tokens.counts(given.n_valid)
    trained, trained_sequences = (valid, valid_sequences) if n is given.n_valid else tokens.counts(n)

    sums: dict[str, Number] = {
        "loss_valid_tokens": valid,
        "loss_valid_sequences": valid_sequences,
        "loss_tokens": trained,
        "loss_sequences": trained_sequences,
        "loss_tokens_nonfinite": tokens.number(None) if broken is None else torch.count_nonzero(broken),
        "loss_policy": policy,
        "clip_low": tokens.number(loss.low),
        "clip_high": tokens.number(loss.high),
        "clip_dual": tokens.number(loss.dual),
        **tokens.sums_of_ratios(used),
    }
    return sums, {"max_ppo_log_ratio": high, "-min_ppo_log_ratio": low}


def counted_by(objective: Objective) -> str | None:
    """The name of the sum that divides the loss; None: nothing does."""
    unit = objective.mean.unit
    if unit is None:
        return None
    return f"loss_{unit}" if objective.mean.over == "kept" else f"loss_valid_{unit}"


def divisor(sums: dict[str, Tensor], objective: Objective) -> Tensor:
    """The number that the sum is divided by: 0-d float64, from the statistics of the whole batch."""
    name = counted_by(objective)
    return torch.ones_like(sums["loss_policy"]) if name is None else sums[name].double()

"""The other terms of a policy loss than its surrogate, its reductions, and all of it as one frozen type."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from rollout_corr.specs.checked import Checked
from rollout_corr.specs.surrogate import Surrogate, checked_surrogate
from rollout_corr.specs.validate import LARGEST_CLAMP, choice, number, positive, shown

KLKind = Literal["k1", "k2", "k3", "abs"]
KLWeight = Literal["ratio", "stopped_ratio", "weights"]
Scope = Literal["kept", "all"]
LossReduction = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_norm", "sum"]
Counted = Literal["original", "kept"]
Denominator = Literal["original", "kept", "rows"]

KL_KINDS: tuple[str, ...] = get_args(KLKind)
KL_WEIGHTS: tuple[str, ...] = get_args(KLWeight)
SCOPES: tuple[str, ...] = get_args(Scope)
LOSS_REDUCTIONS: tuple[str, ...] = get_args(LossReduction)
COUNTED: tuple[str, ...] = get_args(Counted)
DENOMINATORS: tuple[str, ...] = get_args(Denominator)
# A length divides only the policy loss.
KL_REDUCTIONS: tuple[str, ...] = tuple(name for name in LOSS_REDUCTIONS if name != "token_sum_norm")


class Reduction(NamedTuple):
    """The steps from the losses of tokens to one number.

    Attributes:
        unit: The units whose number divides the sum: "tokens" or "sequences"; None: the sum is not divided.
        averages: Each sequence's sum is divided by its own number of tokens first.
        by_length: The sum is divided by `max_length` too.
    """

    unit: Literal["tokens", "sequences"] | None
    averages: bool = False
    by_length: bool = False


_REDUCTIONS: dict[str, Reduction] = {
    "token_mean": Reduction("tokens"),
    "sequence_mean_token_mean": Reduction("sequences", averages=True),
    "sequence_mean_token_sum": Reduction("sequences"),
    "token_sum_norm": Reduction("sequences", by_length=True),
    "sum": Reduction(None),
}


def reduction_of(name: str) -> Reduction:
    """Look a reduction up by its name, which is checked."""
    choice("reduction", name, LOSS_REDUCTIONS)
    return _REDUCTIONS[name]


@dataclass(frozen=True, repr=False)
class KL(Checked):
    """A penalty for leaving a reference policy, from k = new_logp - ref_logp per token.

    Args:
        kind: Its value: "k1" k, "abs" |k|, "k2" k^2 / 2, "k3" e^-k - 1 + k. k is saturated at +-1024.
        coef: Factor of the term.
        gradient: The kind whose gradient it has, if not its own (straight-through). The mean of k3 is the KL, but its
            gradient is not the KL's; that of k2 is.
        log_clamp: k is clamped to +-log_clamp in k3.
        value_clamp: k3 is at most this (frameworks take 10), or None. No gradient flows beyond.
        weight: A further factor: None, "ratio" the differentiable r (unbiased for samples of base), "stopped_ratio" r
            without its gradient, "weights" the factor of the surrogate.
        weight_upper: Upper bound of that ratio, or None.
        scope: The tokens that it is summed over: "kept" those that train, "all" the valid ones, rejected ones too.
        bound: The value is clamped to +-bound, whatever its kind, or None. No gradient flows beyond.
        swapped: The two policies change places: k = ref_logp - new_logp.
        reduction: A reduction of its own, where a framework averages the penalty over sequences and the policy loss
            over tokens; not "token_sum_norm". None: that of the loss. A second pass computes it.
        denominator: The divisor of that reduction: "original", "kept" or "rows", as in `policy_loss`. It is counted in
            the call, whatever number divides the policy loss: over micro-batches such means add up to as many means. A
            call of its own, with advantages of 0, gives a KL a number as its denominator.
    """

    kind: KLKind
    coef: float
    gradient: KLKind | None = None
    log_clamp: float = 20.0
    value_clamp: float | None = None
    weight: KLWeight | None = None
    weight_upper: float | None = None
    scope: Scope = "kept"
    bound: float | None = None
    swapped: bool = False
    reduction: LossReduction | None = None
    denominator: Denominator = "original"

    def __post_init__(self) -> None:
        choice("KL.kind", self.kind, KL_KINDS)
        _coefficient("KL.coef", self)
        if self.gradient is not None:
            choice("KL.gradient", self.gradient, KL_KINDS)
        self._set(log_clamp=positive("KL.log_clamp", self.log_clamp, LARGEST_CLAMP))
        for name in ("value_clamp", "weight_upper", "bound"):
            if getattr(self, name) is not None:
                self._set(**{name: positive(f"KL.{name}", getattr(self, name))})
        if self.weight is not None:
            choice("KL.weight", self.weight, KL_WEIGHTS)
        if self.weight_upper is not None and self.weight not in ("ratio", "stopped_ratio"):
            raise ValueError(
                f"KL.weight_upper: expected None with weight={self.weight!r}, got {shown(self.weight_upper)}"
            )
        choice("KL.scope", self.scope, SCOPES)
        if not isinstance(self.swapped, bool):
            raise TypeError(f"KL.swapped: expected a bool, got {shown(self.swapped)}")
        choice("KL.denominator", self.denominator, DENOMINATORS)
        if self.reduction is not None:
            choice("KL.reduction", self.reduction, KL_REDUCTIONS)
        by_rows = self.reduction is not None and _REDUCTIONS[self.reduction].unit == "sequences"
        if self.denominator == "rows" and not by_rows:
            raise ValueError(
                f"KL.denominator: expected 'rows' with a reduction over sequences, got it with "
                f"reduction={self.reduction!r}"
            )
        if self.denominator != "original" and self.reduction in (None, "sum"):
            raise ValueError(
                f"KL.denominator: expected the default with reduction={self.reduction!r}, got {self.denominator!r}"
            )


@dataclass(frozen=True, repr=False)
class SquaredLogRatio(Checked):
    """The squared log-ratio regulariser, coef * x^2 per token (Kimi, prime-rl). x is saturated at +-1024.

    Args:
        coef: Factor of the term.
        scope: The tokens that it is summed over: "all" valid ones, so that rejected tokens stay anchored, or those
            "kept".
    """

    coef: float
    scope: Scope = "all"

    def __post_init__(self) -> None:
        _coefficient("SquaredLogRatio.coef", self)
        choice("SquaredLogRatio.scope", self.scope, SCOPES)


def _coefficient(name: str, of: KL | SquaredLogRatio) -> None:
    value = number(name, of.coef)
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name}: expected a finite number >= 0, got {value!r}")
    object.__setattr__(of, "coef", value)


@dataclass(frozen=True, repr=False)
class Objective(Checked):
    """Everything that is fixed about a policy loss: the arguments of `policy_loss` that are not tensors.

    Args:
        surrogate: The surrogate.
        kl: KL to a reference, or None.
        regulariser: Squared log-ratio, or None.
        reduction: A value of LOSS_REDUCTIONS.
        denominator: The tokens or sequences that are counted: "original" those of the mask given, "kept" those that
            train.
        max_length: The length that token_sum_norm divides by besides the number of sequences.
        weights_are_the_ratio: Weights take the place of the surrogate's ratio.
        nonfinite: `Spec.nonfinite`. A token that trains with NaN or infinity in what it needs is left out and
            counted, unless this is "propagate", which reads a scale that is not finite as 0 and lets all else pass;
            "neutral" reads a base that is not finite as new_logp.
    """

    surrogate: Surrogate
    kl: KL | None = None
    regulariser: SquaredLogRatio | None = None
    reduction: LossReduction = "token_mean"
    denominator: Counted = "original"
    max_length: float | None = None
    weights_are_the_ratio: bool = False
    nonfinite: str = "reject"

    @property
    def reduced(self) -> Reduction:
        """The row of its reduction."""
        return _REDUCTIONS[self.reduction]

    def __post_init__(self) -> None:
        checked_surrogate(self.surrogate)
        if self.kl is not None and not isinstance(self.kl, KL):
            raise TypeError(f"kl: expected a KL or None, got {type(self.kl).__name__}")
        if self.regulariser is not None and not isinstance(self.regulariser, SquaredLogRatio):
            raise TypeError(f"regulariser: expected a SquaredLogRatio or None, got {type(self.regulariser).__name__}")
        choice("reduction", self.reduction, LOSS_REDUCTIONS)
        if self.reduced.by_length:
            if self.max_length is None:
                raise ValueError(
                    f"max_length: expected the length that {self.reduction} divides by (elsewhere called "
                    "loss_scale_factor or max_completion_length), got None"
                )
            self._set(max_length=positive("max_length", self.max_length))
        elif self.max_length is not None:
            raise ValueError(
                f"max_length: expected None with reduction={self.reduction!r}, got {shown(self.max_length)}"
            )


@dataclass(frozen=True, repr=False)
class EntropyBonus(Checked):
    """A reward for entropy: -coef times the entropy of the tokens, reduced as the policy loss is.

    Args:
        coef: Factor of the term; below 0 entropy is penalised.
        scope: The tokens that it is summed over: "kept" those that train, "all" the valid ones, rejected ones too.
    """

    coef: float
    scope: Scope = "kept"

    def __post_init__(self) -> None:
        value = number("EntropyBonus.coef", self.coef)
        if not math.isfinite(value):
            raise ValueError(f"EntropyBonus.coef: expected a finite number, got {value!r}")
        choice("EntropyBonus.scope", self.scope, SCOPES)
        self._set(coef=value)

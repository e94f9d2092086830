"""The mean of a policy loss, its terms besides the surrogate, and what of it a call runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from .checked import Checked, keywords_meant
from .surrogate import Surrogate
from .validate import LARGEST_CLAMP, boolean, choice, number, positive, shown, wrong_type, wrong_value

KLKind = Literal["k1", "k2", "k3", "abs"]
KLWeight = Literal["ratio", "weights"]
Scope = Literal["kept", "all"]
MeanOf = Literal["token", "sequence", "sequence_sum", "sum"]
MeanOver = Literal["original", "kept", "rows"]

KL_KINDS: tuple[str, ...] = get_args(KLKind)
KL_WEIGHTS: tuple[str, ...] = get_args(KLWeight)
SCOPES: tuple[str, ...] = get_args(Scope)
MEANS: tuple[MeanOf, ...] = get_args(MeanOf)
MEANS_OVER: tuple[MeanOver, ...] = get_args(MeanOver)

# What other packages call the mean of a loss.
MEANT = {
    "token_mean": "Mean('token')", "token-mean": "Mean('token')", "sequence_mean_token_mean": "Mean('sequence')",
    "seq-mean-token-mean": "Mean('sequence')", "sequence_mean_token_sum": "Mean('sequence_sum')",
    "seq-mean-token-sum": "Mean('sequence_sum')", "token_sum_norm": "Mean('sequence_sum', length=...)",
    "seq-mean-token-sum-norm": "Mean('sequence_sum', length=...)",
}  # fmt: skip


@keywords_meant(reduction="of=", mean="of=", denominator="over=", max_length="length=", norm="length=")
@dataclass(frozen=True, repr=False)
class Mean(Checked):
    """How the losses of tokens become one number: a sum, and what it is divided by.

    Args:
        of: "token", the mean over tokens; "sequence", the mean over sequences of each one's mean; "sequence_sum", the
            mean over sequences of each one's sum; "sum", not divided.
        over: The tokens or sequences that are counted: the "original" ones of the batch's mask, those "kept" in
            training, or all "rows" of a mean over sequences, those without a token too. Counted over `Ranks.batch`;
            `Batch.total` takes their place.
        length: A length that the sum is divided by too, such as the longest completion allowed (Dr. GRPO): with
            "sequence_sum" alone. None: it is not.
    """

    of: MeanOf = "token"
    over: MeanOver = "original"
    length: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.of, str) and self.of in MEANT:
            raise ValueError(f"Mean.of: expected one of {list(MEANS)}, got {self.of!r}; write {MEANT[self.of]}")
        choice("Mean.of", self.of, MEANS)
        choice("Mean.over", self.over, MEANS_OVER)
        if self.of == "sum" and self.over != "original":
            raise ValueError(f"Mean.over: expected its default with of='sum', which does not divide, got {self.over!r}")
        if self.over == "rows" and self.unit != "sequences":
            raise ValueError(f"Mean.over: expected 'rows' with a mean over sequences, got it with of={self.of!r}")
        if self.length is not None:
            if self.of != "sequence_sum":
                raise ValueError(f"Mean.length: expected None with of={self.of!r}, got {shown(self.length)}")
            self._set(length=positive("Mean.length", self.length))

    @property
    def unit(self) -> Literal["tokens", "sequences"] | None:
        """The units whose number divides the sum; None: the sum is not divided."""
        return None if self.of == "sum" else "tokens" if self.of == "token" else "sequences"

    @property
    def averages(self) -> bool:
        """True if each sequence's sum is divided by its own number of tokens first."""
        return self.of == "sequence"


TOKEN_MEAN = Mean()


@keywords_meant(
    reduction="mean=rc.Mean(...)",
    denominator="mean=rc.Mean(..., over=...)",
    beta="coef=",
    kl_coef="coef=",
    kl_type="kind=",
    clamp="value_clamp=",
)
@dataclass(frozen=True, repr=False)
class KL(Checked):
    """A penalty for leaving a reference policy, from k = new_logp - ref_logp per token.

    Args:
        kind: Its value: "k1" k, "abs" |k|, "k2" k^2 / 2, "k3" e^-k - 1 + k. k is saturated at +-1024.
        coef: Factor of the term.
        gradient: The kind whose gradient it has, if not its own (straight-through). The expectation of k3 is the KL,
            but its expected gradient is not the KL's; k2 has that gradient.
        log_clamp: k is clamped to +-log_clamp in k3.
        value_clamp: k3 is at most this (frameworks take 10), or None. No gradient flows beyond.
        weight: A further factor: None, "ratio" the differentiable r (unbiased for samples of base), "weights" the
            factor of the surrogate.
        scope: The tokens that it is summed over: "kept" those that train, "all" the valid ones, rejected ones too.
        bound: The value is clamped to +-bound, whatever its kind, or None. No gradient flows beyond.
        swapped: The two policies change places: k = ref_logp - new_logp.
        mean: A mean of its own, where a framework averages the penalty over sequences and the policy loss over tokens;
            without a length. None: the loss's. A second pass computes it. Its divisor is counted in the call,
            whatever `Batch.total` divides the policy loss by: over micro-batches such means add up to as many means. A
            call of its own, with advantages of 0, gives a KL a total.
    """

    kind: KLKind
    coef: float
    gradient: KLKind | None = None
    log_clamp: float = 20.0
    value_clamp: float | None = None
    weight: KLWeight | None = None
    scope: Scope = "kept"
    bound: float | None = None
    swapped: bool = False
    mean: Mean | None = None

    def __post_init__(self) -> None:
        choice("KL.kind", self.kind, KL_KINDS)
        _coefficient("KL.coef", self)
        if self.gradient is not None:
            choice("KL.gradient", self.gradient, KL_KINDS)
        self._set(log_clamp=positive("KL.log_clamp", self.log_clamp, LARGEST_CLAMP))
        for name in ("value_clamp", "bound"):
            if getattr(self, name) is not None:
                self._set(**{name: positive(f"KL.{name}", getattr(self, name))})
        if self.weight is not None:
            choice("KL.weight", self.weight, KL_WEIGHTS)
        choice("KL.scope", self.scope, SCOPES)
        boolean("KL.swapped", self.swapped)
        if self.mean is not None:
            if not isinstance(self.mean, Mean):
                raise wrong_type("KL.mean", "a Mean or None", self.mean)
            if self.mean.length is not None:
                raise ValueError(f"KL.mean: expected one without a length, got {self.mean!r}")


@dataclass(frozen=True, repr=False)
class SquaredLogRatio(Checked):
    """The squared log-ratio regularizer, coef * x^2 per token (Kimi, prime-rl). x is saturated at +-1024.

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
        raise wrong_value(name, "a finite number >= 0", value)
    object.__setattr__(of, "coef", value)


@dataclass(frozen=True, repr=False)
class EntropyBonus(Checked):
    """A reward for entropy: -coef times the entropy of the tokens, reduced as the policy loss is.

    Args:
        coef: Factor of the term; below 0 entropy is penalized.
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


@dataclass(frozen=True, repr=False)
class Objective(Checked):
    """A Loss as it runs in one call.

    Args:
        surrogate, kl, regularizer: Of the Loss.
        mean: Of the Loss, over "original" or "kept" tokens or sequences.
        weights_are_the_ratio: Weights take the place of the surrogate's ratio.
        nonfinite: `Spec.nonfinite`. A token that trains with NaN or infinity in what it needs is left out and
            counted, unless this is "propagate", which reads a scale that is not finite as 0 and lets all else pass;
            "neutral" reads a base that is not finite as new_logp.
    """

    surrogate: Surrogate
    kl: KL | None = None
    regularizer: SquaredLogRatio | None = None
    # By a factory, because torch 2.11's compiler takes no default that is an object.
    mean: Mean = field(default_factory=lambda: TOKEN_MEAN)
    weights_are_the_ratio: bool = False
    nonfinite: str = "reject"

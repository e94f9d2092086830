"""What a policy loss is made of: surrogates, KL to a reference, a regulariser. Frozen, hashable, checked.

Their formulas are in objective.py. Notation: x = new_logp - base, the log-ratio, where base is old_logp, rollout_logp
or new_logp itself, detached; r = e^x; A the advantage.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field

from rollout_corr.spec.correction import LARGEST_CLAMP, OUTSIDE
from rollout_corr.spec.validate import Checked, bounds, choice, number, positive

RATIOS = ("new/old", "new/rollout")
THROUGH = ("sequence", "token")
DIVERGENCES = ("tv", "kl")
KINDS = ("k1", "k2", "k3", "abs")
KL_WEIGHTS = ("ratio", "stopped_ratio", "weights")
SCOPES = ("kept", "all")
LOSS_REDUCTIONS = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "token_sum_norm",
    "sum",
)
DENOMINATORS = ("original", "kept")


@dataclass(frozen=True)
class Surrogate(Checked):
    """What all surrogates share.

    Args:
        of: The ratio: "new/old" or "new/rollout". None: new/old if `old_logp` is given, else new/rollout if
            `rollout_logp` is, else new/new, which is 1 and has a gradient.
        clamp: x is clamped to +-clamp before exp; no gradient flows beyond.
    """

    of: str | None = field(default=None, kw_only=True)
    clamp: float = field(default=20.0, kw_only=True)

    def __post_init__(self) -> None:
        if type(self) is Surrogate:
            raise TypeError("Surrogate: expected one of its kinds, such as PPO(), got Surrogate itself")
        if self.of is not None:
            choice(f"{self._name}.of", self.of, RATIOS)
        self._set(clamp=positive(f"{self._name}.clamp", self.clamp, LARGEST_CLAMP))

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _number(self, name: str, *, least: float = 0.0, most: float = math.inf) -> None:
        value = number(f"{self._name}.{name}", getattr(self, name))
        if not least <= value <= most:
            limit = f">= {least:g}" + ("" if math.isinf(most) else f" and <= {most:g}")
            raise ValueError(f"{self._name}.{name}: expected a number {limit}, got {value!r}")
        self._set(**{name: value})

    # Not an ABC: it would refuse Surrogate() before __post_init__ can say what to write instead.
    @abstractmethod
    def explain(self) -> str:
        """The loss of a token, in one line."""


@dataclass(frozen=True)
class PPO(Surrogate):
    """PPO's clip: -min(r A, clip(r, 1 - low, 1 + high) A).

    Args:
        low: r is clipped from below at 1 - low.
        high: r is clipped from above at 1 + high; inf leaves that side open.
        dual: Where A < 0 the loss is at most -dual * A (dual clip), or None.
        delta: r is at most delta before anything else (INTELLECT-2's two-sided clip), or None.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("low", most=1.0)
        self._number("high")
        if self.dual is not None:
            self._number("dual", least=1.0)
        if self.delta is not None:
            self._number("delta", least=1.0)

    @property
    def ratio_bounds(self) -> tuple[float, float, float]:
        """Where the ratio is cut: from below where A < 0, from above where it is not, from above where A < 0."""
        delta = math.inf if self.delta is None else self.delta
        dual = math.inf if self.dual is None else self.dual
        return 1.0 - self.low, min(1.0 + self.high, delta), min(dual, delta)

    def explain(self) -> str:
        """The loss of a token, in one line."""
        text = f"-min(r A, clip(r, {1.0 - self.low:g}, {1.0 + self.high:g}) A)"
        text += "" if self.delta is None else f", r at most {self.delta:g}"
        return text if self.dual is None else f"{text}, at most {self.dual:g} |A| where A < 0"


@dataclass(frozen=True)
class GSPO(PPO):
    """PPO's clip of the sequence's geometric ratio, exp(mean of x over the tokens that train), at each of its tokens.

    Args:
        low, high, dual, delta: As for PPO; GSPO's paper clips much tighter.
        through: Where the gradient flows: "sequence" through the mean to all tokens of the sequence; "token" through a
            token's own log-prob alone (GSPO-token, whose value is the same). They agree where the tokens of a sequence
            share one advantage.
    """

    low: float = 3e-4
    high: float = 4e-4
    through: str = "sequence"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("GSPO.through", self.through, THROUGH)

    def explain(self) -> str:
        """The loss of a token, in one line."""
        flow = "all tokens of the sequence" if self.through == "sequence" else "the token's own log-prob"
        return f"{super().explain()}; log r = the sequence's mean of x, with its gradient through {flow}"


# Without fields of its own a class inherits all that dataclass makes, at none of its cost at import.
class Reinforce(Surrogate):
    """REINFORCE with a differentiable ratio: -r A."""

    def explain(self) -> str:
        """The loss of a token, in one line."""
        return "-r A"


@dataclass(frozen=True)
class Score(Surrogate):
    """The score function with a stopped ratio: -sg(bounded r) A new_logp (CISPO, truncated policy gradient).

    Args:
        lower: Lower bound of the ratio, or None for an open side.
        upper: Upper bound of the ratio, or None for an open side.
        outside: What a ratio outside the bounds becomes: "clamp" the bound, "zero" 0.
    """

    lower: float | None = None
    upper: float | None = None
    outside: str = "clamp"

    def __post_init__(self) -> None:
        super().__post_init__()
        lower, upper = bounds("Score", self.lower, self.upper, signed=False)
        self._set(lower=lower, upper=upper)
        choice("Score.outside", self.outside, OUTSIDE)

    def explain(self) -> str:
        """The loss of a token, in one line."""
        if self.lower is None and self.upper is None:
            return "-sg(r) A new_logp"
        lower, upper = self.lower or 0.0, math.inf if self.upper is None else self.upper
        becomes = "clamped to" if self.outside == "clamp" else "0 outside"
        return f"-sg(r) A new_logp, r {becomes} [{lower:g}, {upper:g}]"


@dataclass(frozen=True)
class DPPO(Surrogate):
    """-sg(min(r, upper)) A new_logp, and 0 where the update pushes a token further than a divergence allows.

    With p = e^base, q = e^new_logp: a token with A > 0 is masked where q > p and the divergence exceeds `high`, one
    with A < 0 where q < p and it exceeds `low`.

    Args:
        divergence: "tv" |q - p|, or "kl" of {p, 1 - p} from {q, 1 - q}.
        low: Bound where A < 0.
        high: Bound where A > 0.
        upper: Upper bound of the ratio, or None.
        eps: Floor of 1 - p and 1 - q in the KL.
    """

    divergence: str = "tv"
    low: float = 0.2
    high: float = 0.2
    upper: float | None = 20.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("DPPO.divergence", self.divergence, DIVERGENCES)
        self._number("low")
        self._number("high")
        if self.upper is not None:
            self._number("upper", least=1.0)
        self._set(eps=positive("DPPO.eps", self.eps))

    def explain(self) -> str:
        """The loss of a token, in one line."""
        ratio = "r" if self.upper is None else f"min(r, {self.upper:g})"
        return (
            f"-sg({ratio}) A new_logp, and 0 where r has moved with A and {self.divergence} exceeds "
            f"{self.high:g} (A > 0) or {self.low:g} (A < 0)"
        )


@dataclass(frozen=True)
class SAPO(Surrogate):
    """A soft gate instead of a clip: -(4 / tau) sigmoid(tau (r - 1)) A.

    Args:
        positive: tau where A > 0.
        negative: tau elsewhere.
    """

    positive: float = 1.0
    negative: float = 1.05

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("positive", "negative"):
            self._set(**{name: positive(f"SAPO.{name}", getattr(self, name))})

    def explain(self) -> str:
        """The loss of a token, in one line."""
        return f"-(4 / tau) sigmoid(tau (r - 1)) A, tau = {self.positive:g} where A > 0, else {self.negative:g}"


@dataclass(frozen=True)
class GMPO(Surrogate):
    """The geometric mean of a sequence's ratios, clipped one by one in log space, times its mean advantage.

    -mean(A) exp(mean of x'), where x' is x clipped as PPO would by the sign of A; the same value at every token of the
    sequence. Weights enter as their geometric mean over the sequence, each at least 1e-10.

    Args:
        low: x is clipped from below at -low where A < 0.
        high: x is clipped from above at high where A > 0.
    """

    low: float = 0.4
    high: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("low")
        self._number("high")

    def explain(self) -> str:
        """The loss of a token, in one line."""
        return f"-mean(A) exp(mean of x), x at most {self.high:g} where A > 0 and at least {-self.low:g} where A < 0"


class GPG(Surrogate):
    """The plain policy gradient: -A new_logp. It has no ratio, so weights multiply it in every mode."""

    def explain(self) -> str:
        """The loss of a token, in one line."""
        return "-A new_logp"


@dataclass(frozen=True)
class DRO(Surrogate):
    """Direct reward optimisation: -(A new_logp - beta / 2 x^2). It has no ratio, so weights multiply it in every mode.

    Args:
        beta: Pull towards base. x is saturated at +-1024.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(beta=positive("DRO.beta", self.beta))

    def explain(self) -> str:
        """The loss of a token, in one line."""
        return f"-(A new_logp - {0.5 * self.beta:g} x^2)"


@dataclass(frozen=True)
class KL(Checked):
    """A penalty for leaving a reference policy, from k = new_logp - ref_logp per token.

    Args:
        kind: Its value: "k1" k, "abs" |k|, "k2" k^2 / 2, "k3" e^-k - 1 + k. k is saturated at +-1024.
        coef: What it is multiplied by.
        gradient: The kind whose gradient it has, if not its own (straight-through). The mean of k3 is the KL, but its
            gradient is not the KL's; that of k2 is.
        log_clamp: k is clamped to +-log_clamp in k3.
        value_clamp: k3 is at most this (verl, xtuner and SkyRL say 10), or None. No gradient flows beyond.
        weight: What multiplies it besides: None, "ratio" the differentiable r (unbiased for samples of base),
            "stopped_ratio" the same without its gradient, "weights" what multiplies the surrogate.
        weight_upper: Upper bound of that ratio, or None.
        scope: Which tokens it is taken over: "kept" those that train, "all" the valid ones, rejected ones too.
    """

    kind: str
    coef: float
    gradient: str | None = None
    log_clamp: float = 20.0
    value_clamp: float | None = None
    weight: str | None = None
    weight_upper: float | None = None
    scope: str = "kept"

    def __post_init__(self) -> None:
        choice("KL.kind", self.kind, KINDS)
        _coefficient("KL.coef", self)
        if self.gradient is not None:
            choice("KL.gradient", self.gradient, KINDS)
        self._set(log_clamp=positive("KL.log_clamp", self.log_clamp, LARGEST_CLAMP))
        for name in ("value_clamp", "weight_upper"):
            if getattr(self, name) is not None:
                self._set(**{name: positive(f"KL.{name}", getattr(self, name))})
        if self.weight is not None:
            choice("KL.weight", self.weight, KL_WEIGHTS)
        if self.weight_upper is not None and self.weight not in ("ratio", "stopped_ratio"):
            raise ValueError(f"KL.weight_upper: expected None with weight={self.weight!r}, got {self.weight_upper!r}")
        choice("KL.scope", self.scope, SCOPES)


@dataclass(frozen=True)
class SquaredLogRatio(Checked):
    """The squared log-ratio regulariser, coef * x^2 per token (Kimi, prime-rl). x is saturated at +-1024.

    Args:
        coef: What it is multiplied by.
        scope: Which tokens it is taken over: "all" valid ones, so that rejected tokens stay anchored, or those "kept".
    """

    coef: float
    scope: str = "all"

    def __post_init__(self) -> None:
        _coefficient("SquaredLogRatio.coef", self)
        choice("SquaredLogRatio.scope", self.scope, SCOPES)


def _coefficient(name: str, of: KL | SquaredLogRatio) -> None:
    value = number(name, of.coef)
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name}: expected a finite number >= 0, got {value!r}")
    object.__setattr__(of, "coef", value)


@dataclass(frozen=True)
class Objective(Checked):
    """All that is fixed about a policy loss; what `policy_loss` makes of its arguments.

    Args:
        surrogate: The surrogate.
        kl: KL to a reference, or None.
        regulariser: Squared log-ratio, or None.
        reduction: One of LOSS_REDUCTIONS.
        denominator: What is counted: "original" the mask given, "kept" what trains.
        max_length: What token_sum_norm divides by besides the number of sequences.
        weights_are_the_ratio: Score and DPPO take the weights in place of their own ratio.
        nonfinite: `Spec.nonfinite`. A token that trains with NaN or infinity in what it needs is left out and
            counted, unless this is "propagate"; "neutral" reads a base that is not finite as new_logp.
    """

    surrogate: Surrogate
    kl: KL | None = None
    regulariser: SquaredLogRatio | None = None
    reduction: str = "token_mean"
    denominator: str = "original"
    max_length: float | None = None
    weights_are_the_ratio: bool = False
    nonfinite: str = "reject"

    def __post_init__(self) -> None:
        if not isinstance(self.surrogate, Surrogate):
            raise TypeError(f"surrogate: expected a surrogate such as PPO(), got {type(self.surrogate).__name__}")
        if self.kl is not None and not isinstance(self.kl, KL):
            raise TypeError(f"kl: expected a KL or None, got {type(self.kl).__name__}")
        if self.regulariser is not None and not isinstance(self.regulariser, SquaredLogRatio):
            raise TypeError(f"regulariser: expected a SquaredLogRatio or None, got {type(self.regulariser).__name__}")
        choice("reduction", self.reduction, LOSS_REDUCTIONS)
        if self.reduction == "token_sum_norm":
            if self.max_length is None:
                raise ValueError(
                    "max_length: expected the length that token_sum_norm divides by (verl's loss_scale_factor, TRL's "
                    "max_completion_length), got None"
                )
            self._set(max_length=positive("max_length", self.max_length))
        elif self.max_length is not None:
            raise ValueError(f"max_length: expected None with reduction={self.reduction!r}, got {self.max_length!r}")

"""The statistics that a criterion can test, one row each: everything else that depends on a statistic reads its row.

Not to be confused with `Statistics` (metrics/statistics.py), the sums and maxima that metrics are computed from.

Readers: the check of bounds (specs/criterion.py), `Spec.explain`, the definition (definition/correction.py), the
thresholds (specs/criterion.py), the table in docs/math.md, and the plan of the kernels, which needs
`Statistic.one_limb`, `log_space`, `has_eps` and `source` and has one Triton branch a statistic of its own.

How to add one: CONTRIBUTING.md. Notation: D = log q - log p, where p = exp(rollout_logp) and q = exp(train_logp).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from .validate import LARGEST_FLOAT32

if TYPE_CHECKING:
    from torch import Tensor

Stat = Literal[
    "ratio", "k1", "k2", "k3", "k3_reverse", "abs", "ratio_error", "ratio_deviation", "prob_diff", "tv", "binary_kl",
    "binary_kl_reverse", "binary_kl_symmetric", "age", "entropy", "external",
]  # fmt: skip

# The quantity that a bound is compared with: the statistic itself, or D, |D|, and either of them within +-Spec.clamp.
Compared = Literal["value", "d", "clamped_d", "abs_d", "clamped_abs_d"]


class TokenValues(Protocol):
    """The quantities of tokens that a formula may read: tensors of one shape, [N] or [B, T]."""

    @property
    def d(self) -> Tensor:
        """D, within +-token_clamp if the criterion has one."""

    @property
    def clamped_d(self) -> Tensor:
        """`d` within +-Spec.clamp, so that its exp is finite."""

    @property
    def p(self) -> Tensor:
        """The probability under the rollout policy."""

    @property
    def q(self) -> Tensor:
        """The probability under the train policy."""

    @property
    def binary_kl(self) -> Tensor:
        """KL({p, 1 - p} || {q, 1 - q}), with 1 - p and 1 - q floored at the criterion's eps."""

    @property
    def binary_kl_reverse(self) -> Tensor:
        """KL({q, 1 - q} || {p, 1 - p}), with the same floor."""

    @property
    def external(self) -> Tensor:
        """The tensor that the caller gave under the criterion's name or as entropy, or made of its versions."""

    @property
    def entropy(self) -> Tensor:
        """`external`, NaN where it is not finite, which no bound lets pass."""

    def k3(self, x: Tensor) -> Tensor:
        """e^x - 1 - x without cancellation."""


class Statistic(NamedTuple):
    """A quantity of a token that a criterion can test, alone or aggregated over a sequence."""

    name: Stat  # `Criterion.stat`
    words: str  # in `Spec.explain`, with its article, and the formula where that is short
    formula: Callable[[TokenValues], Tensor]  # the value per token; with `log_space` its logarithm
    tex: str  # the formula in docs/math.md
    estimates: str  # what its mean over tokens of the rollout policy estimates, in docs/math.md
    source: Literal["d", "probabilities", "versions", "entropy", "caller"] = "d"  # what the formula reads
    signed: bool = False  # bounds may be negative
    log_space: bool = False  # the formula gives the logarithm, which sequences aggregate; bounds are compared as logs
    one_limb: bool = False  # sums are of D or of its magnitude: one integer on D's grid; others take two
    has_eps: bool = False  # `Criterion.eps` matters
    # Once `inverse` or `branches` has taken a bound back to D: at a token, with `inverse` for extrema of sequences too.
    compared: Compared = "value"
    inverse: Callable[[float], float] | None = None  # where it grows with what is compared: its value -> that
    branches: Callable[[float], tuple[float, float]] | None = None  # it falls, then grows: its value -> both D

    def may_be_nan(self) -> bool:
        """True if the values are the caller's own, whose NaN fails a unit."""
        return self.source in ("entropy", "caller")


# --- inverses, on the host in float64 ---


def log_of(bound: float) -> float:
    """The logarithm; of 0 it is -inf."""
    return math.log(bound) if bound > 0.0 else -math.inf


def log_bound(bound: float | None) -> float | None:
    """A bound of a ratio in log space; None, an open side, stays None."""
    return None if bound is None else log_of(bound)


def float32_at_most(x: float) -> float:
    """The largest float32 <= x, so that comparing a float32 with it is comparing with x itself."""
    if math.isinf(x):
        return x
    scale = 2.0 ** (24 - max(math.frexp(x)[1], -125))  # 24 bits of significand, fewer below 2^-126
    rounded = math.floor(x * scale) / scale
    return min(rounded, LARGEST_FLOAT32) if rounded >= -LARGEST_FLOAT32 else -math.inf


def float32_at_least(x: float) -> float:
    """The smallest float32 >= x."""
    return -float32_at_most(-x)


def _where_k2_is(value: float) -> float:
    return math.sqrt(2.0 * value)


def _where_deviation_is(value: float) -> tuple[float, float]:
    return (math.log1p(-value) if value < 1.0 else -math.inf), math.log1p(value)


def _where_k3_is(value: float) -> tuple[float, float]:
    if value == math.inf:
        return -math.inf, math.inf

    def root(outer: float) -> float:
        inner = 0.0
        for _ in range(200):
            middle = 0.5 * (inner + outer)
            if _k3(middle) <= value:
                inner = middle
            else:
                outer = middle
        return inner

    return root(-value - 1.0), root(min(math.sqrt(2.0 * value), math.log1p(value) + 1.0))


def _k3(d: float) -> float:
    if abs(d) >= 0.5:
        return math.exp(d) - 1.0 - d
    term = total = 0.5 * d * d
    for k in range(3, 24):
        term *= d / k
        total += term
    return total


def _where_k3_reverse_is(value: float) -> tuple[float, float]:
    low, high = _where_k3_is(value)
    return -high, -low


# --- formulas that need a statement ---


def _k2(x: TokenValues) -> Tensor:
    # The square of more would not be finite in float32.
    d = x.d.clamp(-(2.0**60), 2.0**60)
    return 0.5 * (d * d)


# fmt: off
_ROWS = (
    Statistic("ratio", "the ratio e^D", lambda x: x.d, r"$e^D$, aggregated as $D$",
        r"1, if $\mu$ can sample whatever $\pi$ can", log_space=True, one_limb=True, compared="d",
        inverse=log_of),
    Statistic("k1", "k1 = -D", lambda x: -x.d, "$-D$", r"$\mathrm{KL}(\mu \Vert \pi)$, unbiased, of either sign",
        signed=True, one_limb=True),
    Statistic("k2", "k2 = D^2 / 2", _k2, "$D^2 / 2$", "neither KL, but near both where $D$ is small", compared="abs_d",
        inverse=_where_k2_is),
    Statistic("k3", "k3 = e^D - 1 - D", lambda x: x.k3(x.clamped_d), "$e^D - 1 - D$",
        r"$\mathrm{KL}(\mu \Vert \pi)$, unbiased, never negative", compared="clamped_d", branches=_where_k3_is),
    Statistic("k3_reverse", "the reverse k3 = e^-D - 1 + D", lambda x: x.k3(-x.clamped_d), "$e^{-D} - 1 + D$",
        r"$\chi^2(\mu \Vert \pi) - \mathrm{KL}(\mu \Vert \pi)$; it would be $\mathrm{KL}(\pi \Vert \mu)$ over tokens "
        r"of $\pi$", compared="clamped_d", branches=_where_k3_reverse_is),
    Statistic("abs", "|D|", lambda x: x.d.abs(), r"$\lvert D \rvert$", "the mean log-error", one_limb=True),
    Statistic("ratio_error", "the ratio error e^|D|", lambda x: x.clamped_d.abs().exp(), r"$e^{\lvert D \rvert}$",
        "the mean factor by which the two disagree", compared="clamped_abs_d", inverse=log_of),
    Statistic("ratio_deviation", "the ratio deviation |e^D - 1|", lambda x: (x.clamped_d + x.k3(x.clamped_d)).abs(),
        r"$\lvert e^D - 1 \rvert$", r"twice the total variation of $\mu$ and $\pi$, unbiased",
        compared="clamped_d", branches=_where_deviation_is),
    Statistic("prob_diff", "the probability difference q - p", lambda x: x.q - x.p, "$q - p$",
        "nothing: the signed change of this token's probability", source="probabilities",
        signed=True),
    Statistic("tv", "the total variation |q - p|", lambda x: (x.q - x.p).abs(), r"$\lvert q - p \rvert$",
        "total variation of {this token, any other}, a lower bound for the vocabulary",
        source="probabilities"),
    Statistic("binary_kl", "the binary KL(rollout || train)", lambda x: x.binary_kl,
        r"$p \log \frac{p}{q} + (1 - p) \log \frac{1 - p}{1 - q}$",
        "KL(rollout, train) of {this token, any other}, a lower bound for the vocabulary", source="probabilities",
        has_eps=True),
    Statistic("binary_kl_reverse", "the binary KL(train || rollout)", lambda x: x.binary_kl_reverse,
        "`binary_kl` with $p$ and $q$ exchanged", "the other direction", source="probabilities", has_eps=True),
    Statistic("binary_kl_symmetric", "the larger of the two binary KLs",
        lambda x: x.binary_kl.maximum(x.binary_kl_reverse), "the larger of the two, token by token", "-",
        source="probabilities", has_eps=True),
    Statistic("age", "the age, versions.current - version,", lambda x: x.external,
        r"$v - v_t$, the version that trains minus the version that sampled the token", "how stale the tokens are",
        source="versions", signed=True),
    Statistic("entropy", "the entropy", lambda x: x.entropy,
        r"$H_t$, the entropy of the distribution that the token was drawn from", "how undecided the policy is",
        source="entropy"),
    Statistic("external", "the external statistic", lambda x: x.external, "a tensor that the caller gives",
        "whatever it is", source="caller", signed=True),
)
# fmt: on

STATISTICS: dict[str, Statistic] = {row.name: row for row in _ROWS}


def table() -> str:
    """The table of docs/math.md."""
    rows = [f'| `"{row.name}"` | {row.tex} | {row.estimates} |' for row in STATISTICS.values()]
    head = ["| `stat` | per token | what its mean estimates, over tokens that $\\mu$ sampled |", "|---|---|---|"]
    return "\n".join([*head, *rows])

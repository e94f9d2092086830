"""The base class of surrogates, the tokens that a surrogate's formula reads, and the loss that it gives.

Notation: x = new_logp - base is the log-ratio, where base is old_logp, rollout_logp or new_logp itself, detached;
r = e^x; A is the advantage; sg() is a constant of the gradient.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from .checked import Checked
from .choices import Stretch
from .validate import LARGEST_CLAMP, beyond_float32, choice, number, positive, wrong_value

RatioOf = Literal["new/old", "new/rollout"]
# The log-ratio x that a surrogate uses: the token's, its sequence's mean, or the log of an average of the two ratios.
Level = Literal["token", "sequence", "average", "geometric_average"]
Aggregate = Literal["mean", "total"]
# What a surrogate sees before the first token has a loss.
Sees = Literal["token", "batch", "groups"]
# What becomes of weights in bypass mode, where the ratio new/rollout is the correction already.
WeightUse = Literal["report", "replace_ratio", "multiply"]

RATIOS: tuple[str, ...] = get_args(RatioOf)
LEVELS: tuple[str, ...] = get_args(Level)


class Range(NamedTuple):
    """The least and the most that a number may be."""

    least: float
    most: float
    or_none: bool = False  # None is allowed


# By the names of fields.
Choices = Mapping[str, tuple[str, ...]]
Ranges = Mapping[str, Range]

# Fields of every surrogate.
OF_ALL = frozenset(("of", "clamp", "coef"))


class TokenLoss(NamedTuple):
    """The loss of every token before weights, and Bool per token where it was clipped; None: nowhere."""

    value: Tensor  # [N] or [B, T]
    low: Tensor | None = None  # clipped from below
    high: Tensor | None = None  # clipped from above
    dual: Tensor | None = None  # cut by a bound of the far side: PPO's dual and delta, DPPO's upper
    # Where nothing has a graph, of a factor times a bounded ratio: this factor, and the ratio's derivative by x.
    slope: tuple[Tensor, Tensor] | None = None


class Decided(NamedTuple):
    """The decisions of a surrogate that sees the whole batch, made before any token's loss is computed."""

    tokens: tuple[Tensor, ...]  # [N] or [B, T] each, of every token
    sums: dict[str, Tensor]  # 0-d each: the statistics of `Traits.sums`, of the tokens of this rank
    # [S] each, of every sequence of this rank; `see_groups` decides of these, and `tokens` spreads them.
    sequences: tuple[Tensor, ...] = ()


class LossTokens(Protocol):
    """The tokens that a formula reads, and the operations that have one definition: definition/loss.py provides it.

    Tensors are [N] or [B, T], and 0 at tokens that do not train.
    """

    new: Tensor  # new_logp
    compared: Tensor  # new_logp as the ratio reads it, over the set that truncated sampling kept
    x: Tensor  # the log-ratio of the token
    clamped: Tensor  # `Surrogate.log_ratio`, clamped to +-clamp; not there yet when that is asked for
    advantages: Tensor
    weights: Tensor | None
    own_ratio: bool  # False: weights take the place of the ratio, which is then 1
    decided: Decided  # for a surrogate that sees the batch

    def over(self, x: Tensor, bound: float) -> Tensor:
        """Bool: e^x > bound, decided in log space; NaN is not."""

    def under(self, x: Tensor, bound: float) -> Tensor:
        """Bool: e^x < bound, decided in log space; NaN is not."""

    def outside(self, x: Tensor, lower: float | None, upper: float | None) -> tuple[Tensor, Tensor]:
        """Bool: e^x above upper, and e^x below lower; NaN is beyond every bound that is set."""

    def saturated(self, x: Tensor) -> Tensor:
        """Log-ratios clamped to +-1024, as they enter sums and squares."""

    def probability(self, logp: Tensor) -> Tensor:
        """Exp of log-probs."""

    def binary_kl(self, log_p: Tensor, log_q: Tensor, d: Tensor, eps: float) -> Tensor:
        """KL of {p, 1 - p} from {q, 1 - q}, where d = log q - log p."""

    def mean(self, x: Tensor) -> Tensor:
        """The mean of log-ratios over the unit's trained tokens, at each of its tokens; it has a gradient."""

    def total(self, x: Tensor) -> Tensor:
        """The sum of log-ratios over the sequence's trained tokens, at each of its tokens, without a gradient."""

    def mean_advantage(self) -> Tensor:
        """The mean of A over the unit's trained tokens, at each of its tokens."""

    def trained(self, x: Tensor) -> Tensor:
        """Values of trained tokens, 0 elsewhere."""

    def clip(self, least: float, most: float, furthest: float) -> TokenLoss | None:
        """PPO's bounded ratio as a backend has it by other operations, with equal bits; None: by the formula."""


class SeenGroups(Protocol):
    """The sequences of a batch and their groups, on all ranks of `Ranks.batch`: backends/sees_batch.py."""

    trains: Tensor  # [S] bool: a token of it does
    scores: Tensor  # [S]: its `Surrogate.log_ratio`, clamped to +-clamp; 0 where no token trains
    advantages: Tensor  # [S]: the mean of A over its trained tokens; 0 of none

    def log_sums(self, x: Tensor, kind: Tensor, kinds: int) -> tuple[Tensor, Tensor]:
        """Add up e^x, [S] float64, over the sequences of each group that train, by kind, from 0 to kinds - 1.

        Returns, of the group of each sequence, [kinds, S] float64: log(1 + the sum); and int64: how many it has.
        """


class SeenBatch(Protocol):
    """The whole batch, on all ranks of `Ranks.batch`, as a surrogate sees it: backends/sees_batch.py.

    Tokens are those of `LossTokens`, without a gradient. Sums are of integers, so that neither order nor ranks matter.
    """

    tokens: LossTokens
    trains: Tensor  # Bool per token

    def count(self) -> Tensor:
        """0-d float64: the trained tokens."""

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the trained tokens, 0-d in the dtype of x; 0 of none."""

    def largest(self, x: Tensor, eligible: Tensor, count: Tensor) -> Tensor:
        """Bool: among the `count` largest of those that are True in `among`; all that equal the last of them too."""

    def drawn(self, seed: int, eligible: Tensor, count: Tensor) -> Tensor:
        """Bool: `count` of those that are True in `among`, all of them where there are fewer, drawn at random.

        The draw depends on the seed, on the sequence and on the place among its valid tokens.
        """


class Traits(NamedTuple):
    """The properties of a surrogate that the code around its formulas needs."""

    level: Level = "token"  # which its ratio is made of; a field named `level` takes precedence
    aggregate: Aggregate = "mean"  # what a token reads of its sequence's log-ratios where `level` is not "token"
    formula: str | None = None  # name of the field that chooses between formulas
    one_loss: bool = False  # all tokens of a sequence have one loss
    own_bounds: tuple[str, ...] = ()  # fields that bound a ratio which weights, with bounds of their own, could replace
    weights_in_bypass: WeightUse = "report"  # "replace_ratio": a constant ratio; "multiply": there is none
    # Before the first token has a loss: "batch" chooses tokens by `see_batch`, "groups" compares by `see_groups`.
    sees: Sees = "token"
    sums: tuple[str, ...] = ()  # names of the statistics that it reports of what it decided
    # `loss` gives `TokenLoss.slope`, and `factor` the weights; not inherited by a class with another of these.
    slope: bool = False


@dataclass(frozen=True, repr=False)
class Surrogate(Checked):
    """Base class of the surrogates. Each has its `traits` and its formulas.

    Args:
        of: The ratio: "new/old" or "new/rollout". None: new/old if `old_logp` is given, else new/rollout if
            `rollout_logp` is, else new/new, which is 1 and has a gradient.
        clamp: x is clamped to +-clamp before exp; no gradient flows beyond.
        coef: Factor of the loss, as `KL.coef` is of a penalty.
    """

    of: RatioOf | None = field(default=None, kw_only=True)
    clamp: float = field(default=20.0, kw_only=True)
    coef: float = field(default=1.0, kw_only=True)

    traits: ClassVar[Traits] = Traits()
    # How its fields are checked: words; numbers within a range; finite numbers above 0.
    choices: ClassVar[Choices] = {}
    ranges: ClassVar[Ranges] = {}
    above_0: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **settings: object) -> None:
        super().__init_subclass__(**settings)
        stated = next(place for place, kind in enumerate(cls.__mro__) if "traits" in vars(kind))
        formulas = {name for kind in cls.__mro__[:stated] for name in vars(kind)}
        if cls.traits.slope and not formulas.isdisjoint({cls.loss.__name__, cls.factor.__name__}):
            # Another formula has another derivative.
            cls.traits = cls.traits._replace(slope=False)

    def __post_init__(self) -> None:
        if type(self) is Surrogate:
            raise TypeError("Surrogate: expected one of its kinds, such as PPO(), got Surrogate itself")
        for each in fields(self):
            if beyond_float32(value := getattr(self, each.name)):
                raise wrong_value(f"{self._name}.{each.name}", "a number that float32 holds", value)
        if self.of is not None:
            choice(f"{self._name}.of", self.of, RATIOS)
        self._set(clamp=positive(f"{self._name}.clamp", self.clamp, LARGEST_CLAMP))
        for name, words in self.choices.items():
            choice(f"{self._name}.{name}", getattr(self, name), words)
        for name, (least, most, or_none) in self.ranges.items():
            if or_none and getattr(self, name) is None:
                continue
            value = number(f"{self._name}.{name}", getattr(self, name))
            if not least <= value <= most:
                limit = f">= {least:g}" + ("" if math.isinf(most) else f" and <= {most:g}")
                raise wrong_value(f"{self._name}.{name}", f"a number {limit}", value)
            self._set(**{name: value})
        for name in ("coef", *self.above_0):
            self._set(**{name: positive(f"{self._name}.{name}", getattr(self, name))})

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the formula by name, 0 for None; `clamp` and `coef` apart."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in OF_ALL}
        return {name: value or 0.0 for name, value in own.items() if not isinstance(value, str)}

    @property
    def thresholds(self) -> dict[str, tuple[float | None, float | None]]:
        """Lower and upper bound of the ratio by name, compared in log space; the outermost upper bound comes last."""
        return {}

    @property
    def has_own_bounds(self) -> bool:
        """True if it bounds a ratio that weights, which have bounds of their own, could replace."""
        return any(getattr(self, name) is not None for name in self.traits.own_bounds)

    @property
    def sees_batch(self) -> bool:
        """True if it decides something from the whole batch before the first token has a loss."""
        return self.traits.sees != "token"

    @property
    def mean_unit(self) -> Stretch:
        """The unit that `LossTokens.mean` and `mean_advantage` are over: its field `over`."""
        unit: Stretch = getattr(self, "over", "sequence")
        return unit

    @property
    def ratio_level(self) -> Level:
        """The log-ratio that its ratio is made of."""
        level: Level = getattr(self, "level", self.traits.level)
        return level

    @property
    def sequence_value(self) -> Aggregate | None:
        """The value of its sequence's log-ratios that a token reads; None: none."""
        return None if self.ratio_level == "token" else self.traits.aggregate

    @property
    def reads_sequences(self) -> bool:
        """True if the gradient of a token depends on sums over its whole sequence."""
        return self.sequence_value is not None or self.traits.one_loss

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        """The masks of `TokenLoss` that can be set: some of "low", "high", "dual"."""
        return ()

    def log_ratio(self, tokens: LossTokens) -> Tensor:
        """The log-ratio of each token at the level of the surrogate; only a token's own x has a gradient."""
        if self.ratio_level == "token":
            return tokens.x
        x = tokens.x.detach()
        mean = tokens.mean(x)
        if self.ratio_level == "sequence":
            return mean
        return averaged(self.ratio_level, x, mean, self.clamp)

    def see_batch(self, batch: SeenBatch) -> Decided:
        """Decide what the whole batch decides; asked of surrogates that see the batch."""
        raise NotImplementedError

    def see_groups(self, groups: SeenGroups) -> Decided:
        """Decide what groups of sequences decide; asked of surrogates that see groups."""
        raise NotImplementedError

    # Not an ABC: it would refuse Surrogate() before __post_init__ can say what to write instead.
    @abstractmethod
    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute the loss of each token before weights."""

    def factor(self, tokens: LossTokens, weights: Tensor) -> Tensor:
        """The factor of each token's loss from the weights."""
        return weights

    @abstractmethod
    def explain(self) -> str:
        """Describe the loss of a token in one line."""


def averaged(level: Level, x: Tensor, mean: Tensor, clamp: float) -> Tensor:
    """The logarithm of the average or of the geometric average of two ratios, from their logarithms within a clamp."""
    x, mean = x.clamp(-clamp, clamp), mean.clamp(-clamp, clamp)
    return 0.5 * (x + mean) if level == "geometric_average" else torch.logaddexp(x, mean) - math.log(2.0)


def checked_surrogate(surrogate: object) -> Surrogate:
    """Refuse everything but a surrogate."""
    if not isinstance(surrogate, Surrogate):
        got = type(surrogate).__name__
        if isinstance(surrogate, type) and issubclass(surrogate, Surrogate):
            got = f"the class {surrogate.__name__}; write {surrogate.__name__}()"
        raise TypeError(f"Loss.surrogate: expected a surrogate such as PPO(), got {got}")
    return surrogate

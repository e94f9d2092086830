"""The description of a weight: `Weight`."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_corr.specs.bounds_of_batch import Bounded, KeepESS, OfBatch
from rollout_corr.specs.checked import keywords_meant
from rollout_corr.specs.choices import (
    GROWTH,
    LEVELS,
    NORMALIZE,
    OUTSIDE,
    PREFIX_REDUCTIONS,
    WEIGHT_UNITS,
    Growth,
    Level,
    Normalize,
    Outside,
    PrefixReduce,
    WeightUnit,
)
from rollout_corr.specs.validate import bounds, choice, positive, shown

# A level that names no ratio: elsewhere it is either of these.
MEANT = {"sequence": "'product' of its tokens' ratios, or their 'geometric' mean"}


@keywords_meant(threshold="upper=", clip="upper=", clip_max="upper=", clip_min="lower=", max="upper=", min="lower=")
@dataclass(frozen=True, repr=False)
class Weight(Bounded):
    """An importance weight: a ratio of probabilities, bounded and perhaps normalised.

    Args:
        level: "token" exp(D); "product" exp(sum of D) of the unit `over`; "geometric" exp(mean of D) of it; "prefix"
            a weight of each token from D up to and with it, by `reduce`.
        lower: Lower bound of the ratio, or None for an open side; or a rule by which the batch decides it: `Quantile`,
            `TopK`.
        upper: Upper bound of the ratio, likewise: `Quantile`, `Bottom`, `KeepESS`. The batch are all valid tokens, at
            other levels all non-empty turns or sequences, those that criteria reject included. Where two bounds cross
            the upper one holds.
        outside: A ratio outside the bounds becomes the bound ("clamp": truncation) or 0 ("zero": IcePop).
        normalize: "batch" divides by the mean weight over all valid tokens (at other levels: over all non-empty
            turns or sequences, each counting once), so that a weight may exceed `upper`. "group" divides by the mean
            of the sequence's group, which the call names (`group_index` or `group_size`): self-normalised importance
            sampling. "sequence" divides by the mean over the sequence's valid tokens, for weights of tokens, prefixes
            or turns. None does not.
        token_clamp: Every D is clamped to +-token_clamp before anything else; None: it is not.
        reduce: Of a prefix: exp of the "sum" or "mean" of D over it, or "min", exp(D) times the smallest exp(D) before
            the token. Only with level="prefix", where None is "sum".
        growth: "sqrt" raises both bounds of the t-th token of a sequence to the power of sqrt(t): they grow in log
            space as a random walk spreads. Only with level="prefix".
        over: The unit of a "product" or "geometric" weight, and where a "prefix" begins: "sequence", or each "turn" of
            one, from `turns`.
        decay: What is handed back is the weight times decay^age, with age = current_version - version of the token and
            0 < decay <= 1; needs `versions`. Metrics are of weights before it. None: there is none.
    """

    level: Level
    lower: float | OfBatch | None = None
    upper: float | OfBatch | None = None
    outside: Outside = "clamp"
    normalize: Normalize | None = None
    token_clamp: float | None = None
    reduce: PrefixReduce | None = None
    growth: Growth | None = None
    over: WeightUnit = "sequence"
    decay: float | None = None

    def __post_init__(self) -> None:
        choice("Weight.level", self.level, LEVELS, MEANT)
        if self.level == "prefix":
            self._set(reduce="sum" if self.reduce is None else self.reduce)
            choice("Weight.reduce", self.reduce, PREFIX_REDUCTIONS)
        elif self.reduce is not None:
            raise ValueError(f"Weight.reduce: expected None unless level='prefix', got {shown(self.reduce)}")
        check_growth("Weight", self.growth, "level='prefix'", self.level == "prefix")
        choice("Weight.outside", self.outside, OUTSIDE)
        choice("Weight.over", self.over, WEIGHT_UNITS)
        if self.level == "token" and self.over != "sequence":
            raise ValueError(f"Weight.over: expected its default with level={self.level!r}, got {shown(self.over)}")
        if self.normalize is not None:
            choice("Weight.normalize", self.normalize, NORMALIZE)
        if self.normalize == "sequence" and not (self.per_token or self.per_turn):
            raise ValueError(
                f"Weight.normalize: expected 'batch', 'group' or None with level={self.level!r} over sequences, whose "
                "weight over itself is 1, got 'sequence'"
            )
        rules = self.rules
        low, high = bounds("Weight", self.low, self.high, signed=False, ratio=True, clamps=True)
        self._set(lower=rules.get("lower", low), upper=rules.get("upper", high))
        for side, rule in rules.items():
            rule.check("Weight", side)
            if self.growth is not None:
                raise ValueError(f"Weight.{side}: expected a number beside growth={self.growth!r}, got {rule!r}")
        if isinstance(self.upper, KeepESS):
            if self.outside == "zero":
                raise ValueError(
                    f"Weight.upper: expected outside='clamp' with {self.upper!r}, got 'zero': where weights above the "
                    "bound become 0 the effective sample size may rise and fall with it"
                )
            if "lower" in rules:
                raise ValueError(
                    f"Weight.lower: expected a number or None beside upper={self.upper!r}, got {self.lower!r}"
                )
        if self.token_clamp is not None:
            self._set(token_clamp=positive("Weight.token_clamp", self.token_clamp))
        if self.decay is not None:
            self._set(decay=positive("Weight.decay", self.decay, 1.0))

    def _defaults(self) -> dict[str, object]:
        return {**super()._defaults(), "reduce": "sum" if self.level == "prefix" else None}

    @property
    def per_token(self) -> bool:
        """True if every token has a weight of its own, rather than its turn's or sequence's."""
        return self.level in ("token", "prefix")

    @property
    def per_turn(self) -> bool:
        """True if all tokens of a turn have its weight."""
        return self.over == "turn" and not self.per_token

    @property
    def self_normalized(self) -> bool:
        """True if weights are divided by the mean of their sequence or group."""
        return self.normalize in ("group", "sequence")

    @property
    def bounded(self) -> bool:
        """True if a bound is set."""
        return self.lower is not None or self.upper is not None


def check_growth(owner: str, growth: object, needs: str, met: bool) -> None:
    """Refuse what is no growth of bounds, and growth where nothing grows."""
    if growth is None:
        return
    choice(f"{owner}.growth", growth, GROWTH)
    if not met:
        raise ValueError(f"{owner}.growth: expected None unless {needs}, got {shown(growth)}")

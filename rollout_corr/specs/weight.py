"""The description of a weight: `Weight`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING

from .bounds_of_batch import Bounded, OfBatch
from .checked import keywords_meant, keywords_of_short_form
from .choices import (
    NORMALIZE,
    OUTSIDE,
    PREFIX_REDUCTIONS,
    STRETCH_REDUCTIONS,
    STRETCHES,
    STRETCHES_MEANT,
    UNITS,
    UNITS_MEANT,
    Growth,
    Normalize,
    Outside,
    Stretch,
    Unit,
    WeightReduce,
)
from .validate import choice, positive, shown

if TYPE_CHECKING:
    from typing_extensions import Self

# A batch whose mean weight is not above this is not normalized: the division would inflate the remaining weights.
SMALLEST_MEAN = 1e-8
# Words for a ratio that are no unit.
MEANT = {**UNITS_MEANT, "product": "Weight.product(...)", "geometric": "Weight.geometric(...)"}
REDUCTIONS_MEANT = {"product": "'sum': ratios are multiplied as their logs are added", "geometric": "'mean'"}

KEYWORDS = {
    **dict.fromkeys(("threshold", "clip", "clip_max", "max"), "upper="),
    **dict.fromkeys(("clip_min", "min"), "lower="),
    "level": "over= and reduce=",
}


@keywords_meant(**KEYWORDS)
@dataclass(frozen=True, repr=False)
class Weight(Bounded):
    """An importance weight: a ratio of probabilities, bounded and perhaps normalized.

    `Weight.token()`, `Weight.product()` and `Weight.geometric()` are short forms of the usual ones.

    Args:
        over: The unit whose ratio weighs its tokens: each "token" by its own, or a "turn" (of `Batch.turns`) or a
            "sequence" whole; or "prefix": each token by the ratios of its sequence up to and with it.
        reduce: The ratio of a turn, a sequence or a prefix: exp of the "sum" of D, the product of the ratios, or of
            the "mean", their geometric mean. Of a prefix also "min": exp(D) times the smallest exp(D) before the
            token. With over="prefix" None is "sum". Not with over="token".
        lower: Lower bound of the ratio, or None for an open side; or a rule by which the batch decides it: `Quantile`,
            `TopK`.
        upper: Upper bound of the ratio, or None for an open side; or a rule: `Quantile`, `Bottom`, `KeepESS`. A rule
            reads all valid tokens, with over="turn" or "sequence" all that are not empty, including rejected ones.
            Where two bounds cross, the upper one holds.
        outside: A ratio outside the bounds becomes the bound ("clamp": truncation) or 0 ("zero": IcePop).
        normalize: "batch" divides by the mean weight over all valid tokens (with over="turn" or "sequence": over all
            that are not empty, each counting once), so that a weight may exceed `upper`. "group" divides by the mean of
            the sequence's group, of `Batch.groups`: self-normalized importance sampling. "sequence" divides by the mean
            over the sequence's valid tokens, for weights of tokens, prefixes or turns. None does not.
        token_clamp: Every D is clamped to +-token_clamp before anything else; None: it is not.
        growth: "sqrt" raises both bounds of the t-th token of a sequence to the power of sqrt(t): in log space they
            widen like a random walk. Only with over="prefix".
        within: Where a prefix begins: the "sequence", or each "turn" of one. Only with over="prefix".
        decay: What is handed back is the weight times decay^age, with age = current - version of the token, of
            `Batch.versions`, and 0 < decay <= 1. Metrics are of weights before it. None: there is none.
    """

    over: Unit
    reduce: WeightReduce | None = None
    lower: float | OfBatch | None = None
    upper: float | OfBatch | None = None
    outside: Outside = "clamp"
    normalize: Normalize | None = None
    token_clamp: float | None = None
    growth: Growth | None = None
    within: Stretch = "sequence"
    decay: float | None = None

    def __post_init__(self) -> None:
        choice("Weight.over", self.over, UNITS, MEANT)
        if self.over == "prefix" and self.reduce is None:
            self._set(reduce="sum")
        self._check_reduce()
        choice("Weight.outside", self.outside, OUTSIDE)
        if self.normalize is not None:
            choice("Weight.normalize", self.normalize, NORMALIZE)
        if self.normalize == "sequence" and self.over == "sequence":
            raise ValueError(
                "Weight.normalize: expected 'batch', 'group' or None with over='sequence', where the mean over a "
                "sequence is the weight itself, got 'sequence'"
            )
        fixed = "" if self.growth is None else f"growth={shown(self.growth)}"
        self._check_bounds("Weight", fixed, signed=False, ratio=True, clamps=True)
        for rule in self.rules.values():
            rule.check_weight(self)
        if self.decay is not None:
            self._set(decay=positive("Weight.decay", self.decay, 1.0))

    def _check_reduce(self) -> None:
        if self.over == "token":
            if self.reduce is not None:
                bound = "" if isinstance(self.reduce, str) else "; write bounds as lower= and upper="
                raise ValueError(f"Weight.reduce: expected None with over='token', got {shown(self.reduce)}{bound}")
        elif self.reduce is None:
            raise ValueError(
                f"Weight.reduce: expected 'sum', the product of the ratios, or 'mean', their geometric mean, with "
                f"over={self.over!r}, got None"
            )
        elif self.over == "prefix":
            choice("Weight.reduce", self.reduce, PREFIX_REDUCTIONS, REDUCTIONS_MEANT)
        elif self.reduce == "min":
            raise ValueError(
                f"Weight.reduce: expected one of {list(STRETCH_REDUCTIONS)} unless over='prefix', got 'min'"
            )
        else:
            choice("Weight.reduce", self.reduce, STRETCH_REDUCTIONS, REDUCTIONS_MEANT)

    @classmethod
    @keywords_of_short_form(**KEYWORDS)
    def token(
        cls,
        *,
        lower: float | OfBatch | None = None,
        upper: float | OfBatch | None = None,
        outside: Outside = "clamp",
        normalize: Normalize | None = None,
        token_clamp: float | None = None,
        decay: float | None = None,
    ) -> Self:
        """Weigh each token by its own ratio, exp(D): `Weight("token")`."""
        return cls("token", None, lower, upper, outside, normalize, token_clamp, decay=decay)

    @classmethod
    @keywords_of_short_form(**KEYWORDS)
    def product(
        cls,
        over: Stretch = "sequence",
        *,
        lower: float | OfBatch | None = None,
        upper: float | OfBatch | None = None,
        outside: Outside = "clamp",
        normalize: Normalize | None = None,
        token_clamp: float | None = None,
        decay: float | None = None,
    ) -> Self:
        """Weigh a sequence, or a turn, by the product of its ratios, exp(sum of D): `Weight("sequence", "sum")`."""
        choice("Weight.over", over, STRETCHES, STRETCHES_MEANT)
        return cls(over, "sum", lower, upper, outside, normalize, token_clamp, decay=decay)

    @classmethod
    @keywords_of_short_form(**KEYWORDS)
    def geometric(
        cls,
        over: Stretch = "sequence",
        *,
        lower: float | OfBatch | None = None,
        upper: float | OfBatch | None = None,
        outside: Outside = "clamp",
        normalize: Normalize | None = None,
        token_clamp: float | None = None,
        decay: float | None = None,
    ) -> Self:
        """Weigh a sequence, or a turn, by the geometric mean of its ratios: `Weight("sequence", "mean")`."""
        choice("Weight.over", over, STRETCHES, STRETCHES_MEANT)
        return cls(over, "mean", lower, upper, outside, normalize, token_clamp, decay=decay)

    def _defaults(self) -> dict[str, object]:
        of_reduce: dict[Unit, object] = {"token": None, "prefix": "sum"}
        return {**super()._defaults(), "reduce": of_reduce.get(self.over, MISSING)}

    def _call(self) -> tuple[str, dict[str, object]]:
        name, defaults = super()._call()
        if self.over == "prefix":
            return name, defaults
        if self.over == "token":
            del defaults["over"]
        else:
            defaults["over"] = "sequence"
        del defaults["reduce"]
        return f"{name}.{self.kind}", defaults

    @property
    def kind(self) -> str:
        """The word for its ratio in descriptions: "token", "product", "geometric" or "prefix"."""
        if self.per_token:
            return self.over
        return "product" if self.is_product else "geometric"

    @property
    def is_product(self) -> bool:
        """True if it is the product of the ratios of a turn or a sequence."""
        return self.reduce == "sum" and not self.per_token

    @property
    def unit(self) -> Stretch:
        """The stretch of tokens that its ratio is over or that its prefixes begin in; "sequence" for tokens."""
        return "turn" if "turn" in (self.over, self.within) else "sequence"

    @property
    def is_token_ratio(self) -> bool:
        """True if its ratio is exp(D) of each token by itself, which statistics of D have too."""
        return self.over == "token" and self.token_clamp is None

    @property
    def per_token(self) -> bool:
        """True if every token has a weight of its own, rather than its turn's or sequence's."""
        return self.over in ("token", "prefix")

    @property
    def per_turn(self) -> bool:
        """True if all tokens of a turn have its weight."""
        return self.over == "turn"

    @property
    def self_normalized(self) -> bool:
        """True if weights are divided by the mean of their sequence or group."""
        return self.normalize in ("group", "sequence")

    @property
    def bounded(self) -> bool:
        """True if a bound is set."""
        return self.lower is not None or self.upper is not None

"""`Criterion`: a test of tokens, turns, sequences or prefixes, part of a `Spec`, and the comparison that decides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .bounds_of_batch import Bounded, OfBatch
from .checked import keywords_meant
from .choices import (
    DROP,
    POLICIES,
    REDUCTIONS,
    UNITS,
    UNITS_MEANT,
    WHEN,
    Drop,
    Growth,
    Of,
    Reduce,
    Stretch,
    Unit,
    When,
)
from .statistics import STATISTICS, Compared, Stat, Statistic
from .validate import choice, positive, shown

# The key of ages among the external tensors: no `Criterion.name` is empty.
AGE = ""
# Likewise of entropies, a name that no `Criterion` takes.
ENTROPY = "\0"

# Words of papers for the ratio of a sequence, wherever they stand.
PRODUCT, GEOMETRIC = (f"stat='ratio', over='sequence', reduce='{reduce}'" for reduce in ("sum", "mean"))
MEANT = {"product": PRODUCT, "geometric": GEOMETRIC}
STATS_MEANT = MEANT | {
    **dict.fromkeys(("kl", "KL"), "'k1', which is -D, or 'k3', which is never negative"),
    **dict.fromkeys(("logratio", "log_ratio"), "'k1', which is -D, or 'ratio' with bounds of the ratio"),
}


@keywords_meant(threshold="upper= (and lower=)", level="over=", max="upper=", min="lower=")
@dataclass(frozen=True, repr=False)
class Criterion(Bounded):
    """A test that a token, a turn or a sequence must pass: keep iff lower <= value <= upper, both inclusive.

    Args:
        stat: The statistic of a token, from D, p = exp(rollout_logp) and q = exp(train_logp): "ratio" (bounds in ratio
            space, aggregated in log space), "k1" -D, "k2" D^2/2, "k3" e^D-1-D, "k3_reverse" e^-D-1+D,
            "abs" |D|, "ratio_error" e^|D|, "ratio_deviation" |e^D-1|, "prob_diff" q-p, "tv" |q-p|, "binary_kl",
            "binary_kl_reverse", "binary_kl_symmetric", "age" current - version, of `Batch.versions`, "entropy", of
            `Batch.entropy`, or "external": the tensor of `Batch.external` under `name`.
        over: The unit that is tested, "token", "turn" (of `Batch.turns`), "sequence" or "prefix": each token by the
            tokens of its sequence up to and with it.
        reduce: The "sum", "mean", "max" or "min" of a turn's, sequence's or prefix's tokens is its value. Not with
            over="token".
        lower: Lowest value kept, or None for an open side; or a rule by which the batch decides it: `Quantile`, `TopK`.
        upper: Highest value kept, or None for an open side; or a rule: `Quantile`, `Bottom`, `MeanBelow`. A rule reads
            the units that are tested.
        when: The units that are tested. "negative_advantage", "positive_advantage" and "outward" (advantage and D have
            the same sign) need `advantages`. A turn or sequence is selected by its mean advantage over valid tokens;
            for "outward" by holding an outward token. With drop="token" it is tested if it holds a selected token.
        drop: A failure rejects the "unit" that was tested, all tokens of its "sequence", or only those tokens of the
            unit that `when` selects ("token"); for a prefix, the "unit" is its last token, and "rest" is that token and
            all later ones.
        of: The two policies compared. "new/rollout" and "new/old" exist only inside `policy_loss`.
        label: The prefix of this criterion's metrics; by default made from the other fields.
        name: The key of the tensor in `Batch.external`. Only with stat="external".
        token_clamp: Every D is clamped to +-token_clamp first; None: it is not.
        eps: The floor of 1-p and 1-q in the binary KLs.
        growth: "sqrt" multiplies both bounds, a ratio's as logs, by sqrt(t) at the t-th token. Only with over="prefix".
        within: Where a prefix begins and its "rest" ends: the "sequence", or each "turn" of one. Only with
            over="prefix".
    """

    stat: Stat
    over: Unit = "token"
    reduce: Reduce | None = None
    lower: float | OfBatch | None = None
    upper: float | OfBatch | None = None
    when: When = "any"
    drop: Drop = "unit"
    of: Of = "train/rollout"
    label: str = ""
    name: str | None = None
    token_clamp: float | None = None
    eps: float = 1e-8
    growth: Growth | None = None
    within: Stretch = "sequence"

    def __post_init__(self) -> None:
        choice("Criterion.stat", self.stat, tuple(STATISTICS), STATS_MEANT)
        choice("Criterion.over", self.over, UNITS, UNITS_MEANT | MEANT)
        choice("Criterion.when", self.when, WHEN)
        choice("Criterion.drop", self.drop, DROP)
        choice("Criterion.of", self.of, POLICIES)
        if self.over == "token" and self.reduce is not None:
            raise ValueError(
                f"Criterion.reduce: expected None with over='token', got {shown(self.reduce)}; for a value of all the "
                "tokens of a sequence write over='sequence'"
            )
        if self.over != "token":
            if self.reduce is None:
                raise ValueError(
                    f"Criterion.reduce: expected one of {list(REDUCTIONS)} with over={self.over!r}, got None"
                )
            choice("Criterion.reduce", self.reduce, REDUCTIONS, MEANT)
        if self.drop == "rest" and self.over != "prefix":
            raise ValueError(
                "Criterion.drop: 'rest' needs over='prefix'; for all from the first token beyond a bound write "
                f"over='prefix' with reduce='max' for upper, 'min' for lower, got over={self.over!r}"
            )
        fixed = "over='prefix'" if self.over == "prefix" else ""
        self._check_bounds("Criterion", fixed, signed=self.statistic.signed, ratio=self.stat == "ratio")
        if self.lower is None and self.upper is None:
            raise ValueError("Criterion: expected lower, upper or both, got neither (it could reject nothing)")
        if self.statistic.source == "caller":
            if not isinstance(self.name, str) or self.name in (AGE, ENTROPY):
                raise ValueError(f"Criterion.name: expected the key of an external tensor, got {shown(self.name)}")
        elif self.name is not None:
            raise ValueError(f"Criterion.name: expected None unless stat='external', got {shown(self.name)}")
        if not isinstance(self.label, str) or "/" in self.label:
            raise ValueError(f"Criterion.label: expected a string without '/', got {shown(self.label)}")
        self._set(eps=positive("Criterion.eps", self.eps))
        if not self.label:
            self._set(label=self._default_label())

    def _defaults(self) -> dict[str, object]:
        return {**super()._defaults(), "label": self._default_label()}

    def _default_label(self) -> str:
        # A tensor of the caller's may have the name of a statistic.
        named = f"external_{self.name}" if self.name in STATISTICS else self.name
        words = [self.over, self.reduce, named or self.stat]
        if self.of != "train/rollout":
            words.append("of_" + self.of.replace("/", "_"))
        if self.when != "any":
            words.append("when_" + self.when)
        if self.drop != "unit":
            words.append("drop_" + self.drop)
        if self.growth is not None:
            words.append("growth_" + self.growth)
        if self.within != "sequence":
            words.append("within_" + self.within)
        return "_".join(word for word in words if word)

    @property
    def per_token(self) -> bool:
        """True if every token is tested, alone or with those before it."""
        return self.over in ("token", "prefix")

    @property
    def statistic(self) -> Statistic:
        """The row of `stat`."""
        return STATISTICS[self.stat]

    @property
    def tensor_name(self) -> str | None:
        """The key of the tensor that the statistic reads in addition to log-probs: `name`, AGE or ENTROPY, or None."""
        return {"versions": AGE, "entropy": ENTROPY}.get(self.statistic.source, self.name)

    @property
    def drops_sequences(self) -> bool:
        """True if a failure rejects a whole sequence."""
        return self.drop == "sequence" or (self.drop == "unit" and self.over == "sequence")

    @property
    def thins(self) -> bool:
        """True if a failure drops only those tokens of the turn or sequence that `when` selects."""
        return self.drop == "token" and not self.per_token


# --- the comparison ---


class Threshold(NamedTuple):
    """Keep iff lower <= x <= upper and x is not inside the open interval `hole`; x is the quantity that `on` names."""

    on: Compared
    lower: float | None
    upper: float | None
    hole: tuple[float, float] | None = None


def threshold_of(criterion: Criterion) -> Threshold:
    """The comparison that decides `criterion`.

    A token, or the extremum of a sequence, is compared as a log-ratio wherever the statistic can be inverted, so that
    the last bits of exp, which differ between backends, decide nothing. So are ratios at every level, because they
    aggregate in log space.
    """
    row, lower, upper = criterion.statistic, criterion.low, criterion.high
    summed = criterion.reduce in ("sum", "mean")
    # A bound that grows is multiplied as it is: its inverse would grow otherwise.
    if row.inverse is not None and (row.log_space or not (summed or criterion.growth)):
        low = None if lower is None else row.inverse(lower)
        return Threshold(row.compared, low, None if upper is None else row.inverse(upper))
    if row.branches is not None and criterion.over == "token":
        outer: tuple[float | None, float | None] = (None, None) if upper is None else row.branches(upper)
        return Threshold(row.compared, *outer, row.branches(lower) if lower else None)
    return Threshold("value", lower, upper)

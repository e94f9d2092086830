"""The description of a correction: `Spec`, made of a `Weight` and of `Criterion`s.

They are frozen, hashable, picklable and checked when constructed. Each choice is a `Literal`, so that editors complete
it and type checkers refuse a misspelling; the tuples of its values are for checks at run time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from rollout_corr.spec.bounds_of_batch import OfBatch, Side, by_group, check_labels, number_of, rules_of, with_rules
from rollout_corr.spec.checked import Checked, arguments_of
from rollout_corr.spec.choices import (
    DETAIL,
    DROP,
    NONFINITE,
    POLICIES,
    REDUCTIONS,
    REJECTED,
    REPORTS,
    SUMS_OVER,
    UNITS,
    WEIGHT_UNITS,
    WHEN,
    Detail,
    Drop,
    Growth,
    Nonfinite,
    Of,
    Reduce,
    Rejected,
    Scheme,
    SumsOver,
    Unit,
    WeightUnit,
    When,
)
from rollout_corr.spec.explain import explain
from rollout_corr.spec.meant import keywords_meant
from rollout_corr.spec.statistics import STATISTICS, Stat, Statistic
from rollout_corr.spec.validate import bounds, choice, positive, shown
from rollout_corr.spec.weight import Weight as Weight
from rollout_corr.spec.weight import check_growth

# The key of ages among the external tensors: no `Criterion.name` is empty.
AGE = ""
# Likewise of entropies, a name that no `Criterion` takes.
ENTROPY = "\0"

# exp(2 * clamp) has to be finite in float32, because chi2 squares a ratio.
LARGEST_CLAMP = 40.0


@keywords_meant(threshold="upper= (and lower=)", level="over=", max="upper=", min="lower=")
@dataclass(frozen=True, repr=False)
class Criterion(Checked):
    """A test that a token, a turn or a sequence must pass: keep iff lower <= value <= upper, both inclusive.

    Args:
        stat: The statistic of a token, from D, p = exp(rollout_logp) and q = exp(train_logp): "ratio" (bounds in ratio
            space, aggregated in log space), "k1" -D, "k2" D^2/2, "k3" e^D-1-D, "k3_reverse" e^-D-1+D,
            "abs" |D|, "ratio_error" e^|D|, "ratio_deviation" |e^D-1|, "prob_diff" q-p, "tv" |q-p|, "binary_kl",
            "binary_kl_reverse", "binary_kl_symmetric", "age" current_version - version, of the `versions` given to the
            call, "entropy", given to the call too, or "external": a tensor given to the call under `name`.
        over: The unit that is tested, "token", "turn" (from `turns`), "sequence" or "prefix": each token by the tokens
            of its sequence up to and with it.
        reduce: The "sum", "mean", "max" or "min" of a turn's, sequence's or prefix's tokens is its value. Not with
            over="token".
        lower: Lowest value kept, or None for an open side; or a rule by which the batch decides it: `Quantile`, `TopK`.
        upper: Highest value kept, likewise: `Quantile`, `Bottom`, `MeanBelow`. The batch are the units that are tested.
        when: The units that are tested. "negative_advantage", "positive_advantage" and "outward" (advantage and D have
            the same sign) need `advantages`. A turn or sequence is selected by its mean advantage over valid tokens;
            for "outward" by holding an outward token. With drop="token" it is tested if it holds a selected token.
        drop: A failure rejects the "unit" that was tested, all tokens of its "sequence", or only those tokens of the
            unit that `when` selects ("token"); of a prefix the "unit" is its last token, and "rest" is that and every
            later token of the sequence.
        of: The two policies compared. "new/rollout" and "new/old" exist only inside `policy_loss`.
        label: The prefix of this criterion's metrics; by default made from the other fields.
        name: The key of the tensor in `external={name: tensor}`. Only with stat="external".
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
    within: WeightUnit = "sequence"

    def __post_init__(self) -> None:
        choice("Criterion.stat", self.stat, tuple(STATISTICS))
        choice("Criterion.over", self.over, UNITS)
        choice("Criterion.when", self.when, WHEN)
        choice("Criterion.drop", self.drop, DROP)
        choice("Criterion.of", self.of, POLICIES)
        if self.over == "token" and self.reduce is not None:
            raise ValueError(f"Criterion.reduce: expected None with over='token', got {shown(self.reduce)}")
        if self.over != "token":
            if self.reduce is None:
                raise ValueError(
                    f"Criterion.reduce: expected one of {list(REDUCTIONS)} with over={self.over!r}, got None"
                )
            choice("Criterion.reduce", self.reduce, REDUCTIONS)
        if self.drop == "rest" and self.over != "prefix":
            raise ValueError(
                "Criterion.drop: 'rest' needs over='prefix'; for all from the first token beyond a bound write "
                f"over='prefix' with reduce='max' for upper, 'min' for lower, got over={self.over!r}"
            )
        check_growth("Criterion", self.growth, "over='prefix'", self.over == "prefix")
        choice("Criterion.within", self.within, WEIGHT_UNITS)
        if self.within != "sequence" and self.over != "prefix":
            raise ValueError(f"Criterion.within: expected its default unless over='prefix', got {shown(self.within)}")
        signed, ratio = self.statistic.signed, self.stat == "ratio"
        low, high = bounds("Criterion", self.low, self.high, signed=signed, ratio=ratio)
        rules = self.rules
        lower, upper = rules.get("lower", low), rules.get("upper", high)
        for side, rule in rules.items():
            rule.check("Criterion", side)
            if self.over == "prefix":
                raise ValueError(f"Criterion.{side}: expected a number with over='prefix', got {rule!r}")
        if lower is None and upper is None:
            raise ValueError("Criterion: expected lower, upper or both, got neither (it could reject nothing)")
        if self.statistic.source == "caller":
            if not isinstance(self.name, str) or self.name in (AGE, ENTROPY):
                raise ValueError(f"Criterion.name: expected the key of an external tensor, got {shown(self.name)}")
        elif self.name is not None:
            raise ValueError(f"Criterion.name: expected None unless stat='external', got {shown(self.name)}")
        if not isinstance(self.label, str) or "/" in self.label:
            raise ValueError(f"Criterion.label: expected a string without '/', got {shown(self.label)}")
        self._set(lower=lower, upper=upper, eps=positive("Criterion.eps", self.eps))
        if self.token_clamp is not None:
            self._set(token_clamp=positive("Criterion.token_clamp", self.token_clamp))
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
    def low(self) -> float | None:
        """`lower` where it is a number."""
        return number_of(self.lower)

    @property
    def high(self) -> float | None:
        """`upper` where it is a number."""
        return number_of(self.upper)

    @property
    def rules(self) -> dict[Side, OfBatch]:
        """The bounds that the batch decides."""
        return rules_of(self.lower, self.upper)

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
        """The key of the tensor that the statistic reads beside log-probs: `name`, AGE or ENTROPY; None: none."""
        return {"versions": AGE, "entropy": ENTROPY}.get(self.statistic.source, self.name)

    @property
    def drops_sequences(self) -> bool:
        """True if a failure rejects a whole sequence."""
        return self.drop == "sequence" or (self.drop == "unit" and self.over == "sequence")

    @property
    def thins(self) -> bool:
        """True if a failure drops only those tokens of the turn or sequence that `when` selects."""
        return self.drop == "token" and not self.per_token


@keywords_meant(
    weights="weight=Weight(...)", criterion="criteria=(Criterion(...),)", reject="criteria=(Criterion(...),)"
)
@dataclass(frozen=True, repr=False)
class Spec(Checked):
    """A whole correction. `Spec()` measures and changes nothing.

    Args:
        weight: The importance weight, or None.
        criteria: Criteria that must all pass; their order has no effect.
        rejected: Rejection removes a token from the "mask" handed back, makes its weight "zero", or does "both".
        clamp: The aggregated log-ratio is clamped to +-clamp before exp; so is D in the exp-based statistics.
        nonfinite: For a valid token whose D is NaN or infinite: "reject" its sequence (weight 0, keep False), read it
            as D = 0 and both its log-probs as 0 ("neutral"), or let NaN and infinity into the results ("propagate").
            Such tokens are counted in every case.
        sums_over: Sequence weights and criteria run over the "valid" tokens, or over those "kept" by token criteria.
        detail: "full" adds the histogram of D (percentiles), probabilities and divergences that take
            more exponentials.
        apply: False makes a dry run: everything is computed and reported, but `weights` is None and the mask is the
            one given.
        report: The naming schemes whose metrics are wanted; "native" is always among them.
        turns: Measure turns beside sequences, which calls have to bring. A call with `turns` measures them whatever
            this says; a weight or a criterion over turns needs them.
    """

    weight: Weight | None = None
    criteria: tuple[Criterion, ...] = ()
    rejected: Rejected = "mask"
    clamp: float = 20.0
    nonfinite: Nonfinite = "reject"
    sums_over: SumsOver = "valid"
    detail: Detail = "basic"
    apply: bool = True
    report: tuple[Scheme, ...] = ("native",)
    turns: bool = False

    # No fields, but found once when a Spec is made, because every call asks for them.
    has_prefixes: ClassVar[bool]  # anything depends on the order of a sequence's tokens
    measures_turns: ClassVar[bool]  # a call needs turns
    asks_batch: ClassVar[bool]  # the batch decides a bound
    asks_groups: ClassVar[bool]  # groups of sequences do, each for itself
    needs_groups: ClassVar[bool]  # calls have to name the groups of sequences
    reads_entropy: ClassVar[bool]  # a criterion tests the entropy of tokens
    reads_versions: ClassVar[bool]  # a criterion tests the age of tokens, or the weight decays with it

    def __post_init__(self) -> None:
        if self.weight is not None and not isinstance(self.weight, Weight):
            raise TypeError(
                f"Spec.weight: expected a Weight or None, got {type(self.weight).__name__} {shown(self.weight)}"
            )
        if isinstance(self.criteria, Criterion) or not isinstance(self.criteria, Iterable):
            raise TypeError(f"Spec.criteria: expected a tuple of Criterion, got {type(self.criteria).__name__}")
        criteria = tuple(self.criteria)
        for item in criteria:
            if not isinstance(item, Criterion):
                raise TypeError(f"Spec.criteria: expected Criterion, got {type(item).__name__} {shown(item)}")
        labels = [item.label for item in criteria]
        twice = sorted(label for i, label in enumerate(labels) if label in labels[:i])
        if twice:
            raise ValueError(f"Spec.criteria: expected different labels, got {twice[0]!r} twice; set Criterion.label")
        check_labels(labels, {} if self.weight is None else self.weight.rules)
        choice("Spec.rejected", self.rejected, REJECTED)
        choice("Spec.nonfinite", self.nonfinite, NONFINITE)
        choice("Spec.sums_over", self.sums_over, SUMS_OVER)
        choice("Spec.detail", self.detail, DETAIL)
        if not isinstance(self.apply, bool):
            raise TypeError(f"Spec.apply: expected True or False, got {type(self.apply).__name__} {shown(self.apply)}")
        if not isinstance(self.turns, bool):
            raise TypeError(f"Spec.turns: expected True or False, got {type(self.turns).__name__} {shown(self.turns)}")
        if isinstance(self.report, str) or not isinstance(self.report, Iterable):
            raise TypeError(
                f"Spec.report: expected a tuple of names, got {type(self.report).__name__} {shown(self.report)}"
            )
        for scheme in self.report:
            choice("Spec.report", scheme, REPORTS)
        over_turns = any("turn" in (item.over, item.within) for item in criteria)
        over_turns |= self.weight is not None and self.weight.over == "turn"
        self._set(
            has_prefixes=self.weighs_prefixes or any(item.over == "prefix" for item in criteria),
            measures_turns=self.turns or over_turns,
            asks_batch=any(item.rules for item in (self.weight, *criteria) if item is not None),
            asks_groups=any(by_group(item.rules) for item in criteria),
            needs_groups=self.normalizes_groups or any(by_group(item.rules) for item in criteria),
            reads_entropy=any(item.tensor_name == ENTROPY for item in criteria),
            reads_versions=(self.weight is not None and self.weight.decay is not None)
            or any(item.tensor_name == AGE for item in criteria),
        )
        if self.has_prefixes and len(set(self.report) | {"native"}) > 1:
            raise ValueError(
                "Spec.report: expected ('native',) beside prefixes, which no framework has metrics of, got "
                f"{shown(self.report)}"
            )
        if len(set(self.report) | {"native"}) > 1 and self.weight is not None and self.weight.self_normalized:
            raise ValueError(
                f"Spec.report: expected ('native',) beside normalize={self.weight.normalize!r}, which no framework has "
                f"metrics of, got {shown(self.report)}"
            )
        if self.asks_batch and len(set(self.report) | {"native"}) > 1:
            raise ValueError(
                "Spec.report: expected ('native',) beside bounds that the batch decides, which no framework has "
                f"metrics of, got {shown(self.report)}"
            )
        report = tuple(scheme for scheme in REPORTS if scheme == "native" or scheme in self.report)
        self._set(criteria=criteria, clamp=positive("Spec.clamp", self.clamp, LARGEST_CLAMP), report=report)
        if len(report) > 1 and over_turns:
            # The metrics of frameworks have names for tokens and sequences alone.
            raise ValueError(f"Spec.report: expected ('native',) with a weight or criterion over turns, got {report}")

    def __hash__(self) -> int:
        """The hash of the fields, found once: every call looks up by its Spec what was prepared for it."""
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = hash(tuple(getattr(self, field.name) for field in fields(self)))
            self._set(_hash=found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash, which another process may find otherwise."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def weighs_prefixes(self) -> bool:
        """True if the weight of a token depends on those before it."""
        return self.weight is not None and self.weight.level == "prefix"

    @property
    def weighs_tokens(self) -> bool:
        """True if every token has a weight of its own."""
        return self.weight is not None and self.weight.per_token

    @property
    def normalizes_groups(self) -> bool:
        """True if weights are divided by the mean of a group of sequences, which calls have to name."""
        return self.weight is not None and self.weight.normalize == "group"

    @property
    def acts(self) -> bool:
        """True if there is a weight or a criterion, and so something to do besides measuring."""
        return self.weight is not None or len(self.criteria) > 0

    @property
    def rejects_nonfinite(self) -> bool:
        """True if a token whose D is not finite rejects its sequence."""
        return self.nonfinite == "reject" and self.acts

    @property
    def rejects(self) -> bool:
        """True if anything can be rejected."""
        return len(self.criteria) > 0 or self.rejects_nonfinite

    @property
    def edits_mask(self) -> bool:
        """True if the mask handed back can differ from the one given."""
        return self.apply and self.rejected != "zero" and self.rejects

    @property
    def returns_weights(self) -> bool:
        """True if weights are handed back: those of `weight`, or the 0 and 1 of rejection."""
        return self.apply and (self.weight is not None or self.rejected != "mask")

    def explain(self) -> str:
        """Describe in plain words what will happen, step by step."""
        return explain(self)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Spec:
        """Build a Spec from plain data, the inverse of `to_dict`.

        Args:
            mapping: Keys are field names. `weight` is a mapping, `criteria` a list of mappings; their bounds are
                `lower` and `upper`, or `bounds: [lower, upper]` with null for an open side. A bound is a number, or
                a rule for one that the batch decides: `{"rule": "Quantile", "q": 0.99}`.

        Raises:
            ValueError: An unknown key or a wrong value, named.
            TypeError: A value of the wrong type, named.
        """
        arguments = arguments_of(cls, mapping, "Spec")
        if arguments.get("weight") is not None:
            of_weight = arguments_of(Weight, arguments["weight"], "Spec.weight")
            arguments["weight"] = Weight(**with_rules(of_weight, "Spec.weight"))
        criteria = arguments.get("criteria", ())
        if isinstance(criteria, (str, Mapping)) or not isinstance(criteria, Iterable):
            raise TypeError(
                f"Spec.criteria: expected a list of mappings, got {type(criteria).__name__} {shown(criteria)}"
            )
        arguments["criteria"] = tuple(
            Criterion(**with_rules(arguments_of(Criterion, item, f"Spec.criteria[{i}]"), f"Spec.criteria[{i}]"))
            for i, item in enumerate(criteria)
        )
        return cls(**arguments)

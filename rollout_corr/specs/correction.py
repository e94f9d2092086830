"""The description of a correction: `Spec`, made of a `Weight` and of `Criterion`s.

They are frozen, hashable, picklable and checked when constructed. Each choice is a `Literal`, so that editors complete
it and type checkers refuse a misspelling; the tuples of its values are for checks at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from .bounds_of_batch import WEIGHT, OfBatch, Place, by_group, check_labels
from .checked import Checked, arguments_of, hash_once, keywords_meant, without_hash
from .choices import DETAIL, NONFINITE, REJECTED, REPORTS, SUMS_OVER, Detail, Nonfinite, Rejected, Scheme, SumsOver
from .criterion import AGE, ENTROPY
from .criterion import Criterion as Criterion
from .validate import LARGEST_CLAMP, boolean, choice, positive, wrong_type
from .weight import Weight as Weight

# Called with each new Spec that asks for a framework's metrics: who imports these does so then, because a function that
# torch.compile traces cannot.
WHEN_REPORTING: list[Callable[[Spec], None]] = []


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
        detail: "full" adds histograms of D and of weights (percentiles), probabilities and divergences that take
            more exponentials.
        apply: False makes a dry run: everything is computed and reported, but `weights` is None and the mask is the
            one given.
        report: The naming schemes whose metrics are wanted; "native" is always among them.
        turns: Measure turns as well as sequences, which the Batch has to hold. A Batch with turns is measured by them
            whatever this says; a weight or a criterion over turns needs them.
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
            raise wrong_type("Spec.weight", "a Weight or None", self.weight)
        if isinstance(self.criteria, Criterion) or not isinstance(self.criteria, Iterable):
            raise TypeError(f"Spec.criteria: expected a tuple of Criterion, got {type(self.criteria).__name__}")
        criteria = tuple(self.criteria)
        for item in criteria:
            if not isinstance(item, Criterion):
                raise wrong_type("Spec.criteria", "Criterion", item)
        labels = [item.label for item in criteria]
        twice = sorted(label for i, label in enumerate(labels) if label in labels[:i])
        if twice:
            raise ValueError(f"Spec.criteria: expected different labels, got {twice[0]!r} twice; set Criterion.label")
        check_labels(labels, {} if self.weight is None else self.weight.rules)
        choice("Spec.rejected", self.rejected, REJECTED)
        choice("Spec.nonfinite", self.nonfinite, NONFINITE)
        choice("Spec.sums_over", self.sums_over, SUMS_OVER)
        choice("Spec.detail", self.detail, DETAIL)
        boolean("Spec.apply", self.apply)
        boolean("Spec.turns", self.turns)
        if isinstance(self.report, str) or not isinstance(self.report, Iterable):
            raise wrong_type("Spec.report", "a tuple of names", self.report)
        for scheme in self.report:
            choice("Spec.report", scheme, REPORTS)
        over_turns = any("turn" in (item.over, item.within) for item in criteria)
        over_turns |= self.weight is not None and self.weight.unit == "turn"
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
        report = tuple(scheme for scheme in REPORTS if scheme == "native" or scheme in self.report)
        self._set(criteria=criteria, clamp=positive("Spec.clamp", self.clamp, LARGEST_CLAMP), report=report)
        if len(report) > 1:
            divides = self.weight is not None and self.weight.self_normalized
            own = {
                "prefixes": self.has_prefixes,
                "normalize='group' or 'sequence'": divides,
                "bounds that the batch decides": self.asks_batch,
                "a weight or criterion over turns": over_turns,
            }
            for what in (what for what, is_there in own.items() if is_there):
                wanted = f"('native',) with {what}, which no framework has metrics of"
                raise ValueError(f"Spec.report: expected {wanted}, got {report}")
            for prepare in WHEN_REPORTING:
                prepare(self)

    def __hash__(self) -> int:
        """The hash of the fields, found once: every call looks up by its Spec what was prepared for it."""
        return hash_once(self)

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash, which another process may find otherwise."""
        return without_hash(self)

    @property
    def weighs_prefixes(self) -> bool:
        """True if the weight of a token depends on those before it."""
        return self.weight is not None and self.weight.over == "prefix"

    @property
    def weighs_tokens(self) -> bool:
        """True if every token has a weight of its own."""
        return self.weight is not None and self.weight.per_token

    @property
    def weighs_turns(self) -> bool:
        """True if all tokens of a turn have its weight."""
        return self.weight is not None and self.weight.per_turn

    @property
    def normalizes_groups(self) -> bool:
        """True if weights are divided by the mean of a group of sequences, which calls have to name."""
        return self.weight is not None and self.weight.normalize == "group"

    @property
    def acts(self) -> bool:
        """True if there is a weight or a criterion, so that a call does more than measure."""
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
        """True if weights are returned: the `weight`, or the 0 and 1 of rejection."""
        return self.apply and (self.weight is not None or self.rejected != "mask")

    def explain(self) -> str:
        """Describe in plain words what will happen: one numbered step a line, in the order in which things happen."""
        from .explain import DETAIL, NONFINITE, REJECTED, step_of_criterion, steps_of_weight

        steps = ["D = train_logp - rollout_logp, in float32 or float64, at every valid token."]
        nonfinite = NONFINITE[self.nonfinite]
        if self.nonfinite == "reject" and not self.acts:
            nonfinite = "it is only counted, because this Spec changes nothing"
        steps.append(f"If D is NaN or infinite, {nonfinite}.")
        if self.weight is not None:
            steps += steps_of_weight(self.weight, self.clamp, self.sums_over, self.nonfinite)
        steps += [step_of_criterion(criterion, self.sums_over) for criterion in self.criteria]
        if self.criteria:
            steps.append(REJECTED[self.rejected])
        elif self.weight is None:
            steps.append("There is no weight and no criterion: everything is measured, nothing is changed.")
        if self.measures_turns:
            steps.append("Turns, stretches of a sequence that the call brings, are measured as well as sequences.")
        if not self.apply:
            steps.append("Dry run: all of this is reported, but no weights are returned and the mask stays as given.")
        peers = [scheme for scheme in self.report if scheme != "native"]
        named = f"; also the metrics of {' and '.join(peers)}." if peers else "."
        steps.append(f"Metrics: {DETAIL[self.detail]}{named}")
        return "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))

    def to_config(self, framework: str, **options: Any) -> dict[str, Any]:
        """Write a framework's own settings, which `rc.spec(framework, settings)` reads as this Spec.

        They cover the correction, not the loss. docs/migrate.md says where they
        stand in each framework's configuration. Labels and `report` are the framework's own; neither those nor the
        order of criteria, a lower bound of 0 of a ratio or `sums_over` where nothing sums change a weight or a mask.
        Bounds that a framework takes the logarithm of are rounded, by 1e-15.

        Args:
            framework: A name that `rc.spec` takes together with a configuration; another name raises and lists them.
            **options: The reader's, as for `rc.spec`: k1_bounds.

        Returns:
            Plain numbers, strings, lists and mappings, for YAML or JSON.

        Raises:
            ValueError: The framework has no settings for it; the fields that have none are named.
        """
        # By name, because the core imports no framework.
        writing = import_module(f"{__name__.partition('.')[0]}.frameworks.shared.writing")
        settings: dict[str, Any] = writing.written(self, framework, options)
        return settings

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
        from .rules import with_rules

        arguments = arguments_of(cls, mapping, "Spec")
        if arguments.get("weight") is not None:
            of_weight = arguments_of(Weight, arguments["weight"], "Spec.weight")
            arguments["weight"] = Weight(**with_rules(of_weight, "Spec.weight"))
        criteria = arguments.get("criteria", ())
        if isinstance(criteria, (str, Mapping)) or not isinstance(criteria, Iterable):
            raise wrong_type("Spec.criteria", "a list of mappings", criteria)
        arguments["criteria"] = tuple(
            Criterion(**with_rules(arguments_of(Criterion, item, f"Spec.criteria[{i}]"), f"Spec.criteria[{i}]"))
            for i, item in enumerate(criteria)
        )
        return cls(**arguments)


def rules_of(spec: Spec) -> dict[Place, OfBatch]:
    """The bounds of a Spec that the batch decides, in the order that everything keeps which lists them."""
    of_weight = {} if spec.weight is None else {Place(WEIGHT, side): rule for side, rule in spec.weight.rules.items()}
    return of_weight | {Place(c.label, side): rule for c in spec.criteria for side, rule in c.rules.items()}


def places_of(spec: Spec) -> tuple[Place, ...]:
    """The places of a Spec's bounds that the batch decides."""
    return tuple(rules_of(spec))


def no_spec(value: object, wanted: str = "a Spec") -> TypeError:
    """Make the error for what is no Spec, with the call that makes one of it."""
    hint = ""
    if isinstance(value, str):
        hint = f" {value!r}; rc.spec({value!r}) makes one of a name"
    elif isinstance(value, Mapping):
        hint = "; a framework's settings become one by rc.spec(framework, settings), plain data by Spec.from_dict"
    elif isinstance(value, (Weight, Criterion)):
        field = f"weight={value!r}" if isinstance(value, Weight) else f"criteria=({value!r},)"
        hint = f"; write Spec({field})"
    elif type(value).__name__ == "Recipe":
        hint = "; of a recipe pass its .spec, and its .loss as loss= of policy_loss"
    elif type(value).__name__ == "Loss":
        hint = "; a Loss is loss=... of policy_loss"
    return TypeError(f"spec: expected {wanted}, got {type(value).__name__}{hint}")

"""Building blocks of recipes: the arguments that a framework's training step gives `policy_loss`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from rollout_corr.frameworks.shared import lookup
from rollout_corr.frameworks.shared.lookup import RecipeEntry as RecipeEntry
from rollout_corr.frameworks.shared.preset import registered
from rollout_corr.specs.choices import Outside
from rollout_corr.specs.correction import Spec
from rollout_corr.specs.surrogate import RatioOf, Surrogate
from rollout_corr.specs.surrogates import PPO, Score
from rollout_corr.specs.terms import KL, Denominator, KLKind, KLWeight, LossReduction, Scope, SquaredLogRatio
from rollout_corr.specs.validate import number, one_of

T_co = TypeVar("T_co", covariant=True)

# Log-probs that a recipe needs besides new_logp.
DECOUPLED, BOTH, BYPASS = ("old_logp",), ("old_logp", "rollout_logp"), ("rollout_logp",)
WITH_REFERENCE = ("old_logp", "ref_logp")

SEQUENCES: LossReduction = "sequence_mean_token_mean"
# verl's words for reductions, which most frameworks have taken over.
AGGREGATIONS: dict[str, LossReduction] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": SEQUENCES,
    "seq-mean-token-sum": "sequence_mean_token_sum",
}

# Notes that several frameworks share.
GLOBAL = "pass the tokens of all ranks as the denominator"
SAME_AS_PPO = "the loss of ppo: GRPO is in the advantages"
NO_LOWER_CLAMP = "its log-ratio has no lower clamp, that of this package -10"


class Named(Generic[T_co]):
    """A part of a recipe that is made from settings, by the framework's names for them.

    Args:
        make: Takes the settings by position.
        **settings: Their names and defaults, in the order in which `make` takes them.
    """

    def __init__(self, make: Callable[..., T_co], /, **settings: Any) -> None:
        self.make, self.settings = make, settings

    def taken_from(self, given: dict[str, Any]) -> T_co:
        """Make the part, and remove its settings from those given."""
        return self.make(*[given.pop(name, default) for name, default in self.settings.items()])


def recipe(
    surrogate: Surrogate | Named[Surrogate],
    needs: tuple[str, ...],
    note: str = "",
    *,
    spec: str | Named[Spec] | None = None,
    reduction: LossReduction | Named[LossReduction] = "token_mean",
    denominator: Denominator = "original",
    **terms: Any,
) -> RecipeEntry:
    """Describe a recipe by its parts.

    Args:
        surrogate: The loss of a token.
        needs: The log-probs that the call needs besides new_logp.
        note: A remark for users of the framework.
        spec: The correction: the name of a preset, whose arguments are then settings of the recipe.
        reduction: As in `policy_loss`.
        denominator: As in `policy_loss`.
        **terms: kl, regularizer, max_length or turns; one that is None is left out.
    """

    def build(**settings: Any) -> dict[str, Any]:
        def part(value: Any) -> Any:
            return value.taken_from(settings) if isinstance(value, Named) else value

        parts = [part(value) for value in (surrogate, reduction)]
        more = {name: part(value) for name, value in terms.items()}
        if isinstance(spec, str):
            return arguments(parts[0], lookup.named(spec, **settings), parts[1], denominator, **more)
        made = part(spec)
        if settings:
            raise TypeError(f"got an unexpected keyword argument {next(iter(settings))!r}")
        return arguments(parts[0], made, parts[1], denominator, **more)

    return RecipeEntry(build, needs, note)


def of_presets(
    framework: str, surrogate: Surrogate | Named[Surrogate], needs: tuple[str, ...], note: str = "", **parts: Any
) -> dict[str, RecipeEntry]:
    """Describe one recipe for each preset that a framework has registered, under the preset's name."""
    names = [found.name for found in registered(framework)]
    return {name.partition(".")[2]: recipe(surrogate, needs, note, spec=name, **parts) for name in names}


def arguments(
    surrogate: Surrogate,
    spec: Spec | None = None,
    reduction: LossReduction = "token_mean",
    denominator: Denominator = "original",
    **terms: Any,
) -> dict[str, Any]:
    """Return the arguments of `policy_loss`; a term that is None is left out."""
    made = {"surrogate": surrogate, "spec": spec, "reduction": reduction, "denominator": denominator}
    return made | {name: term for name, term in terms.items() if term is not None}


# --- parts ---


def preset_with(name: str, /, **settings: tuple[str, Any]) -> Named[Spec]:
    """Return a preset whose arguments have other names in the loss: `setting=(argument, default)`."""
    argument_names = [argument for argument, _ in settings.values()]

    def make(*values: Any) -> Spec:
        return lookup.named(name, **dict(zip(argument_names, values, strict=True)))

    return Named(make, **{setting: default for setting, (_, default) in settings.items()})


def as_wide(make: Callable[..., Surrogate]) -> Callable[..., Surrogate]:
    """Let the upper side, the second setting, be None: then it is as wide as the lower."""

    def made(low: float, high: float | None, *more: Any) -> Surrogate:
        return make(low, low if high is None else high, *more)

    return made


clip = as_wide(PPO)


def around_one(low: float, high: float, outside: Outside = "clamp", of: RatioOf | None = None) -> Score:
    """Return a score function weighted by the ratio, bounded to [1 - low, 1 + high]: CISPO."""
    return Score(1.0 - low, 1.0 + high, outside, of=of)


def penalty(
    kind: KLKind = "k3",
    /,
    *,
    value_clamp: float | None = None,
    weight: KLWeight | None = None,
    **coefficient: float | None,
) -> Named[KL | None]:
    """Return the KL term, by the framework's name for its coefficient; without a coefficient there is no term."""
    (name,) = coefficient

    def made(coef: float | None) -> KL | None:
        if coef is None or number(name, coef) == 0.0:
            return None
        return KL(kind, coef, value_clamp=value_clamp, weight=weight)

    return Named(made, **coefficient)


def anchor(over: Scope, /, **tau: float) -> Named[SquaredLogRatio]:
    """Return the squared log-ratio as a regularizer, by the framework's name for its coefficient."""
    return Named(lambda coefficient: SquaredLogRatio(coefficient, over), **tau)


def reduction(words: dict[str, LossReduction] = AGGREGATIONS, /, **setting: str) -> Named[LossReduction]:
    """Return the reduction, by the framework's setting and its words for reductions."""
    (name,) = setting
    return Named(partial(aggregation, name, words), **setting)


def aggregation(setting: str, words: dict[str, LossReduction], mode: str) -> LossReduction:
    """Translate a framework's word for a reduction."""
    return words[one_of(setting, mode, words)]

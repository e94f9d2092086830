"""Building blocks of recipes: the Spec and the Loss of a framework's training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from ...specs.choices import Outside
from ...specs.correction import Spec
from ...specs.loss import Loss
from ...specs.ratio_losses import GSPO, PPO
from ...specs.score_losses import Score
from ...specs.surrogate import RatioOf, Surrogate
from ...specs.terms import KL, KLKind, KLWeight, Mean, MeanOver, Scope, SquaredLogRatio
from ...specs.validate import number, one_of
from .preset import PRESETS, RECIPES, RecipeEntry, registered
from .preset import Recipe as Recipe
from .settings import default_of, defaults_of, refuse_wrong_types

T_co = TypeVar("T_co", covariant=True)

# Log-probs that a recipe needs besides new_logp.
DECOUPLED, BOTH, BYPASS = ("old_logp",), ("old_logp", "rollout_logp"), ("rollout_logp",)
WITH_REFERENCE, BYPASS_WITH_REFERENCE = ("old_logp", "ref_logp"), ("rollout_logp", "ref_logp")

TOKENS, SEQUENCES, ROWS = Mean("token"), Mean("sequence"), Mean("sequence", over="rows")
# verl's words for means, which most frameworks have taken over.
AGGREGATIONS = {"token-mean": TOKENS, "seq-mean-token-mean": SEQUENCES, "seq-mean-token-sum": Mean("sequence_sum")}

# verl's words for its KLs.
KL_KINDS: dict[str, KLKind] = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}
KL_KINDS |= {"k1": "k1", "k2": "k2", "k3": "k3"}

# Notes that several frameworks share.
GLOBAL = "total: tokens of all ranks"
SAME_AS_PPO = "the loss of ppo: GRPO is in the advantages"
NO_LOWER_CLAMP = "it does not clamp the log-ratio from below; this package clamps it at -10"
OPEN_ENDS = "its bounds exclude their ends; this package includes them"


class Named(Generic[T_co]):
    """A part of a recipe that `make` builds from settings, by position; names and defaults are the framework's."""

    def __init__(self, make: Callable[..., T_co], /, **settings: Any) -> None:
        self.make, self.settings = make, settings

    def taken_from(self, given: dict[str, Any]) -> T_co:
        """Make the part, and remove its settings from those given."""
        return self.make(*[given.pop(name, default) for name, default in self.settings.items()])


def named_recipe(
    name: str,
    surrogate: Surrogate | Named[Surrogate],
    needs: tuple[str, ...],
    note: str = "",
    *,
    spec: str | Named[Spec] | None = None,
    mean: Mean | Named[Mean] = TOKENS,
    over: MeanOver | None = None,
    kl: Named[KL | None] | None = None,
    regularizer: Named[SquaredLogRatio | None] | None = None,
    **batch: Any,
) -> None:
    """Register a recipe by its parts.

    Args:
        name: "framework.recipe".
        surrogate: The loss of a token.
        needs: The log-probs that the call needs besides new_logp.
        note: A remark for users of the framework.
        spec: The correction: the name of a preset, whose arguments are then settings of the recipe.
        mean: The mean of the loss, over what `over` says, if that is given.
        over: See `mean`.
        kl: The KL to the reference policy.
        regularizer: The squared log-ratio.
        **batch: Fields that the caller's Batch has to have.
    """

    def build(**settings: Any) -> Recipe:
        def part(value: Any) -> Any:
            return value.taken_from(settings) if isinstance(value, Named) else value

        of = part(surrogate), part(mean), part(kl), part(regularizer)
        if isinstance(spec, str):
            corrects: Spec | None = PRESETS[spec].build(**settings)
        else:
            corrects = part(spec)
            if settings:
                raise TypeError(f"got an unexpected keyword argument {next(iter(settings))!r}")
        loss = Loss(of[0], of[1] if over is None else replace(of[1], over=over), of[2], of[3])
        return Recipe(corrects, loss, batch)

    table = dict(PRESETS[spec].settings) if isinstance(spec, str) else {}
    for part in (surrogate, mean, kl, regularizer, spec):
        table |= part.settings if isinstance(part, Named) else {}
    RECIPES[name] = RecipeEntry(build, table, needs, note)


def built_recipe(
    name: str,
    build: Callable[..., Recipe],
    needs: tuple[str, ...],
    note: str = "",
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Register a recipe by the function that makes it, whose parameters are its settings, if no others are said.

    A text or a tensor, which would count as true, is refused where the default is a number, None or a bool.
    """
    table = defaults_of(build) if settings is None else settings

    def checked(**given: Any) -> Recipe:
        refuse_wrong_types(table, given)
        return build(**given)

    RECIPES[name] = RecipeEntry(checked, {key: default_of(setting) for key, setting in table.items()}, needs, note)


def of_presets(
    framework: str, surrogate: Surrogate | Named[Surrogate], needs: tuple[str, ...], note: str = "", **parts: Any
) -> None:
    """Register one recipe for each preset that a framework has registered, under the preset's name."""
    for found in registered(framework):
        named_recipe(found.name, surrogate, needs, note, spec=found.name, **parts)


# --- parts ---


def preset_with(name: str, /, **settings: tuple[str, Any]) -> Named[Spec]:
    """Return a preset whose arguments have other names in the loss: `setting=(argument, default)`."""
    argument_names = [argument for argument, _ in settings.values()]

    def make(*values: Any) -> Spec:
        return PRESETS[name].build(**dict(zip(argument_names, values, strict=True)))

    return Named(make, **{setting: default for setting, (_, default) in settings.items()})


def as_wide(make: Callable[..., Surrogate]) -> Callable[..., Surrogate]:
    """Let the upper side, the second setting, be None: then it is as wide as the lower."""

    def made(low: float, high: float | None, *more: Any) -> Surrogate:
        return make(low, low if high is None else high, *more)

    return made


clip = as_wide(PPO)
GSPO_TOKEN = as_wide(partial(GSPO, through="token", clamp=10.0))


def clip_of_sides(both: float, low: float | None, high: float | None, dual: float | None = None) -> PPO:
    """Return PPO's clip, whose sides are as wide as `both` where they are not given."""
    return PPO(both if low is None else low, both if high is None else high, dual)


def around_one(low: float, high: float, outside: Outside = "clamp", of: RatioOf | None = None) -> Score:
    """Return a score function weighted by the ratio, bounded to [1 - low, 1 + high]: CISPO."""
    # No ratio is below 0.
    return Score(max(0.0, 1.0 - low), 1.0 + high, outside, of=of)


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


def anchor(over: Scope, /, **tau: float) -> Named[SquaredLogRatio | None]:
    """Return the squared log-ratio as a regularizer, by the framework's name for its coefficient; 0 is none."""
    return Named(lambda coefficient: SquaredLogRatio(coefficient, over) if coefficient != 0.0 else None, **tau)


def mean(words: dict[str, Mean] = AGGREGATIONS, /, **setting: str) -> Named[Mean]:
    """Return the mean, by the framework's setting and its words for means."""
    (name,) = setting
    return Named(partial(aggregation, name, words), **setting)


def aggregation(setting: str, words: dict[str, Mean], mode: str) -> Mean:
    """Translate a framework's word for a mean."""
    return words[one_of(setting, mode, words)]

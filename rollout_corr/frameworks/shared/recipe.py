"""Building blocks of recipes: the Spec and the Loss of a framework's training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from ...specs.choices import Outside
from ...specs.correction import Spec
from ...specs.loss import Loss
from ...specs.surrogate import RatioOf, Surrogate
from ...specs.surrogates import GSPO, PPO, Score
from ...specs.terms import KL, KLKind, KLWeight, Mean, MeanOver, Scope, SquaredLogRatio
from .preset import PRESETS, RECIPES, RecipeEntry, registered
from .preset import Recipe as Recipe
from .settings import Given, maybe, word

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

    def of(self, given: Mapping[str, Any]) -> T_co:
        """Make the part from settings, among which are all of its own."""
        return self.make(*[given[name] for name in self.settings])


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
    table = dict(PRESETS[spec].table) if isinstance(spec, str) else {}
    for part in (surrogate, mean, kl, regularizer, spec):
        table |= part.settings if isinstance(part, Named) else {}

    def build(given: Given) -> Recipe:
        def part(value: Any) -> Any:
            return value.of(given) if isinstance(value, Named) else value

        corrects = PRESETS[spec].of(given) if isinstance(spec, str) else part(spec)
        of = part(surrogate), part(mean), part(kl), part(regularizer)
        loss = Loss(of[0], of[1] if over is None else replace(of[1], over=over), of[2], of[3])
        return Recipe(corrects, loss, batch)

    add_recipe(name, build, table, needs, note)


def add_recipe(
    name: str,
    make: Callable[[Given], Recipe],
    table: Mapping[str, Any],
    needs: tuple[str, ...],
    note: str = "",
) -> None:
    """Register a recipe by its settings and the function that makes it of them."""
    RECIPES[name] = RecipeEntry(name, make, table, needs, note)


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

    def made(coef: float | None) -> KL | None:
        return KL(kind, coef, value_clamp=value_clamp, weight=weight) if coef else None

    return Named(made, **{name: maybe(default) for name, default in coefficient.items()})


def anchor(over: Scope, /, **tau: float) -> Named[SquaredLogRatio | None]:
    """Return the squared log-ratio as a regularizer, by the framework's name for its coefficient; 0 is none."""
    return Named(lambda coefficient: SquaredLogRatio(coefficient, over) if coefficient != 0.0 else None, **tau)


def mean(words: dict[str, Mean] = AGGREGATIONS, /, **setting: str) -> Named[Mean]:
    """Return the mean, by the framework's setting and its words for means."""
    return Named(lambda mode: words[mode], **{name: word(default, words) for name, default in setting.items()})

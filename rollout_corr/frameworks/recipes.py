"""Whole calls: what `policy_loss` is given in a framework's training step, as a dict of its arguments.

Named after the framework, then after its loss or after the preset whose Spec it runs. The log-probs, advantages and
mask are the caller's; so is a denominator reduced over micro-batches and ranks. docs/losses.md is made from this table.
"""

from __future__ import annotations

import difflib
from functools import lru_cache
from typing import Any

from rollout_corr.frameworks import losses_clipped, losses_integrated, losses_sampled
from rollout_corr.frameworks.call import Call


@lru_cache(maxsize=1)
def calls() -> dict[str, Call]:
    """Every recipe by its name, sorted."""
    return dict(sorted((losses_integrated.calls() | losses_clipped.calls() | losses_sampled.calls()).items()))


def recipe_names() -> list[str]:
    """Every recipe as "framework.recipe", sorted."""
    return list(calls())


def recipe(name: str, /, **arguments: Any) -> dict[str, Any]:
    """What a framework's training step gives `policy_loss`.

    `rc.policy_loss(new_logp, advantages, mask, old_logp=..., rollout_logp=..., **rc.recipe("trl.dapo"))`. Which
    log-probs a recipe needs and what it computes is in docs/losses.md.

    Args:
        name: "framework.recipe", one of `recipe_names()`.
        **arguments: The framework's own settings, by its names; where the recipe runs a preset, the preset's too.

    Returns:
        Keyword arguments: surrogate, spec, reduction, denominator, and kl, regulariser or max_length where there are.

    Raises:
        ValueError: An unknown name (with the closest ones) or a wrong value.
        TypeError: An argument that the recipe does not take, or a value of the wrong type.
    """
    if not isinstance(name, str):
        raise TypeError(f"recipe: expected a name such as 'verl.gspo', got {type(name).__name__} {name!r}")
    if name not in calls():
        close = difflib.get_close_matches(name, calls(), n=3)
        hint = f", did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"recipe: unknown name {name!r}{hint}; rollout_corr.recipe_names() lists them all")
    try:
        return calls()[name].build(**arguments)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        message = f"recipe {name}({given}): {error}"
        raise (TypeError if isinstance(error, TypeError) else ValueError)(message) from error

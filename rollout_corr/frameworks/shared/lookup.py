"""Presets, recipes and configurations by name. A framework is a folder or file beside `shared`; a name imports its own.

A folder holds some of: `presets.py` (presets and RECIPES), `config.py` (with `read`), `metrics.py` (see
rollout_corr.metrics.peers) and `dropin.py` (with `install`). A framework that is one file holds presets and RECIPES.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from rollout_corr import frameworks as package
from rollout_corr.frameworks.shared.preset import PRESETS, Preset, registered, same_kind
from rollout_corr.frameworks.shared.settings import in_its_words, refuse_other_types
from rollout_corr.specs.caches import cached
from rollout_corr.specs.correction import Spec


class Recipe(NamedTuple):
    """A recipe of a framework; its name is its key in the RECIPES of the framework's module.

    Attributes:
        build: Makes the arguments from settings.
        needs: The log-probs that the call needs besides new_logp.
        note: A remark for users of the framework.
    """

    build: Callable[..., dict[str, Any]]
    needs: tuple[str, ...]
    note: str = ""


def frameworks() -> list[str]:
    """All frameworks, sorted: the folders and files of this package but `shared`."""
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in found if name != "shared" and not name.startswith("_"))


def has(framework: str, name: str) -> bool:
    """Tell whether a framework's folder holds a module, without importing it."""
    found = find_spec(f"{package.__name__}.{framework}")
    folder = None if found is None else found.submodule_search_locations
    return folder is not None and any(module.name == name for module in pkgutil.iter_modules(folder))


@cached(maxsize=None)
def part(framework: str, name: str) -> ModuleType:
    """Import a module of a framework's folder; for a framework that is one file, that file.

    Raises:
        LookupError: There is no such framework.
    """
    if framework not in frameworks():
        raise LookupError(framework)
    path = f"{package.__name__}.{framework}"
    return import_module(f"{path}.{name}" if has(framework, name) else path)


def presets_of(framework: str) -> list[Preset]:
    """The presets of a framework, old names included."""
    part(framework, "presets")
    return registered(framework)


def every_preset(*, old: bool = False) -> list[Preset]:
    """All current presets, or with `old` all old names, sorted by name."""
    found = (preset for framework in frameworks() for preset in presets_of(framework) if bool(preset.write) == old)
    return sorted(found, key=lambda preset: preset.name)


def names() -> list[str]:
    """All presets as "framework.preset", sorted. Old names work too, but are not listed."""
    return [found.name for found in every_preset()]


def preset(name: str, /, **arguments: object) -> Spec:
    """Build a preset by its framework's own name for it.

    Args:
        name: "framework.preset", one of `names()` or an old name.
        **arguments: The preset's own arguments.

    Returns:
        The Spec.

    Raises:
        ValueError: An unknown name (with the closest ones) or a wrong value.
        TypeError: An argument that the preset does not take, or a value of the wrong type.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"preset: expected a name such as 'verl.decoupled_token_is', got {type(name).__name__} {name!r}"
        )
    if name not in PRESETS:
        with suppress(LookupError):
            part(name.partition(".")[0], "presets")
    if name not in PRESETS:
        if name in frameworks():
            raise ValueError(f"preset: expected one preset of {name}, got its name alone; {name} has {_of(name)}")
        known = [*names(), *(found.name for found in every_preset(old=True))]
        last = name.rpartition(".")[2]
        same = [other for other in known if other.rpartition(".")[2] == last]
        hint = _closest([*same, *difflib.get_close_matches(name, known, n=3)])
        if name in recipe_names():
            hint = f"; it is a recipe, a whole loss: rc.recipe({name!r})"
        raise ValueError(f"preset: unknown name {name!r}{hint}; rollout_corr.presets.names() lists them all")
    return PRESETS[name].build(**arguments)


def recipes_of(framework: str) -> dict[str, Recipe]:
    """The recipes of a framework, by their names in it."""
    found: dict[str, Recipe] = getattr(part(framework, "presets"), "RECIPES", {})
    return found


def every_recipe() -> dict[str, Recipe]:
    """All recipes by "framework.recipe", sorted."""
    return {
        f"{framework}.{name}": found
        for framework in frameworks()
        for name, found in sorted(recipes_of(framework).items())
    }


def recipe_names() -> list[str]:
    """All recipes as "framework.recipe", sorted."""
    return list(every_recipe())


def recipe(name: str, /, **arguments: Any) -> dict[str, Any]:
    """Return the arguments that a framework's training step gives `policy_loss`.

    `rc.policy_loss(new_logp, advantages, mask=mask, old_logp=..., rollout_logp=..., **rc.recipe("trl.dapo"))`.
    The log-probs, advantages and mask are the caller's; so is a denominator reduced over micro-batches and ranks.
    docs/losses.md lists what each recipe computes and which log-probs it needs.

    Args:
        name: "framework.recipe", one of `recipe_names()`.
        **arguments: The framework's own settings, by its names; where the recipe runs a preset, the preset's too.

    Returns:
        Keyword arguments: surrogate, spec, reduction, denominator, and kl, regulariser or max_length if the recipe has
        them.

    Raises:
        ValueError: An unknown name (with the closest ones) or a wrong value.
        TypeError: An argument that the recipe does not take, or a value of the wrong type.
    """
    if not isinstance(name, str):
        raise TypeError(f"recipe: expected a name such as 'verl.gspo', got {type(name).__name__} {name!r}")
    framework, _, last = name.partition(".")
    found = None
    with suppress(LookupError):
        found = recipes_of(framework).get(last)
    if found is None:
        known = recipe_names()
        if name in frameworks():
            has = ", ".join(other for other in known if other.startswith(f"{name}."))
            raise ValueError(f"recipe: expected one recipe of {name}, got its name alone; {name} has {has}")
        same = [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]]
        own = [other for other in known if other.startswith(f"{framework}.")]
        if name in PRESETS:
            hint = f"; it is a preset, a correction without a loss: rc.preset({name!r})"
        elif own:
            hint = _closest(difflib.get_close_matches(name, own, n=3)) or f"; {framework} has {', '.join(own)}"
        else:
            hint = _closest([*same, *difflib.get_close_matches(name, known, n=3)])
        raise ValueError(f"recipe: unknown name {name!r}{hint}; rollout_corr.recipe_names() lists them all")
    try:
        refuse_other_types(found.build, arguments)
        return found.build(**arguments)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise same_kind(error, f"recipe {name}({given}): {error}") from error


def from_config(framework: str, config: object, **options: object) -> Spec:
    """Read a framework's rollout-correction settings, of any generation.

    Old names warn once in a process, with the line to write instead. Unknown keys raise.

    Args:
        framework: "verl", "xtuner", "skyrl" or another that has a reader; the error of another name lists them.
        config: The block of settings, or a configuration that holds it: a mapping, an OmegaConf node, a dataclass, a
            pydantic model, any object with attributes. Or the name of a preset of that framework, as text.
        **options: For verl: k1_bounds="ratio" reads the bounds of k1 options as bounds of the ratio (verl#6377), as
            verl's documentation says and verl 0.9.1 does not; version="0.6.0" reads `rollout_is_mode` and the veto as
            that release did, which zeroed weights where later code edits the mask. For a preset: its arguments.

    Returns:
        The Spec. The loss that it feeds (verl's `bypass_mode` and `loss_type`) is no part of it.

    Raises:
        ValueError: An unknown framework or key, or a wrong value, named.
        TypeError: A value of the wrong type, named.
    """
    if isinstance(config, str) and framework in readable("read"):
        return preset(config if "." in config else f"{framework}.{config}", **options)
    made: Spec = _read("from_config", "read", framework, config, options)
    return made


def recipe_from_config(framework: str, config: object, **options: object) -> dict[str, Any]:
    """Read the whole loss of a framework's configuration: `rc.policy_loss(..., **rc.recipe_from_config("trl", args))`.

    Args:
        framework: A framework whose configuration holds its loss; the error of another name lists them.
        config: As for `from_config`: a mapping, a dataclass, a namespace of flags, any object with attributes.
        **options: The framework's own options, as for `from_config`.

    Returns:
        Keyword arguments of `policy_loss`, as `recipe` gives them.

    Raises:
        ValueError: An unknown framework or key (with the nearest right one), a wrong value, or a loss that this package
            does not have, named.
        TypeError: A value of the wrong type, named.
    """
    made: dict[str, Any] = _read("recipe_from_config", "recipe", framework, config, options)
    return made


def readable(function: str) -> list[str]:
    """Return the frameworks whose configuration a call can read."""
    return [name for name in frameworks() if has(name, "config") and hasattr(part(name, "config"), function)]


def _read(call: str, function: str, framework: str, config: object, options: dict[str, object]) -> Any:
    """Let a framework's reader read a configuration, and name the call in its errors."""
    known = readable(function)
    if framework not in known:
        hint = ""
        if framework in frameworks() and _of(framework):
            hint = f"; this framework has no configuration that can be read, but presets: rc.preset of {_of(framework)}"
        raise ValueError(f"{call}: expected one of {known}, got {framework!r}{hint}")
    read = partial(getattr(part(framework, "config"), function), **options)
    try:
        return read(config)
    except (TypeError, ValueError) as error:
        raise same_kind(error, f"{call}({framework!r}): {in_its_words(error, read, config)}") from error


def _of(framework: str) -> str:
    """The current presets of a framework, as text."""
    return ", ".join(sorted(found.name for found in presets_of(framework) if not found.write))


def _closest(names: Iterable[str]) -> str:
    close = list(dict.fromkeys(names))[:3]
    return f", did you mean {' or '.join(map(repr, close))}?" if close else ""

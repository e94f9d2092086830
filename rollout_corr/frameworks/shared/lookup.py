"""Specs, recipes and configurations by name. A framework is a folder or file next to `shared`, imported on first use.

A folder holds some of: `config.py` (presets, recipes, `settings`, and what is made of these: `read`, `recipe` and
`WRITTEN`), `mistakes.py` (`CHECKS`), `metrics.py` (see rollout_corr.metrics.peers) and `dropin.py` (with `install`). A
framework that is one file holds what `config.py` and `mistakes.py` do.
`others.py` has presets and recipes of frameworks whose configuration is not read.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from ... import frameworks as package
from ...specs.caches import cached
from ...specs.correction import Spec
from ...specs.validate import shown
from .preset import PRESETS, RECIPES, RENAMED, Preset, RecipeEntry
from .preset import Recipe as Recipe
from .settings import same_kind

if TYPE_CHECKING:
    from .names import FrameworkName, RecipeName, SpecName

Entry = TypeVar("Entry")


# --- what there is ---

# Frameworks without a folder or file of their own.
OTHERS = "others"


def _modules() -> list[str]:
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return [name for name in found if name not in ("shared", OTHERS) and not name.startswith("_")]


def frameworks() -> list[str]:
    """All frameworks, sorted: the folders and files of this package, and those that share a file."""
    import_module(f"{package.__name__}.{OTHERS}")
    return sorted({*_modules(), *(name.partition(".")[0] for name in (*PRESETS, *RECIPES))})


def has(framework: str, name: str) -> bool:
    """Return whether a framework's folder holds a module, without importing it."""
    found = find_spec(f"{package.__name__}.{framework}")
    folder = None if found is None else found.submodule_search_locations
    return folder is not None and any(module.name == name for module in pkgutil.iter_modules(folder))


@cached(maxsize=None)
def part(framework: str) -> ModuleType:
    """Import a framework's presets, recipes and configuration: `config.py` of its folder, or its file."""
    if framework in _modules():
        path = f"{package.__name__}.{framework}"
        return import_module(f"{path}.config" if has(framework, "config") else path)
    if framework in frameworks():
        return import_module(f"{package.__name__}.{OTHERS}")
    raise LookupError(framework)


def _every(registry: Mapping[str, Entry]) -> dict[str, Entry]:
    """A registry with the entries of all frameworks, sorted."""
    for framework in frameworks():
        part(framework)
    return dict(sorted(registry.items()))


def every_preset() -> list[Preset]:
    """All presets, sorted by name."""
    return [*_every(PRESETS).values()]


def spec_names() -> list[str]:
    """List the specs that `rc.spec` builds by name, as "framework.spec", sorted."""
    return [*_every(PRESETS)]


def every_recipe() -> dict[str, RecipeEntry]:
    """All recipes by "framework.recipe", sorted."""
    return _every(RECIPES)


def recipe_names() -> list[str]:
    """List the recipes that `rc.recipe` builds by name, as "framework.recipe", sorted."""
    return [*_every(RECIPES)]


def readable(function: str = "read") -> list[str]:
    """Return the frameworks whose configuration gives a Spec ("read") or a loss ("recipe"), or can be written."""
    return [name for name in frameworks() if is_readable(name, function)]


def is_readable(framework: str, function: str = "read") -> bool:
    """Return whether one framework has it; no other is imported."""
    names = ("write", "WRITTEN") if function == "write" else (function,)
    try:
        module = part(framework)
    except LookupError:
        return False
    return any(hasattr(module, name) for name in names)


# --- the two lookups ---


@overload
def spec(name: SpecName, /, **arguments: Any) -> Spec: ...
@overload
def spec(framework: FrameworkName, config: object, /, **options: Any) -> Spec: ...


def spec(name: str, /, *config: object, **arguments: Any) -> Spec:
    """Return a framework's correction: by its own name for it, or read from a configuration.

    `rc.spec("verl.decoupled_token_is", upper=3.0)`; `rc.spec("verl", config)`. Old keys of a configuration warn once
    in a process, with the line to write instead, misspelled ones raise, and other unknown keys warn once.

    Args:
        name: "framework.spec", one of `rc.spec_names()`; or with a configuration the framework alone, such as "verl".
        *config: The block of settings, or a configuration that holds it: a mapping, an OmegaConf node, a dataclass, a
            pydantic model, any object with attributes.
        **arguments: For a name, the framework's own arguments of it. For a configuration of verl: k1_bounds="ratio"
            reads the bounds of k1 options as bounds of the ratio (verl#6377), as verl's documentation says and verl
            0.9.1 does not.

    Returns:
        The Spec. The loss that it feeds (verl's `bypass_mode` and `loss_type`) is not part of it; `rc.recipe` has it.

    Raises:
        ValueError: An unknown name, framework or key (with the closest ones), or a wrong value, named.
        TypeError: An argument that the spec does not take, or a value of the wrong type, named.
    """
    if config:
        made: Spec = _read("spec", name, config, arguments)
        return made
    return named(name, **arguments)


def named(name: str, /, **arguments: object) -> Spec:
    """Build a framework's spec by name: `spec` without a configuration."""
    return _entry("spec", PRESETS, name).build(**arguments)


@overload
def recipe(name: RecipeName, /, **settings: Any) -> Recipe: ...
@overload
def recipe(framework: FrameworkName | Literal["torchtitan"], config: object, /, **options: Any) -> Recipe: ...


def recipe(name: str, /, *config: object, **settings: Any) -> Recipe:
    """Return a framework's whole loss: by its own name for it, or read from a configuration.

    `spec, loss = rc.recipe("trl.dapo")`, or `rc.recipe("trl", args)`, for
    `rc.policy_loss(new_logp, advantages, batch, loss, old_logp=..., rollout_logp=..., spec=spec)`. The log-probs,
    advantages and the batch are the caller's; so is a total reduced over micro-batches and ranks. docs/losses.md lists
    what each recipe computes and which log-probs it needs.

    Args:
        name: "framework.recipe", one of `rc.recipe_names()`; or with a configuration the framework alone, such as
            "trl".
        *config: As for `rc.spec`: a mapping, a dataclass, a namespace of flags, any object with attributes.
        **settings: For a name, the framework's own settings, by its names; where the recipe runs a spec, the spec's
            too. For a configuration, the framework's own options, as for `rc.spec`.

    Returns:
        A `Recipe`: the Spec and the Loss.

    Raises:
        ValueError: An unknown name, framework or key (with the closest ones), a wrong value, or a loss that this
            package does not have, named.
        TypeError: A setting that the recipe does not take, or a value of the wrong type, named.
    """
    if config:
        made: Recipe = _read("recipe", name, config, settings)
        return made
    found = _entry("recipe", RECIPES, name)
    try:
        return found.build(**settings)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        raise same_kind(error, f"recipe {name}({given}): {error}") from error


def _entry(call: str, registry: Mapping[str, Entry], name: str) -> Entry:
    """Find a preset or a recipe by its name."""
    _check_text(call, name)
    framework = name.partition(".")[0]
    with suppress(LookupError):
        part(framework)
    if name in registry:
        return registry[name]
    known = [*_every(registry)]
    if name in frameworks():
        raise ValueError(_alone(call, name, known))
    last = name.rpartition(".")[2]
    for owner, renamed in RENAMED.items():
        if last in renamed and name in (last, f"{owner}.{last}"):
            raise ValueError(f"{call}: unknown name {name!r}, which {owner} had once; write {renamed[last]}")
    of_other = [*_every(RECIPES if call == "spec" else PRESETS)]
    is_a = {"spec": "recipe, a whole loss: rc.recipe", "recipe": "spec, a correction without a loss: rc.spec"}[call]
    near = difflib.get_close_matches(framework, frameworks(), n=1, cutoff=0.75) if "." in name else []
    (meant,) = near or [framework]
    own = [other for other in known if other.startswith(f"{meant}.")]
    if name in of_other:
        hint = f"; it is a {is_a}({name!r})"
    elif own:
        # Those of another framework would be another correction.
        hint = _closest(_alike(name, own))
        if not hint and (near := _alike(name, [other for other in of_other if other.startswith(f"{meant}.")])):
            hint = f"; {near[0]!r} is a {is_a}({near[0]!r})"
        hint = hint or f"; {meant} has {', '.join(own)}"
    else:
        same = [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]]
        hint = _closest([*same, *difflib.get_close_matches(name, known, n=3)])
    raise ValueError(f"{call}: unknown name {name!r}{hint}; rc.{call}_names() lists them all")


def _read(call: str, framework: str, config: tuple[object, ...], options: dict[str, Any]) -> Any:
    """Let a framework's reader read a configuration, and name the call in its errors."""
    _check_text(call, framework)
    if len(config) > 1:
        raise TypeError(f"{call}: expected a framework and one configuration, got {len(config)} configurations")
    (given,) = config
    if not is_readable(framework, READERS[call]):
        raise ValueError(f"{call}: {_no_reader(call, framework, given)}")
    module = part(framework)
    if isinstance(given, str):
        raise TypeError(
            f"{call}({framework!r}): config: expected a mapping or a config object, got the string {shown(given)}; "
            f"by name it is rc.{call}({f'{framework}.{given}'!r})"
        )
    try:
        settings = module.settings(given)
        try:
            if call == "recipe":
                settings.refuse_others()
            return getattr(module, READERS[call])(settings, **options)
        except (TypeError, ValueError) as error:
            raise settings.blamed(error) from error
    except (TypeError, ValueError) as error:
        raise same_kind(error, f"{call}({framework!r}): {error}") from error


# --- what the errors say ---


def _check_text(call: str, name: object) -> None:
    if not isinstance(name, str):
        example = {"spec": "verl.decoupled_token_is", "recipe": "verl.gspo"}[call]
        raise TypeError(f"{call}: expected a name such as {example!r}, got {type(name).__name__} {shown(name)}")


# What reads a configuration, by the call.
READERS = {"spec": "read", "recipe": "recipe"}


def _alone(call: str, framework: str, known: Iterable[str]) -> str:
    """Say what to write where a framework's name was given without a configuration."""
    own = [name for name in known if name.startswith(f"{framework}.")]
    readable = is_readable(framework, READERS[call])
    ways = [f"the configuration too, rc.{call}({framework!r}, config)"] if readable else []
    ways += [f"one of its names: {', '.join(own)}"] if own else []
    other = {"spec": "recipe", "recipe": "spec"}[call]
    return f"{call}: got the framework {framework!r} alone, expected {', or '.join(ways) or f'rc.{other}(...) of it'}"


def _no_reader(call: str, framework: str, config: object) -> str:
    """Say why no configuration can be read under a name."""
    named, known = _every(PRESETS if call == "spec" else RECIPES), readable(READERS[call])
    if framework in {*_every(PRESETS), *_every(RECIPES)}:
        preset = PRESETS.get(framework) if call == "spec" else None
        such = "" if preset is None else f", such as {next(iter(preset.settings), '...')}=..."
        return (
            f"{framework!r} is built by name, expected its settings as keywords{such}, got a configuration of type "
            f"{type(config).__name__} as well"
        )
    own = [name for name in named if name.startswith(f"{framework}.")]
    hint = _closest(difflib.get_close_matches(framework, known, n=1))
    if framework in frameworks():
        hint = f"; its configuration cannot be read, but by name there is {', '.join(own)}" if own else ""
    return f"expected a framework whose configuration can be read, one of {known}, got {framework!r}{hint}"


def _alike(name: str, own: list[str]) -> list[str]:
    """Names of one framework with the words of another name among theirs, the most similar first, or spelled alike."""
    last, by_last = name.partition(".")[2], {other.partition(".")[2]: other for other in own}
    with_words = [other for other in by_last if {*last.split("_")} <= {*other.split("_")}]
    near = difflib.get_close_matches(last, with_words, n=3, cutoff=0.0) or difflib.get_close_matches(last, by_last, n=3)
    return [by_last[other] for other in near]


def _closest(names: Iterable[str]) -> str:
    close = list(dict.fromkeys(names))[:3]
    return f", did you mean {' or '.join(map(repr, close))}?" if close else ""

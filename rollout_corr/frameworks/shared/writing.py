"""Writing a Spec as a framework's configuration. It is read back: every setting it cannot express is found and named.

A framework says in a table, `WRITTEN`, which settings can be written: tuples of alternatives, with LOW and HIGH for
numbers. A configuration takes one alternative of each tuple. Each combination is read once with numbers of its own,
and where these turn up in the Spec says which bound a setting is. A framework with a grammar has a function `write`
instead, which returns the configuration nearest to a Spec. Both may leave out what they cannot say.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

from ...specs.caches import cached
from ...specs.checked import expression
from ...specs.correction import Criterion, Spec, Weight
from ...specs.rules import MeanBelow
from . import lookup
from .preset import Mark
from .settings import heard, rows_in, same_kind

# A bound that is written as its exponential is rounded there.
RELATIVE, ABSOLUTE = 1e-12, 1e-15
# What a Spec says and no result depends on, or a framework sets by itself.
UNWRITTEN = ("report", "label")


def written(spec: Spec, framework: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a framework that read as a Spec: `Spec.to_config`; an error names fields without any."""
    if not lookup.is_readable(framework, "write"):
        raise ValueError(
            "to_config: expected a framework whose configuration can be written, one of "
            f"{lookup.readable('write')}, got {framework!r}"
        )
    module = lookup.part(framework)
    parts: dict[str, Weight | Criterion] = {} if spec.weight is None else {"weight": spec.weight}
    parts |= {f"criteria[{number}]": criterion for number, criterion in enumerate(spec.criteria)}
    for path, part in parts.items():
        for side, rule in part.rules.items():
            if not isinstance(rule, getattr(module, "RULES", ())):
                raise ValueError(_cannot(framework, [f"{path}.{side}={rule!r}, decided by the batch, has no setting"]))
    unsaid: list[str] = []
    for nearest in _configurations(spec, framework, options):
        for config, found in _compared(spec, framework, nearest, options):
            if not found:
                return config
            unsaid = found if not unsaid or len(found) < len(unsaid) else unsaid
        if unsaid:
            break
    said = " and ".join(f"{path}={expression(part)}" for path, part in parts.items())
    none = "have no settings together" if len(parts) > 1 else "has no setting"
    raise ValueError(_cannot(framework, unsaid or [f"{said} {none}"]))


def can_say(spec: Spec, framework: str) -> dict[str, Any] | None:
    """Return what `written` does, or None; only settings with all parts of the Spec are tried."""
    if not hasattr(lookup.part(framework), "WRITTEN"):
        with suppress(ValueError):
            return written(spec, framework, {})
        return None
    same = _templates(framework).get(frozenset(_kinds(spec).items()), ())
    configs = (config for each in same for config in each.says(spec))
    return next((config for config, found in _compared(spec, framework, configs, {}) if not found), None)


# --- the settings that mean a Spec ---


def _compared(
    spec: Spec, framework: str, configs: Iterable[dict[str, Any]], options: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Read each configuration, and say in what it differs from a Spec."""
    for config in configs:
        try:
            read = _read(framework, config, options)
        except (TypeError, ValueError):
            # It refuses settings that nobody wrote by hand: a message about them would say nothing of the Spec.
            continue
        yield config, differences(spec, read)


def _read(framework: str, config: Mapping[str, Any], options: dict[str, Any]) -> Spec:
    """Read settings that nobody wrote by hand, and so without a notice about them."""
    module = lookup.part(framework)
    with heard():
        read: Spec = module.read(module.settings(config), **options)
    return read


def _configurations(spec: Spec, framework: str, options: dict[str, Any]) -> Iterator[Iterable[dict[str, Any]]]:
    """Give the settings that may mean a Spec: those with the most of its parts, then those with fewer."""
    module = lookup.part(framework)
    if hasattr(module, "write"):
        try:
            yield [module.write(spec, **options)]
        except (TypeError, ValueError) as error:
            raise same_kind(error, f"to_config({framework!r}): {error}") from error
        return
    if options:
        raise TypeError(f"to_config({framework!r}): got an unexpected option {next(iter(options))!r}")
    kinds = _kinds(spec)
    far: dict[int, list[Template]] = {}
    for has, templates in _templates(framework).items():
        other = Counter(dict(has))
        far.setdefault(((kinds - other) + (other - kinds)).total(), []).extend(templates)
    for _, alike in sorted(far.items()):
        yield (config for template in alike for config in template.says(spec))


# The bounds of a Spec, by the place of what they bound, -1 for the weight, and their side.
Place = tuple[int, str]
# What a Spec may hold for a number x of the settings, and what x is then: the first fits most.
HELD: tuple[tuple[Callable[[float], float], Callable[[float], float]], ...] = (
    (lambda x: x, lambda bound: bound),
    (lambda x: -x, lambda bound: -bound),
    (lambda x: x / 2.0, lambda bound: bound * 2.0),
)


class Left:
    """Stands for a setting that is left out."""


class Template(NamedTuple):
    """Settings with marks for numbers, the Spec that they are with numbers of a trial, and its bounds that they set."""

    config: Mapping[str, Any]
    spec: Spec
    bounds: tuple[tuple[Place, Callable[[float], float]] | None, ...]  # for each mark, with what it is of that bound
    nulls: tuple[bool, ...]  # for each mark, whether its setting is null by default

    def says(self, spec: Spec) -> Iterator[dict[str, Any]]:
        """Give the settings the numbers of a Spec; an open side is null or 0, or else it is left to its default.

        A setting that is a number by default is 0 before it is null, which a flag of a command line cannot be.
        """
        bounds = _bounds(spec, self.spec)
        choices: list[tuple[object, ...]] = []
        for place, null in zip(self.bounds, self.nulls, strict=True):
            bound = None if place is None else bounds.get(place[0])
            open_side = (None, 0.0, Left) if null else (0.0, None, Left)
            choices.append((Left,) if place is None else open_side if bound is None else (place[1](bound),))
        for numbers in product(*choices):
            yield _filled(self.config, iter(numbers))


def _filled(config: Any, numbers: Iterator[object]) -> Any:
    """Put numbers in the place of marks; a setting, or a list of it, for which there is none is left out."""
    if isinstance(config, Mark):
        return next(numbers)
    if isinstance(config, Mapping):
        filled = {name: _filled(value, numbers) for name, value in config.items()}
        return {name: value for name, value in filled.items() if value is not Left}
    if isinstance(config, list):
        made = [_filled(value, numbers) for value in config]
        return Left if Left in made else made
    return config


def _each(config: Any) -> Iterator[Any]:
    """Take one value of each tuple."""
    if isinstance(config, tuple):
        yield from config
    elif isinstance(config, Mapping):
        for values in product(*map(_each, config.values())):
            yield dict(zip(config, values, strict=True))
    else:
        yield config


def _marks(config: Any, name: str = "") -> Iterator[tuple[str, Mark]]:
    """The marks, each with the name of its setting."""
    if isinstance(config, Mark):
        yield name, config
    elif isinstance(config, (Mapping, list)):
        for key, value in config.items() if isinstance(config, Mapping) else ((name, value) for value in config):
            yield from _marks(value, key)


@cached(maxsize=None)
def _templates(framework: str) -> dict[frozenset[tuple[object, int]], list[Template]]:
    """All settings that a framework's table has, by the parts that they are read as; it may refuse some together."""
    module, made = lookup.part(framework), dict[frozenset[tuple[object, int]], list[Template]]()
    kinds = ([one for each in alternatives for one in _each(each)] for alternatives in module.WRITTEN)
    null = [f".{key}" for key, row in rows_in(module.settings({}).rows) if row[0] is None]
    for chosen in product(*kinds):
        config = {name: value for settings in chosen for name, value in settings.items()}
        marks = list(_marks(config))
        trials = [mark.trial + number / 256.0 for number, (_, mark) in enumerate(marks)]
        try:
            spec = _read(framework, _filled(config, iter(trials)), {})
        except ValueError:
            continue
        bounds = _bounds(spec, spec)
        set_by = (
            next(((place, back) for holds, back in HELD for place, x in bounds.items() if x == holds(trial)), None)
            for trial in trials
        )
        nulls = [any(key.endswith(f".{name}") for key in null) for name, _ in marks]
        template = Template(config, spec, tuple(set_by), tuple(nulls))
        made.setdefault(frozenset(_kinds(spec).items()), []).append(template)
    return made


def _kinds(spec: Spec) -> Counter[object]:
    """Count the parts of a Spec and their fields, without bounds; a part counts three times as much as a field."""
    plain = _plain(spec)
    parts = [_kind(plain.weight), *((c.stat, c.over, c.reduce) for c in plain.criteria)]
    of_parts = [(name, getattr(c, name)) for c in plain.criteria for name in ("when", "drop", "of")]
    of_parts += [("normalize", plain.weight and plain.weight.normalize)]
    return Counter(
        [*parts * 3, *of_parts, *((name, getattr(plain, name)) for name in ("rejected", "nonfinite", "sums_over"))]
    )


def _test(criterion: Criterion) -> tuple[object, ...]:
    return tuple(getattr(criterion, name) for name in ("stat", "over", "reduce", "when", "drop", "of"))


def _bounds(spec: Spec, like: Spec) -> dict[Place, float | None]:
    """The bounds of a Spec, by the places that its parts, or those most similar to them, have in another one."""
    parts: dict[int, Weight | Criterion] = {} if spec.weight is None else {-1: spec.weight}
    left = list(spec.criteria)
    for place, criterion in enumerate(like.criteria):
        same = [c for alike in (6, 2, 1) for c in left if _test(c)[:alike] == _test(criterion)[:alike]]
        if same:
            parts[place] = same[0]
            left.remove(same[0])
    found: dict[Place, float | None] = {}
    for place, part in parts.items():
        for side, number in (("lower", part.low), ("upper", part.high)):
            rule = getattr(part, side)
            found[place, side] = rule.below if isinstance(rule, MeanBelow) else number
    return found


# --- what a setting is ---


def explained(name: str) -> str:
    """Say which values a "framework.setting" takes, and which bounds of a Spec it is; "" where there is none."""
    framework, _, setting = name.partition(".")
    if not setting or not lookup.is_readable(framework, "recipe"):
        return ""
    module = lookup.part(framework)
    every = dict(rows_in(module.settings({}).rows))
    # By its last name, or with blocks around it that the table does not name.
    ends = ((key, *pair) for key in every for pair in ((key, setting), (setting, key)))
    key = next((key for key, long, short in ends if f".{long}".endswith(f".{short}")), None)
    if key is None:
        return ""
    default, kind, alone = every[key]
    lines = [f"{framework}: {key}", f"  default: {json.dumps(default)}"]
    try:
        kind(key, ())
    except (TypeError, ValueError) as error:
        wanted = str(error).removeprefix(f"{key}: ").removeprefix("expected ").partition(", got")[0]
        with suppress(TypeError, ValueError):
            wanted = f"null or {wanted.removeprefix('null or ')}" if kind(key, None) is None and not alone else wanted
        lines.append(f"  takes: {'the default alone: ' * alone}{wanted}")
    of_parts = _templates(framework).values() if hasattr(module, "WRITTEN") else ()
    sets = dict.fromkeys(
        f"{'weight' if place == -1 else 'criteria'}.{side}"
        for templates in of_parts
        for template in templates
        for (own, _), bound in zip(_marks(template.config), template.bounds, strict=True)
        if bound is not None and f".{key}".endswith(f".{own}")
        for place, side in [bound[0]]
    )
    return "\n".join([*lines, *([f"  sets: {', '.join(sets)}"] if sets else [])])


# --- what a framework does not say of a Spec ---


def _cannot(framework: str, reasons: Iterable[str]) -> str:
    return f"to_config({framework!r}): {'; '.join(reasons)}"


def differences(spec: Spec, read: Spec) -> list[str]:
    """Say in which fields a Spec differs from what its configuration reads as; empty: it means the same.

    Nothing depends on labels, on the order of criteria, on a lower bound of 0 of a ratio, on what becomes of weights
    outside of no bounds, and on the tokens that sums run over where nothing sums.
    """
    found = []
    mine, theirs = _plain(spec), _plain(read)
    if _kind(mine.weight) != _kind(theirs.weight):
        found.append(_unsaid("weight", mine.weight, theirs.weight))
    elif mine.weight is not None and theirs.weight is not None:
        found += _of_fields("weight.", mine.weight, theirs.weight)
    left = list(theirs.criteria)
    for number, criterion in enumerate(mine.criteria):
        same = [other for other in left if not _of_fields("", criterion, other)]
        like = [other for other in left if (other.stat, other.over) == (criterion.stat, criterion.over)]
        if same or like:
            nearest = (same or like)[0]
            left.remove(nearest)
            found += _of_fields(f"criteria[{number}].", criterion, nearest)
        else:
            found.append(_unsaid(f"criteria[{number}]", spec.criteria[number], None))
    found += [f"there the criteria have {expression(other)} too" for other in left]
    for field in fields(Spec):
        if field.name not in ("weight", "criteria", *UNWRITTEN):
            ours, its = getattr(mine, field.name), getattr(theirs, field.name)
            found += [] if ours == its else [_unsaid(field.name, ours, its)]
    return found


def _kind(weight: Weight | None) -> object:
    """The ratio that a weight is of; the fields of another ratio's say nothing of it."""
    return weight and (weight.over, weight.reduce, weight.within)


def _unsaid(path: str, ours: object, its: object) -> str:
    there = "" if its is None else f", there it is {expression(its)}"
    return f"{path}={expression(ours)} has no setting{there}"


def _of_fields(path: str, ours: Weight | Criterion, its: Weight | Criterion) -> list[str]:
    pairs = [(f.name, getattr(ours, f.name), getattr(its, f.name)) for f in fields(ours) if f.name not in UNWRITTEN]
    return [_unsaid(f"{path}{name}", mine, theirs) for name, mine, theirs in pairs if not _same(mine, theirs)]


def _same(ours: object, its: object) -> bool:
    if isinstance(ours, float) and isinstance(its, float):
        return math.isclose(ours, its, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return ours == its


@cached(maxsize=64)
def _plain(spec: Spec) -> Spec:
    """Return a Spec without what no weight and no mask depends on."""
    weight = spec.weight
    if weight is not None:
        weight = replace(weight, lower=weight.lower or None)
        weight = replace(weight, outside="clamp") if weight.lower is None and weight.upper is None else weight
    criteria = [
        replace(c, lower=c.lower or None) if c.stat == "ratio" and c.upper is not None else c for c in spec.criteria
    ]
    sums = (weight is not None and not weight.per_token) or any(c.over != "token" for c in criteria)
    by_token = any(c.over == "token" for c in criteria)
    return replace(
        spec,
        weight=weight,
        criteria=tuple(criteria),
        sums_over=spec.sums_over if sums and by_token else "valid",
        report=("native",),
    )

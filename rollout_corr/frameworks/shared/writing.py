"""Writing a Spec as a framework's configuration. It is read back: every setting it cannot express is found and named.

`write` in a framework's `config.py` mirrors its `read`: it returns the configuration nearest to a Spec, in plain
numbers, strings, lists and mappings. It need not know what it leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

from ...specs.checked import expression
from ...specs.correction import Criterion, Spec, Weight
from . import lookup
from .settings import same_kind

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
    parts = {} if spec.weight is None else {"weight": spec.weight.rules}
    parts |= {f"criteria[{number}]": criterion.rules for number, criterion in enumerate(spec.criteria)}
    for path, rules in parts.items():
        for side, rule in rules.items():
            if not isinstance(rule, getattr(module, "RULES", ())):
                raise ValueError(_cannot(framework, [f"{path}.{side}={rule!r}, decided by the batch, has no setting"]))
    try:
        made: dict[str, Any] = module.write(spec, **options)
    except (TypeError, ValueError) as error:
        raise same_kind(error, f"to_config({framework!r}): {error}") from error

    def unsaid_of(tried: Spec) -> list[str] | None:
        """What the framework does not say of a Spec, or None where it refuses the settings that are written for it."""
        try:
            config = module.settings(module.write(tried, **options))
            return differences(tried, module.read(config, **options))
        except (TypeError, ValueError):
            return None

    unsaid = unsaid_of(spec)
    if unsaid is None:
        unsaid = _refused_parts(spec, unsaid_of)
    if unsaid:
        raise ValueError(_cannot(framework, unsaid))
    return made


def _refused_parts(spec: Spec, unsaid_of: Callable[[Spec], list[str] | None]) -> list[str]:
    """Say for which parts of a Spec a framework has no settings, where it refuses what is written for all of them.

    What it refuses are settings that nobody wrote by hand: a message about them would say nothing of the Spec.
    """
    parts = {} if spec.weight is None else {"weight": replace(spec, criteria=())}
    parts |= {f"criteria[{i}]": replace(spec, weight=None, criteria=(c,)) for i, c in enumerate(spec.criteria)}
    without = {
        path: replace(
            spec,
            weight=None if path == "weight" else spec.weight,
            criteria=tuple(c for i, c in enumerate(spec.criteria) if path != f"criteria[{i}]"),
        )
        for path in parts
    }
    # What goes when one part goes is of that part.
    guilty = [path for path in parts if unsaid_of(without[path]) is not None] or list(parts)
    said = {path: f"{path}={expression(alone.weight or alone.criteria[0])}" for path, alone in parts.items()}
    found = []
    for path in guilty:
        reasons = unsaid_of(parts[path])
        place = "weight" if path == "weight" else "criteria[0]"
        if reasons is None:
            found.append(f"{said[path]} has no setting")
        else:
            found += [path + reason.removeprefix(place) for reason in reasons if reason.startswith(place)]
    together = " and ".join(said[path] for path in (guilty if len(guilty) > 1 else parts))
    return found or [f"{together} have no settings together"]


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

"""A Spec in the words of a framework: the settings that mean it there, as lines to paste.

`Spec.to_config` refuses whatever a framework cannot say to the last detail. Most of these details concern tokens that a
healthy run does not have: log-ratios that are not finite or beyond +-10. `nearest` takes them over from the framework.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from itertools import product
from typing import Any, NamedTuple, TypeVar

from ...specs.caches import cached
from ...specs.choices import Nonfinite, Rejected, SumsOver
from ...specs.correction import Criterion, Spec, Weight
from . import lookup
from .preset import registered
from .writing import can_say, written

Part = TypeVar("Part", Weight, Criterion)


class Said(NamedTuple):
    """A framework's settings nearest to a Spec, as `Spec.to_config` returns them, and the Spec that they mean."""

    spec: Spec
    config: dict[str, Any]


def nearest(spec: Spec, framework: str) -> Said:
    """Return the settings of a framework for a Spec, or for one that differs in how the framework treats extremes.

    Taken over from the framework's own presets are `nonfinite`, `clamp`, `token_clamp`, the kind of rejection, k1 in
    place of the ratio where it tests that, and `sums_over` where no token is rejected alone. A veto is tried as a
    criterion of tokens that rejects their sequence too. Bounds of ratios are rounded outward: nothing more is rejected.
    What the framework cannot say is a ValueError, which names the first such field.
    """
    short = _with_short_bounds(spec)
    for variant in dict.fromkeys((short, *_in_its_manner(spec, framework))):
        if (config := can_say(variant, framework)) is not None:
            return Said(variant, config)
    try:
        return Said(short, written(short, framework, {}))
    except ValueError as error:
        raise ValueError(_reason(error, framework)) from error


def _with_short_bounds(spec: Spec) -> Spec:
    """Return a Spec whose bounds of ratios have few digits: a lower one is rounded down and an upper one up."""
    weight, criteria = spec.weight, spec.criteria
    if weight is not None and weight.outside == "zero":
        weight = _short_bounds(weight)
    return replace(spec, weight=weight, criteria=tuple(map(_with_short, criteria)))


def _with_short(criterion: Criterion) -> Criterion:
    return _short_bounds(criterion) if criterion.stat == "ratio" else criterion


def _short_bounds(part: Part) -> Part:
    lower, upper = part.lower, part.upper
    return replace(
        part,
        lower=_short(lower, ROUND_FLOOR) if isinstance(lower, float) else lower,
        upper=_short(upper, ROUND_CEILING) if isinstance(upper, float) else upper,
    )


def _short(bound: float, rounding: str) -> float:
    """Round a positive number to 5 digits, or to 6 where it is so close to 1 that the fifth is all it has."""
    if not 0.0 < bound < math.inf:
        return bound
    digits = 5 if abs(bound - 1.0) >= 1e-3 else 6
    return float(Context(prec=digits, rounding=rounding).create_decimal(f"{bound:.12g}"))


def _reason(error: ValueError, framework: str) -> str:
    """Return the first reason, without the call that it is said of."""
    return str(error).removeprefix(f"to_config({framework!r}): ").partition("; ")[0]


class Manners(NamedTuple):
    """Traits of a framework's presets: whether they test k1, their clamps of tokens, and fields of the Spec."""

    tests_k1: bool
    clamps: tuple[tuple[float | None, float | None], ...]  # of the weight, and of the criteria
    fields: tuple[tuple[Nonfinite, float, Rejected, SumsOver], ...]


@cached(maxsize=None)
def _manners(framework: str) -> Manners:
    """The manners of a framework's presets."""
    lookup.part(framework)
    own = [found.build() for found in sorted(registered(framework), key=lambda found: found.name)]
    clamps: dict[tuple[float | None, float | None], None] = {(None, None): None}
    for each in own:
        of_weight = None if each.weight is None else each.weight.token_clamp
        clamps |= dict.fromkeys((of_weight, clamp) for clamp in [c.token_clamp for c in each.criteria] or [None])
    fields = dict.fromkeys((each.nonfinite, each.clamp, each.rejected, each.sums_over) for each in own)
    return Manners(any(c.stat == "k1" for each in own for c in each.criteria), tuple(clamps), tuple(fields))


def _in_its_manner(spec: Spec, framework: str) -> Iterator[Spec]:
    """Give a Spec every manner that a framework's presets have."""
    short, manners = _with_short_bounds(spec), _manners(framework)
    for said in dict.fromkeys((spec.criteria, tuple(_as_outlier(each) for each in spec.criteria))):
        whole = all(each.over != "token" or each.drop == "sequence" for each in said)
        shortened = [_with_short(_as_k1(each) if manners.tests_k1 else each) for each in said]
        for (nonfinite, clamp, rejected, sums_over), (of_weight, of_criteria) in product(
            manners.fields, manners.clamps
        ):
            yield replace(
                spec,
                nonfinite=nonfinite,
                clamp=clamp,
                rejected=rejected if said else spec.rejected,
                sums_over=sums_over if said and whole else spec.sums_over,
                weight=None if short.weight is None else replace(short.weight, token_clamp=of_weight),
                criteria=tuple(replace(each, token_clamp=of_criteria) for each in shortened),
            )


def _as_outlier(criterion: Criterion) -> Criterion:
    """Return a lower bound of a sequence's least ratio as a criterion of tokens that rejects their sequence."""
    if (criterion.stat, criterion.over, criterion.reduce) != ("ratio", "sequence", "min") or criterion.high is not None:
        return criterion
    return Criterion("ratio", lower=criterion.lower, drop="sequence", when=criterion.when, label=criterion.label)


def _as_k1(criterion: Criterion) -> Criterion:
    """Return a test of the ratio, or of the sum or mean of its logarithm, as the same test of k1 = -D."""
    if criterion.stat != "ratio" or criterion.reduce not in (None, "sum", "mean"):
        return criterion
    low, high = criterion.low, criterion.high
    return replace(
        criterion,
        stat="k1",
        # They are written as their exponentials.
        lower=None if high is None else math.log(_short(1.0 / high, ROUND_FLOOR)),
        upper=None if not low else math.log(_short(1.0 / low, ROUND_CEILING)),
    )


def pasted(geometric: Criterion, veto: Criterion, framework: str) -> str:
    """Return the lines to paste for two rejections, or for the first alone where a framework has no veto."""
    if not lookup.is_readable(framework, "write"):
        raise ValueError(f"framework: expected one of {lookup.readable('write')}, got {framework!r}")
    try:
        return "\n".join(lines_of(nearest(Spec(criteria=(geometric, veto)), framework).config, framework))
    except ValueError:
        try:
            alone = nearest(Spec(criteria=(geometric,)), framework)
        except ValueError as error:
            return "\n".join(_comment(f"cannot be said in {framework}: {error}"))
    return "\n".join([*lines_of(alone.config, framework), *_comment(f"{framework} has no setting for the veto")])


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 70, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def lines_of(config: Mapping[str, Any], framework: str) -> list[str]:
    """Write settings as lines of YAML, inside of the block that the framework has for them (its `PLACE`)."""
    found, indent = [], ""
    for name in filter(None, getattr(lookup.part(framework), "PLACE", "").split(".")):
        found.append(f"{indent}{name}:")
        indent += "  "
    return [*found, *_yaml(config, indent)]


def _yaml(config: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _yaml(value, f"{indent}  ")
        else:
            yield f"{indent}{key}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    """Write a value as JSON, which is YAML, except for numbers such as 1e-05, which need a point."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_scalar(item)}' for key, item in value.items())}}}"
    text = json.dumps(value)
    mantissa, exponent, power = text.partition("e")
    if isinstance(value, float) and exponent and "." not in mantissa:
        return f"{mantissa}.0e{power}"
    return text

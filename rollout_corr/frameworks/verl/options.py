"""verl's own grammar for thresholds and rejection options, read into Weight and Criterion.

Three mistakes of verl's parser are fixed: NaN and infinity pass there, "1_2_3" is read as 1 and 23 (Python's literals
allow underscores), and a bare 0 is a ZeroDivisionError.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from numbers import Real

from ...specs import validate
from ...specs.checked import expression
from ...specs.choices import Reduce, Unit
from ...specs.correction import Criterion, Weight
from ...specs.statistics import Stat
from ...specs.validate import of_key, wrong_type, wrong_value
from ..shared import preset
from ..shared.settings import warn_once

LEVELS = ("token", "sequence")
K1_BOUNDS = ("verl", "ratio")

# verl clamps every log-ratio to this before it forms k1, k2 or k3, so also before it sums them.
TOKEN_CLAMP = 20.0

# option: statistic, unit, reduce. There is no seq_max_k1.
_UNITS: dict[str, tuple[Unit, Reduce | None]] = {
    "token": ("token", None),
    "seq_sum": ("sequence", "sum"),
    "seq_mean": ("sequence", "mean"),
    "seq_max": ("sequence", "max"),
}
_STATS: tuple[Stat, ...] = ("k1", "k2", "k3")
RS_OPTIONS: dict[str, tuple[Stat, Unit, Reduce | None]] = {
    f"{name}_{stat}": (stat, *unit)
    for name, unit in _UNITS.items()
    for stat in _STATS
    if (name, stat) != ("seq_max", "k1")
} | {"binary_kl": ("binary_kl_symmetric", "token", None)}  # KPop, verl#6800

# Values of `rollout_rs` up to verl 0.7.0, which tested the ratio itself: the option that they are now.
OLD_RS_LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}

Threshold = float | str | tuple[float, float] | list[float]


def number(key: str, value: object) -> float:
    """Read a finite number > 0 from a number or its text."""
    if isinstance(value, str):
        text = value.strip()
        try:
            # float() reads 1_2 as 12.
            parsed = math.nan if "_" in text else float(text)
        except ValueError:
            raise wrong_value(key, "a number", value) from None
    else:
        parsed = validate.number(key, value)
    if not 0.0 < parsed < math.inf:
        raise wrong_value(key, "a finite number > 0", value)
    return parsed


def bounds(key: str, value: object) -> tuple[float | None, float]:
    """Read "upper", "lower_upper" or a pair (lower, upper) into (lower or None, upper)."""
    if isinstance(value, str):
        parts = value.strip().split("_")
        if len(parts) > 2:
            raise wrong_value(key, "'upper' or 'lower_upper'", value)
    elif isinstance(value, Sequence):
        parts = list(value)
        if len(parts) != 2:
            raise wrong_value(key, "a pair (lower, upper)", value)
    else:
        return None, number(key, value)
    if len(parts) == 1:
        return None, number(key, parts[0])
    lower, upper = number(key, parts[0]), number(key, parts[1])
    if lower > upper:
        raise wrong_value(key, "lower <= upper", value)
    return lower, upper


def _looks_mangled(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0.0 < float(value) < 1.0


def _mangled(key: str, value: object) -> str:
    return (
        f"{key}: {value!r} as the upper bound of a ratio looks like a pair that YAML has read as one number "
        f"(an unquoted 0.5_2 is the number 0.52); quote it: '0.5_2'"
    )


def weight(level: str, threshold: object, normalize: bool = False, key: str = "rollout_is_threshold") -> Weight:
    """Read `rollout_is` with its threshold: a number or its text truncates (TIS), "lower_upper" or a pair zeroes.

    The level is "token" or "sequence", which is the product of the ratios; `key` is the threshold's name in messages.
    """
    if not isinstance(level, str) or level not in LEVELS:
        hint = "; the geometric mean is rollout_corr.Weight.geometric()" if level == "geometric" else ""
        raise wrong_value("rollout_is", "null, 'token' or 'sequence'", level, hint)
    lower, upper = bounds(key, threshold)
    if _looks_mangled(threshold):
        warn_once(key, _mangled(key, threshold), "mangled")
    return Weight(
        *preset.LEVELS[level],
        lower=lower,
        upper=upper,
        outside="clamp" if lower is None else "zero",
        normalize="batch" if normalize else None,
    )


def criteria(
    options: str, thresholds: object, k1_bounds: str = "verl", key: str = "rollout_rs_threshold"
) -> tuple[Criterion, ...]:
    """Read `rollout_rs` with `rollout_rs_threshold`: one criterion an option, labeled with the option's name.

    Args:
        options: Comma-separated options of RS_OPTIONS; duplicates collapse.
        thresholds: One for all options, or one for each: comma-separated text, a number, or for a single one a pair.
        k1_bounds: "verl" compares -log r with [log lower, log upper] as verl 0.9.1 does, which keeps ratios in
            [1/upper, 1/lower]; "ratio" keeps ratios in [lower, upper], as verl's documentation says (verl#6377).
        key: Name of the threshold in messages.
    """
    validate.one_of("k1_bounds", k1_bounds, K1_BOUNDS)
    if not isinstance(options, str):
        raise wrong_type("rollout_rs", "a comma-separated string", options)
    chosen = list(dict.fromkeys(option.strip() for option in options.split(",") if option.strip()))
    if not chosen:
        raise wrong_value("rollout_rs", f"at least one of {sorted(RS_OPTIONS)}", options)
    for option in chosen:
        validate.one_of("rollout_rs", option, sorted(RS_OPTIONS))
    each = _one_for_each(chosen, thresholds, key)
    try:
        return tuple(_criterion(option, value, k1_bounds, key) for option, value in zip(chosen, each, strict=True))
    except (TypeError, ValueError) as error:
        # It names the option too.
        raise of_key(error, key, thresholds) from None


def _one_for_each(options: list[str], thresholds: object, key: str) -> list[object]:
    if thresholds is None:
        # It is the option that stands somewhere.
        raise of_key(ValueError(f"{key}: expected a threshold for rollout_rs, got null"), "rollout_rs", options)
    values: list[object] = [thresholds]
    if isinstance(thresholds, str):
        values = [part.strip() for part in thresholds.split(",") if part.strip()]
    if len(values) == 1:
        return values * len(options)
    if len(values) != len(options):
        raise wrong_value(key, f"one threshold or {len(options)}, one for each of {options}", values)
    return values


def _criterion(option: str, threshold: object, k1_bounds: str, key: str) -> Criterion:
    stat, over, reduce = RS_OPTIONS[option]
    name = f"{key} of {option}"
    if stat != "k1":
        if (isinstance(threshold, str) and "_" in threshold) or (
            isinstance(threshold, Sequence) and not isinstance(threshold, str)
        ):
            raise wrong_value(name, "one upper bound", threshold)
        upper = number(name, threshold)
        if stat == "binary_kl_symmetric":
            return Criterion(stat, upper=upper, label=option, eps=1e-6)
        return Criterion(stat, over=over, reduce=reduce, upper=upper, label=option, token_clamp=TOKEN_CLAMP)
    lower, upper = ratio_bounds(name, threshold)
    if k1_bounds == "ratio":
        return ratio_criterion(option, lower, upper)
    return Criterion(
        stat,
        over=over,
        reduce=reduce,
        lower=math.log(lower),
        upper=math.log(upper),
        label=option,
        token_clamp=TOKEN_CLAMP,
    )


def ratio_bounds(key: str, threshold: object) -> tuple[float, float]:
    """Read the bounds of a k1 option, in ratio space; a single `upper` means (1/upper, upper)."""
    lower, upper = bounds(key, threshold)
    if lower is not None:
        return lower, upper
    if upper < 1.0:
        hint = f". {_mangled(key, threshold)}" if _looks_mangled(threshold) else ""
        raise ValueError(f"{key}: expected a single bound >= 1, whose lower bound is 1/upper, got {threshold!r}{hint}")
    return 1.0 / upper, upper


def ratio_criterion(option: str, lower: float, upper: float) -> Criterion:
    """Return a k1 option as a test of the ratio itself, as in verl up to 0.7.0 and with k1_bounds="ratio"."""
    _, over, reduce = RS_OPTIONS[option]
    return Criterion("ratio", over=over, reduce=reduce, lower=lower, upper=upper, label=option)


def veto(threshold: object, key: str = "rollout_token_veto_threshold") -> Criterion:
    """Reject the whole sequence of a token whose ratio is below the threshold (verl up to 0.7.0)."""
    return Criterion("ratio", lower=number(key, threshold), drop="sequence", label="veto")


# --- the other way ---


def written_weight(weight: Weight) -> dict[str, object]:
    """Write a weight as `weight` reads it, as far as it goes."""
    level = preset.level_of(weight)
    found: dict[str, object] = {"rollout_is": level if level in LEVELS else None}
    if weight.upper is not None:
        lower, upper = weight.low, weight.high
        threshold: object = upper
        if weight.outside == "zero" and lower is not None and upper is not None:
            threshold = text(lower, upper)
        # As a number it looks like a pair that YAML has read as one.
        found["rollout_is_threshold"] = repr(threshold) if _looks_mangled(threshold) else threshold
    return found | {"rollout_is_batch_normalize": weight.normalize == "batch"}


def written_criteria(given: Sequence[Criterion], k1_bounds: str = "verl") -> dict[str, object]:
    """Write criteria as `criteria` reads them, as far as it goes.

    A test of the ratio itself is refused with the nearest that verl has: its bounds are reciprocal, because k1 is the
    log of the inverse ratio.
    """
    found: dict[str, str] = {}
    for number, criterion in enumerate(given):
        stat: Stat = "k1" if criterion.stat == "ratio" else criterion.stat
        unit = (stat, criterion.over, criterion.reduce)
        option = next((name for name, at in RS_OPTIONS.items() if at == unit), None)
        if option is not None and option not in found and criterion.high is not None:
            found[option] = _written(option, criterion, k1_bounds, f"criteria[{number}]")
    if not found:
        return {"rollout_rs": None}
    return {"rollout_rs": ",".join(found), "rollout_rs_threshold": ",".join(found.values())}


def _written(option: str, criterion: Criterion, k1_bounds: str, path: str) -> str:
    lower, upper = criterion.low, criterion.high
    assert upper is not None
    if criterion.stat == "ratio" and k1_bounds == "verl":
        hint = ""
        if lower:
            # -log r lies between the negative logs, in the other order.
            low, high = -math.log(upper), -math.log(lower)
            near = Criterion("k1", criterion.over, criterion.reduce, lower=low, upper=high, token_clamp=TOKEN_CLAMP)
            threshold = text(_exponential(low), _exponential(high))
            hint = (
                f"; the nearest is {expression(near)}, written rollout_rs: {option!r}, rollout_rs_threshold: "
                f"{threshold!r}; for a verl that tests the ratio (verl#6377) pass k1_bounds='ratio'"
            )
        raise ValueError(f'{path}.stat="ratio" has no setting: verl tests k1, the log of the inverse ratio{hint}')
    if criterion.stat == "k1":
        upper = _exponential(upper)
        lower = None if lower is None else _exponential(lower)
    return repr(upper) if lower is None or not option.endswith("k1") else text(lower, upper)


def _exponential(log: float) -> float:
    """Return the number of the fewest digits that has this log, or the nearest one."""
    exact = math.exp(min(log, math.log(sys.float_info.max)))
    rounded = (float(f"{exact:.{digits}g}") for digits in range(1, 17))
    return next((x for x in rounded if x > 0.0 and math.log(x) == log), exact)


def text(lower: float, upper: float) -> str:
    """Write bounds as verl does, "lower_upper"."""
    return f"{lower!r}_{upper!r}"

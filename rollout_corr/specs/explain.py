"""Weights, criteria and options of a Spec in plain words, for `Spec.explain()`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .bounds_of_batch import OfBatch, Side, in_words

if TYPE_CHECKING:
    from .criterion import Criterion
    from .weight import Weight

# The ratio, and what is clamped before exp, by `Weight.reduce`.
_OF_TOKEN = ("its own ratio, exp(D)", "D")
_OF_STRETCH = {
    "sum": ("the product of its {unit}'s ratios, exp(sum of D)", "the sum"),
    "mean": ("the geometric mean of its {unit}'s ratios, exp(mean of D)", "the mean"),
}
_OF_PREFIX = {
    "sum": ("the product of the ratios up to and with it in its {unit}, exp(sum of D)", "the sum"),
    "mean": ("the geometric mean of the ratios up to and with it in its {unit}, exp(mean of D)", "the mean"),
    "min": ("its own ratio times the smallest before it in its {unit}, exp(D + min of D)", "the sum"),
}
_AGGREGATES = {"sum": "sum", "mean": "mean", "max": "maximum", "min": "minimum"}
# Adding logarithms multiplies ratios.
_AGGREGATES_OF_LOGS = {**_AGGREGATES, "sum": "product", "mean": "geometric mean"}
_WHEN = {
    "any": "",
    "negative_advantage": " with a negative advantage",
    "positive_advantage": " with a positive advantage",
    "outward": " whose advantage and D have the same sign",
}
NONFINITE = {
    "reject": "the whole sequence is rejected (weight 0, keep False)",
    "neutral": "D is replaced by 0",
    "propagate": "the NaN or infinity goes into the results",
}
REJECTED = {
    "mask": "Rejected tokens are 0 in the returned mask: a mean over it divides by fewer tokens, policy_loss by those "
    "of the batch unless Mean(over='kept'). Weights do not change.",
    "zero": "Rejected tokens get weight 0. The mask does not change, so they still count in the loss's denominator.",
    "both": "Rejected tokens get weight 0 and are 0 in the returned mask.",
}
DETAIL = {"basic": "the basic set", "full": "the full set, with percentiles, probabilities and correlation"}


def steps_of_weight(weight: Weight, clamp: float, sums_over: str, nonfinite: str) -> list[str]:
    """The steps of a weight, under the fields of its Spec that change it."""
    of_tokens = _OF_PREFIX if weight.over == "prefix" else _OF_STRETCH
    ratio, clamped = _OF_TOKEN if weight.reduce is None else of_tokens[weight.reduce]
    ratio = ratio.format(unit=weight.unit)
    kept = sums_over == "kept" and weight.over != "token"
    over = " over the tokens that pass the token criteria" if kept else ""
    token = "" if weight.token_clamp is None else f"each D is first clamped to +-{weight.token_clamp:g}, and "
    steps = [f"The weight of a token is {ratio}{over}; {token}{clamped} is clamped to +-{clamp:g} before exp."]
    if weight.bounded:
        sides: tuple[tuple[str, Side, float | OfBatch | None], ...]
        sides = (("below", "lower", weight.lower), ("above", "upper", weight.upper))
        if weight.outside == "zero":
            outside = " or ".join(f"{where} {in_words(x, side)}" for where, side, x in sides if x is not None)
            steps.append(f"A weight {outside} becomes 0.")
        else:
            moved = [
                f"{where} {in_words(x, side)} becomes {'that' if isinstance(x, OfBatch) else f'{x:g}'}"
                for where, side, x in sides
                if x is not None
            ]
            steps.append(f"A weight {' and one '.join(moved)}.")
        if (weight.high is not None and weight.high < 1.0) or (weight.low is not None and weight.low > 1.0):
            steps[-1] += " So does a weight of 1, where the two policies agree: bounds are of the ratio."
        if weight.growth is not None:
            steps[-1] += " For the t-th token the bounds are raised to the power of sqrt(t)."
    if weight.normalize == "batch":
        units = "valid tokens" if weight.per_token else f"non-empty {weight.over}s"
        steps.append(f"Weights are divided by their mean over the batch's {units}, rejected ones included.")
    elif weight.normalize is not None:
        units = "valid tokens"
        if weight.normalize == "group" and not weight.per_token:
            units = f"non-empty {weight.over}s"
        rejected = "those that criteria reject" if nonfinite == "reject" else "rejected ones"
        steps.append(
            f"Weights are divided by their mean over the {units} of their {weight.normalize}, {rejected} included, "
            "unless that mean is at most 1e-8."
        )
    if weight.decay is not None:
        steps.append(
            f"Weights are multiplied by {weight.decay:g}^age, age being versions.current - version of the token, "
            "or 0 for a version newer than the current one."
        )
    return steps


def step_of_criterion(criterion: Criterion, sums_over: str) -> str:
    """The step of a criterion, under the field of its Spec that changes it."""
    row = criterion.statistic
    value = row.words if criterion.name is None else f"{row.words} {criterion.name!r}"
    if criterion.of != "train/rollout":
        value += f" of {criterion.of}"
    if criterion.token_clamp is not None and row.source == "d":
        value += f" (D clamped to +-{criterion.token_clamp:g})"
    if criterion.reduce is not None:
        aggregate = (_AGGREGATES_OF_LOGS if row.log_space else _AGGREGATES)[criterion.reduce]
        tokens = "the tokens that pass the token criteria" if sums_over == "kept" else "its valid tokens"
        if criterion.over == "prefix":
            tokens = tokens.replace("its ", "the ") + f" up to and with it in its {criterion.within}"
        value = f"the {aggregate} of {value} over {tokens}"
    tested = "token" if criterion.per_token else criterion.over
    unit, rejected = f"{tested}{_WHEN[criterion.when]}", f"the {tested} is"
    if criterion.drop == "rest":
        rejected = f"it and the rest of its {criterion.within} are"
    elif criterion.drop == "sequence":
        rejected = "the whole sequence is"
    elif criterion.thins and criterion.when == "any":
        rejected = "its valid tokens are"
    elif criterion.thins:
        unit, rejected = f"{criterion.over} with a token{_WHEN[criterion.when]}", "its tokens of that kind are"
    bounds = _range(criterion.lower, criterion.upper)
    if criterion.growth is not None:
        power = "raised to the power of" if row.log_space else "times"
        bounds += f" (bounds {power} sqrt(t) at the t-th token)"
    return f"Criterion {criterion.label!r}: for each {unit}, {value} must be {bounds}, else {rejected} rejected."


def _range(lower: float | OfBatch | None, upper: float | OfBatch | None) -> str:
    if lower is None:
        return f"at most {in_words(upper, 'upper')}"
    if upper is None:
        return f"at least {in_words(lower, 'lower')}"
    return f"between {in_words(lower, 'lower')} and {in_words(upper, 'upper')}"

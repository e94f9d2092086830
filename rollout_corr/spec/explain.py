"""`Spec.explain()`: a Spec in plain words."""

from __future__ import annotations

from rollout_corr.spec.correction import Criterion, Spec, Weight

_LEVELS = {
    "token": "every token's own ratio exp(D)",
    "product": "the product of its sequence's ratios, exp(sum of D)",
    "geometric": "the geometric mean of its sequence's ratios, exp(mean of D)",
}
_STATS = {
    "ratio": "ratio train/rollout",
    "k1": "k1 = -D",
    "k2": "k2 = D^2 / 2",
    "k3": "k3 = e^D - 1 - D",
    "k3_reverse": "reverse k3 = e^-D - 1 + D",
    "abs": "|D|",
    "ratio_error": "ratio error e^|D|",
    "ratio_deviation": "ratio deviation |e^D - 1|",
    "prob_diff": "probability difference q - p",
    "tv": "total variation |q - p|",
    "binary_kl": "binary KL(rollout || train)",
    "binary_kl_reverse": "binary KL(train || rollout)",
    "binary_kl_symmetric": "larger of the two binary KLs",
}
# The others read probabilities, or what the caller gives, which no clamp of D touches.
_OF_D = ("ratio", "k1", "k2", "k3", "k3_reverse", "abs", "ratio_error", "ratio_deviation")
_REDUCED = {
    "sum": "sum",
    "mean": "mean",
    "max": "maximum",
    "min": "minimum",
}
_RATIO_REDUCED = {"sum": "product", "mean": "geometric mean", "max": "maximum", "min": "minimum"}
_WHEN = {
    "any": "",
    "negative_advantage": " with a negative advantage",
    "positive_advantage": " with a positive advantage",
    "outward": " whose advantage and D pull the same way",
}
_NONFINITE = {
    "reject": "the whole sequence is rejected: weight 0, keep False",
    "neutral": "the token is read as D = 0",
    "propagate": "NaN and infinity flow into the results",
}


def explain(spec: Spec) -> str:
    """One step a line, in the order in which things happen."""
    steps = ["D = train_logp - rollout_logp, in float32 or float64, at valid tokens only."]
    acts = spec.weight is not None or bool(spec.criteria)
    nonfinite = _NONFINITE[spec.nonfinite]
    if spec.nonfinite == "reject" and not acts:
        nonfinite = "it is only counted, because this Spec changes nothing"
    steps.append(f"Where D is NaN or infinite, {nonfinite}.")
    if spec.weight is not None:
        steps.append(_weight(spec.weight, spec))
    steps += [_criterion(criterion, spec) for criterion in spec.criteria]
    if spec.criteria:
        steps.append(_rejection(spec))
    elif spec.weight is None:
        steps.append("No weight and no criterion: everything is measured, nothing is changed.")
    if not spec.apply:
        steps.append("Dry run: all of this is reported, no weights are handed back and the mask stays as given.")
    detail = "with percentiles, probabilities and correlation" if spec.detail == "full" else "basic"
    steps.append(f"Metrics: {detail}, under the names of {', '.join(spec.report)}.")
    return "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))


def _range(lower: float | None, upper: float | None) -> str:
    if lower is None:
        return f"at most {upper:g}"
    return f"at least {lower:g}" if upper is None else f"between {lower:g} and {upper:g}"


def _weight(weight: Weight, spec: Spec) -> str:
    clamp = f"; D is clamped to +-{weight.token_clamp:g} first" if weight.token_clamp is not None else ""
    if weight.level != "token" and spec.sums_over == "kept":
        clamp = f" over the tokens that survive token criteria{clamp}"
    text = f"A token's weight is {_LEVELS[weight.level]}{clamp}, its logarithm clamped to +-{spec.clamp:g}"
    if weight.lower is not None or weight.upper is not None:
        bounds = _range(weight.lower, weight.upper)
        text += f", truncated to {bounds}" if weight.outside == "clamp" else f", and 0 unless it is {bounds}"
    if weight.normalize == "batch":
        over = "valid tokens" if weight.level == "token" else "non-empty sequences"
        text += f", then divided by the batch's mean weight over {over}, rejected ones included"
    return text + "."


def _criterion(criterion: Criterion, spec: Spec) -> str:
    stat = f"external statistic {criterion.name!r}" if criterion.stat == "external" else _STATS[criterion.stat]
    if criterion.of != "train/rollout":
        stat += f" of {criterion.of}"
    if criterion.token_clamp is not None and criterion.stat in _OF_D:
        stat += f" (D clamped to +-{criterion.token_clamp:g})"
    if criterion.over == "token":
        unit, value = "token", stat
    else:
        names = _RATIO_REDUCED if criterion.stat == "ratio" else _REDUCED
        kept = "surviving" if spec.sums_over == "kept" else "valid"
        unit, value = "sequence", f"{names[criterion.reduce or '']} of the {stat} over {kept} tokens"
    loses = {
        "unit": f"the {unit} is rejected",
        "sequence": "its whole sequence is rejected",
        "token": "only the tokens selected are rejected" if unit == "sequence" else "the token is rejected",
    }[criterion.drop]
    bounds = _range(criterion.lower, criterion.upper)
    return f"{criterion.label}: each {unit}{_WHEN[criterion.when]} needs a {value} {bounds}, or {loses}."


def _rejection(spec: Spec) -> str:
    mask = "are 0 in the mask handed back, so the loss's denominator may shrink with them"
    zero = "get weight 0, and the mask stays as given, so they still count in the denominator"
    return {
        "mask": f"Rejected tokens {mask}; weights stay.",
        "zero": f"Rejected tokens {zero}.",
        "both": "Rejected tokens get weight 0 and are 0 in the mask handed back.",
    }[spec.rejected]

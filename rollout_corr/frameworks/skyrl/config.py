"""SkyRL's `off_policy_correction`, and the `use_tis` with `tis_imp_ratio_cap` that came before it."""

from __future__ import annotations

from typing import Any

from rollout_corr.frameworks.shared.preset import warn_once
from rollout_corr.frameworks.shared.settings import boolean, defaults_of, fields_of, refuse_unknown
from rollout_corr.spec.correction import Criterion, Level, Reduce, Scheme, Spec, SumsOver, Weight
from rollout_corr.spec.validate import not_negative, number, one_of, positive

REPORT: tuple[Scheme, ...] = ("native", "skyrl")
TIS_LEVELS: dict[str, Level] = {"token": "token", "sequence": "product"}
# sequence_mask_metric: reduction, and the label, which is the prefix of SkyRL's metrics.
SEQUENCE_MASKS: dict[str, tuple[Reduce, str]] = {
    "geometric": ("mean", "geo_sequence_mask"),
    "product": ("sum", "product_sequence_mask"),
}


def _sides(key: str, low: object, high: object) -> tuple[float | None, float | None]:
    """Return the bounds `KEY_low` and `KEY_high`, either of which may be open."""
    least = None if low is None else not_negative(f"{key}_low", low)
    most = None if high is None else positive(f"{key}_high", high, finite=False)
    if least is not None and most is not None and least > most:
        raise ValueError(f"{key}_low: expected a number <= {key}_high, which is {most!r}, got {least!r}")
    return least, most


def spec(
    tis_ratio_type: str | None = None,
    token_tis_ratio_clip_high: float = 2.0,
    sequence_tis_ratio_clip_high: float = 5.0,
    sequence_mask_metric: str | None = None,
    geo_mask_high: float = 1.01,
    geo_mask_low: float = 0.99,
    product_mask_high: float = 2.0,
    product_mask_low: float = 0.5,
    outlier_token_is_threshold_low: float | None = None,
    outlier_token_is_threshold_high: float | None = None,
    token_mask_is_threshold_low: float | None = None,
    token_mask_is_threshold_high: float | None = None,
) -> Spec:
    """`OffPolicyCorrectionConfig` as a Spec; the arguments are its fields, with its defaults."""
    weight = None
    if tis_ratio_type is not None:
        one_of("tis_ratio_type", tis_ratio_type, TIS_LEVELS, or_null=True)
        caps = {"token": token_tis_ratio_clip_high, "sequence": sequence_tis_ratio_clip_high}
        cap = positive(f"{tis_ratio_type}_tis_ratio_clip_high", caps[tis_ratio_type], finite=False)
        weight = Weight(TIS_LEVELS[tis_ratio_type], upper=cap)
    criteria: list[Criterion] = []
    key = "outlier_token_is_threshold"
    low, high = _sides(key, outlier_token_is_threshold_low, outlier_token_is_threshold_high)
    if low is not None or high is not None:
        criteria.append(Criterion("ratio", lower=low, upper=high, drop="sequence", label="outlier"))
    low, high = _sides("token_mask_is_threshold", token_mask_is_threshold_low, token_mask_is_threshold_high)
    # SkyRL wants both of these; one alone does nothing there.
    if low is not None and high is not None:
        criteria.append(Criterion("ratio", lower=low, upper=high, label="token_mask"))
    sums_over: SumsOver = "kept" if criteria else "valid"
    if sequence_mask_metric is not None:
        one_of("sequence_mask_metric", sequence_mask_metric, SEQUENCE_MASKS, or_null=True)
        geometric = sequence_mask_metric == "geometric"
        low, high = (geo_mask_low, geo_mask_high) if geometric else (product_mask_low, product_mask_high)
        prefix = "geo" if geometric else "product"
        # SkyRL has no open side above.
        low, high = _sides(f"{prefix}_mask", low, number(f"{prefix}_mask_high", high))
        reduce, label = SEQUENCE_MASKS[sequence_mask_metric]
        criteria.append(Criterion("ratio", over="sequence", reduce=reduce, lower=low, upper=high, label=label))
    return Spec(weight=weight, criteria=tuple(criteria), rejected="mask", sums_over=sums_over, report=REPORT)


# The fields of OffPolicyCorrectionConfig.
KNOWN = tuple(defaults_of(spec))
AROUND = ("off_policy_correction", "use_tis", "tis_imp_ratio_cap")
# These keys show that the whole of `trainer.algorithm` is given, with many keys that do not concern this package.
OF_ALGORITHM = ("advantage_estimator", "policy_loss_type", "loss_reduction", "kl_loss_coef", "eps_clip_low")


def read(config: object) -> Spec:
    """Read the block `off_policy_correction`, the block `algorithm` around it, or a whole configuration."""
    given = fields_of(config)
    whole = False
    for outer in ("trainer", "algorithm"):
        if outer in given:
            given, whole = fields_of(given[outer], outer), outer == "algorithm"
    whole = whole or any(key in given for key in OF_ALGORITHM)
    return _algorithm(given, whole) if whole or any(key in given for key in AROUND) else _block(given)


def _algorithm(given: dict[str, Any], whole: bool) -> Spec:
    if not whole:
        refuse_unknown(given, AROUND)
    inner = given.get("off_policy_correction")
    block = {} if inner is None else fields_of(inner, "off_policy_correction")
    if not boolean("use_tis", given.get("use_tis")):
        return _block(block)
    # In SkyRL use_tis overrules tis_ratio_type, and its default cap of -1 would turn every ratio into -1.
    cap = positive("tis_imp_ratio_cap, which use_tis needs", given.get("tis_imp_ratio_cap", -1.0), finite=False)
    warn_once(
        ("skyrl", "use_tis"),
        "skyrl: use_tis, tis_imp_ratio_cap are old names; write off_policy_correction: "
        f'{{tis_ratio_type: "token", token_tis_ratio_clip_high: {cap!r}}}',
    )
    return _block({**block, "tis_ratio_type": "token", "token_tis_ratio_clip_high": cap})


def _block(given: dict[str, Any]) -> Spec:
    refuse_unknown(given, KNOWN)
    low, high = "token_mask_is_threshold_low", "token_mask_is_threshold_high"
    if (given.get(low) is None) != (given.get(high) is None):
        message = f"skyrl: {low} and {high} work only together; with one of them SkyRL masks no token, and so does this"
        warn_once(("skyrl", low), message)
    return spec(**given)

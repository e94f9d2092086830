"""SkyRL's `off_policy_correction`, and the `use_tis` with `tis_imp_ratio_cap` that came before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollout_corr.frameworks.shared.preset import warn_once
from rollout_corr.frameworks.shared.recipe import ROWS, TOKENS, Recipe, around_one
from rollout_corr.frameworks.shared.settings import boolean, defaults_of, fields_of, refuse_unknown, settings_of
from rollout_corr.frameworks.shared.specs import LEVELS, level_of
from rollout_corr.specs.choices import Reduce, Scheme, SumsOver
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.loss import Loss
from rollout_corr.specs.surrogate import Surrogate
from rollout_corr.specs.surrogates import GSPO, PPO, SAPO, Reinforce
from rollout_corr.specs.terms import KL, KLKind, Mean
from rollout_corr.specs.validate import not_negative, number, one_of, positive

REPORT: tuple[Scheme, ...] = ("native", "skyrl")
TIS_LEVELS = ("token", "sequence")
# sequence_mask_metric: reduce, and the label, which is the prefix of SkyRL's metrics.
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
        weight = Weight(*LEVELS[tis_ratio_type], upper=cap)
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


def write(spec: Spec) -> dict[str, Any]:
    """Write the block `off_policy_correction`."""
    made: dict[str, Any] = dict.fromkeys(("tis_ratio_type", "sequence_mask_metric", *KNOWN[-4:]))
    if spec.weight is not None:
        level = level_of(spec.weight)
        made["tis_ratio_type"] = level if level in TIS_LEVELS else None
        if level in TIS_LEVELS and spec.weight.high is not None:
            made[f"{level}_tis_ratio_clip_high"] = spec.weight.high
    for criterion in (c for c in spec.criteria if c.stat == "ratio"):
        low, high = criterion.low, criterion.high
        if criterion.over == "token" and criterion.drop == "sequence":
            made |= {"outlier_token_is_threshold_low": low, "outlier_token_is_threshold_high": high}
        elif criterion.over == "token" and None not in (low, high):
            made |= {"token_mask_is_threshold_low": low, "token_mask_is_threshold_high": high}
        metric = next((name for name, (reduce, _) in SEQUENCE_MASKS.items() if reduce == criterion.reduce), None)
        if criterion.over == "sequence" and metric is not None and high is not None:
            prefix = "geo" if metric == "geometric" else "product"
            made |= {"sequence_mask_metric": metric, f"{prefix}_mask_low": low, f"{prefix}_mask_high": high}
    return made


# --- the whole loss ---

# The settings of the loss, with the defaults of AlgorithmConfig; blocks as the mappings that they are.
LOSS: dict[str, Any] = {
    "policy_loss_type": "regular",
    "loss_reduction": "token_mean",
    "max_seq_len": None,
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.2,
    "clip_ratio_c": 3.0,
    "sapo": None,
    "cispo": None,
    "dppo": None,
    "use_kl_loss": True,
    "kl_loss_coef": 0.001,
    "kl_estimator_type": "k3",
    **dict.fromkeys(AROUND),
}
SAPO_FIELDS = {"tau_pos": 1.0, "tau_neg": 1.05}
CISPO_FIELDS = {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 4.0, "cispo_anchor": "old"}
DPPO_FIELDS = {"dppo_type": "binary_tv", "delta_low": 0.2, "delta_high": 0.2}
TYPES = ("regular", "dual_clip", "gspo", "sapo", "cispo", "rollout_is", "dppo")
MEANS: dict[str, Mean] = {
    "token_mean": TOKENS,
    "sequence_mean": ROWS,
    "seq_mean_token_sum_norm": Mean("sequence_sum", over="rows"),
}
KL_KINDS: dict[str, KLKind] = {"k1": "k1", "abs": "abs", "k2": "k2", "k3": "k3"}


def recipe(config: object, *, kl_loss: bool = True) -> Recipe:
    """Read the whole loss from the block `algorithm` or a configuration that holds it.

    Args:
        config: The configuration. The loss `rollout_is`, `dppo` and the anchor "rollout" of `cispo` compare with the
            engine's log-probs: `policy_loss` then needs `rollout_logp`.
        kl_loss: With False, SkyRL's KL loss is left out. It is a mean over rows whatever `loss_reduction` says.
    """
    given = settings_of(config, LOSS, blocks=[("trainer", "algorithm"), ("algorithm",)], whole=OF_ALGORITHM)
    kind = one_of("policy_loss_type", given["policy_loss_type"], TYPES)
    mean = MEANS[one_of("loss_reduction", given["loss_reduction"], MEANS)]
    corrects = _algorithm({key: given[key] for key in AROUND}, whole=True)
    if kind == "gspo" and corrects.criteria:
        # SkyRL's mean over a sequence takes the tokens before rejection.
        corrects = replace(corrects, rejected="zero")
    if given["loss_reduction"] == "seq_mean_token_sum_norm":
        longest = positive("max_seq_len, which seq_mean_token_sum_norm needs", given["max_seq_len"])
        mean = replace(mean, length=longest)
    found = _dppo(given, corrects) if kind == "dppo" else corrects if corrects.acts else None
    return Recipe(found, Loss(_surrogate(kind, given, corrects), mean, _kl(given) if kl_loss else None))


def _surrogate(kind: str, given: dict[str, Any], corrects: Spec) -> Surrogate:
    clip = given["eps_clip_low"], given["eps_clip_high"]
    if kind == "dual_clip":
        return PPO(*clip, dual=given["clip_ratio_c"])
    if kind == "gspo":
        return GSPO(*clip, through="token", clamp=10.0)
    if kind == "sapo":
        return SAPO(*_inner("sapo", given, SAPO_FIELDS).values())
    if kind == "cispo":
        low, high, anchor = _inner("cispo", given, CISPO_FIELDS).values()
        if one_of("cispo_anchor", anchor, ("old", "rollout")) == "old":
            return around_one(low, high)
        return _against_rollout("cispo_anchor: 'rollout'", around_one(low, high, of="new/rollout"), corrects)
    if kind == "rollout_is":
        made = around_one(*clip, outside="zero", of="new/rollout")
        return _against_rollout("policy_loss_type: 'rollout_is'", made, corrects)
    return Reinforce(of="new/rollout") if kind == "dppo" else PPO(*clip)


def _against_rollout(setting: str, surrogate: Surrogate, corrects: Spec) -> Surrogate:
    """Refuse a weight old/rollout beside the ratio new/rollout: it would count the mismatch twice."""
    if corrects.weight is not None:
        raise ValueError(f"{setting} has the ratio new/rollout, expected no tis_ratio_type beside it")
    return surrogate


def _inner(block: str, given: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Read a block of the configuration."""
    held = {} if given[block] is None else fields_of(given[block], block)
    refuse_unknown(held, known)
    return known | held


def _dppo(given: dict[str, Any], corrects: Spec) -> Spec:
    kind, low, high = _inner("dppo", given, DPPO_FIELDS).values()
    if corrects.acts:
        raise ValueError("policy_loss_type: expected no off_policy_correction beside 'dppo'; no recipe does both")
    if one_of("dppo_type", kind, ("binary_tv", "binary_kl")) == "binary_tv":
        criterion = Criterion("prob_diff", lower=-low, upper=high, when="outward", of="new/rollout", label="dppo")
    elif low == high:
        criterion = Criterion("binary_kl", upper=high, when="outward", of="new/rollout", label="dppo")
    else:
        raise ValueError(f"delta_low: expected the same as delta_high with 'binary_kl', got {low!r} and {high!r}")
    return Spec(criteria=(criterion,), rejected="zero")


def _kl(given: dict[str, Any]) -> KL | None:
    coefficient = number("kl_loss_coef", given["kl_loss_coef"])
    if not boolean("use_kl_loss", given["use_kl_loss"]) or coefficient == 0.0:
        return None
    kind = KL_KINDS[one_of("kl_estimator_type", given["kl_estimator_type"], KL_KINDS)]
    made = penalty_over_rows(kind, coefficient)
    if given["loss_reduction"] == "sequence_mean":
        # One pass computes both.
        return replace(made, mean=None)
    return made


def penalty_over_rows(kind: KLKind, coefficient: float) -> KL:
    """Make SkyRL's KL loss: the mean over rows of a row's mean, of the tokens before rejection."""
    return KL(
        kind,
        coefficient,
        value_clamp=10.0 if kind == "k3" else None,
        scope="all",
        mean=ROWS,
    )

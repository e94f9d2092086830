"""SkyRL: `off_policy_correction`, and the `use_tis` with `tis_imp_ratio_cap` that came before it; presets; losses.

SkyRL masks sequences with an outlier first, then tokens, then computes sequence weights and the sequence mask from what
is left. SkyRL counts rejected tokens: the mean of its loss is over "original".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ...specs.choices import Reduce, Scheme, SumsOver
from ...specs.correction import Criterion, Spec, Weight
from ...specs.loss import Loss
from ...specs.surrogate import Surrogate
from ...specs.surrogates import GSPO, PPO, SAPO, Reinforce
from ...specs.terms import KL, KLKind, Mean
from ...specs.validate import not_negative, number, one_of, positive
from ..shared.preset import HIGH, LEVELS, LOW, masked, presets
from ..shared.recipe import (
    BOTH,
    BYPASS,
    DECOUPLED,
    NO_LOWER_CLAMP,
    OPEN_ENDS,
    ROWS,
    SAME_AS_PPO,
    TOKENS,
    WITH_REFERENCE,
    Named,
    Recipe,
    around_one,
    named_recipe,
    of_presets,
)
from ..shared.settings import (
    Block,
    Given,
    NoEquivalent,
    defaults_of,
    fields_of,
    given_in,
    maybe,
    needed,
    refused,
    unchecked,
    warn_old,
    warn_once,
    word,
)

# --- the correction ---

REPORT: tuple[Scheme, ...] = ("native", "skyrl")
TIS_LEVELS = ("token", "sequence")
# sequence_mask_metric: reduce, the beginning of its bounds' names, and the label, the prefix of SkyRL's metrics.
SEQUENCE_MASKS: dict[str, tuple[Reduce, str, str]] = {
    "geometric": ("mean", "geo", "geo_sequence_mask"),
    "product": ("sum", "product", "product_sequence_mask"),
}


def _sides(key: str, low: object, high: object) -> tuple[float | None, float | None]:
    """Return the bounds `KEY_low` and `KEY_high`; either may be open."""
    least = None if low is None else not_negative(f"{key}_low", low)
    most = None if high is None else positive(f"{key}_high", high, finite=False)
    if least is not None and most is not None and least > most:
        raise refused(f"{key}_low", f"expected a number <= {key}_high, which is {most!r}, got {least!r}")
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
        reduce, prefix, label = SEQUENCE_MASKS[sequence_mask_metric]
        bounds = {"geo": (geo_mask_low, geo_mask_high), "product": (product_mask_low, product_mask_high)}
        low, high = bounds[prefix]
        # SkyRL has no open side above.
        low, high = _sides(f"{prefix}_mask", low, number(f"{prefix}_mask_high", high))
        criteria.append(Criterion("ratio", over="sequence", reduce=reduce, lower=low, upper=high, label=label))
    return Spec(weight=weight, criteria=tuple(criteria), sums_over=sums_over, report=REPORT)


def _with(fixed: Mapping[str, Any], *names: str) -> Any:
    """A configuration with these fields; the preset's settings are the fields `names`, in order."""
    return lambda *values: spec(**fixed, **dict(zip(names, values, strict=True)))


TLDR = {
    "tis_ratio_type": "token",
    "sequence_mask_metric": "geometric",
    "token_mask_is_threshold_low": 0.5,
    "token_mask_is_threshold_high": 2.0,
    "outlier_token_is_threshold_low": 1e-4,
    "outlier_token_is_threshold_high": 100.0,
}
TLDR_NAMES = "geo_mask_low", "geo_mask_high", "token_tis_ratio_clip_high"
presets("skyrl", "SkyRL a956457 (2026-08-21)")(
    tldr=(
        "All recommendations: geometric sequence mask, token TIS, token mask [0.5, 2], outlier mask [1e-4, 100].",
        _with(TLDR, *TLDR_NAMES),
        {name: defaults_of(spec)[name] for name in TLDR_NAMES},
    ),
    token_tis=(
        "Token TIS: w = min(exp(D), clip_high).",
        _with({"tis_ratio_type": "token"}, "token_tis_ratio_clip_high"),
        {"clip_high": 2.0},
    ),
    sequence_tis=(
        "Sequence TIS: w = min(exp(sum D), clip_high).",
        _with({"tis_ratio_type": "sequence"}, "sequence_tis_ratio_clip_high"),
        {"clip_high": 5.0},
    ),
    geometric_mask=(
        "Keep a sequence iff exp(mean D) lies within [low, high].",
        _with({"sequence_mask_metric": "geometric"}, "geo_mask_low", "geo_mask_high"),
        {"low": 0.99, "high": 1.01},
    ),
    product_mask=(
        "Keep a sequence iff exp(sum D) lies within [low, high].",
        _with({"sequence_mask_metric": "product"}, "product_mask_low", "product_mask_high"),
        {"low": 0.5, "high": 2.0},
    ),
    token_mask=(
        "Keep a token iff exp(D) lies within [low, high].",
        _with({}, "token_mask_is_threshold_low", "token_mask_is_threshold_high"),
        {"low": 0.5, "high": 2.0},
    ),
    outlier_mask=(
        "A token outside [low, high] rejects its whole sequence.",
        _with({}, "outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
        {"low": maybe(1e-4), "high": maybe(100.0)},
    ),
)

# --- losses ---


def penalty_over_rows(kind: KLKind, coefficient: float) -> KL:
    """Make SkyRL's KL loss: the mean over rows of a row's mean, of the tokens before rejection."""
    return KL(kind, coefficient, value_clamp=10.0 if kind == "k3" else None, scope="all", mean=ROWS)


def _kl(coefficient: float | None) -> KL | None:
    return penalty_over_rows("k3", coefficient) if coefficient else None


def _dppo(low: float, high: float, kind: str = "binary_tv") -> Spec:
    of: Any = {"when": "outward", "of": "new/rollout", "label": "dppo"}
    if kind == "binary_tv":
        return masked(Criterion("prob_diff", lower=-low, upper=high, **of))
    if low != high:
        raise refused("delta_low", f"expected the same as delta_high with 'binary_kl', got {low!r} and {high!r}")
    return masked(Criterion("binary_kl", upper=high, **of))


def _positive_dppo(low: float, high: float) -> Spec:
    return _dppo(positive("delta_low", low, finite=False), positive("delta_high", high, finite=False))


CLIP: dict[str, Any] = {"eps_clip_low": 0.2, "eps_clip_high": 0.2}
SAPO_FIELDS = {"tau_pos": 1.0, "tau_neg": 1.05}
CISPO_BOUNDS = {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 4.0}
CISPO_FIELDS = CISPO_BOUNDS | {"cispo_anchor": word("old", ("old", "rollout"))}
DELTAS = {"delta_low": 0.2, "delta_high": 0.2}
DPPO_FIELDS = {"dppo_type": word("binary_tv", ("binary_tv", "binary_kl"))} | DELTAS
KL_KINDS: tuple[KLKind, ...] = ("k1", "abs", "k2", "k3")
# The surrogates of policy_loss_type, by their settings.
SURROGATES: dict[str, Named[Surrogate]] = {
    "regular": Named(PPO, **CLIP),
    "dual_clip": Named(PPO, **CLIP, clip_ratio_c=maybe(3.0)),
    "gspo": Named(partial(GSPO, through="token", clamp=10.0), **CLIP),
    "rollout_is": Named(partial(around_one, outside="zero", of="new/rollout"), **CLIP),
    "dppo": Named(partial(Reinforce, of="new/rollout")),
    "importance_sampling": Named(Reinforce),
}
KL_OF_NAMES: dict[str, Any] = {"kl": Named(_kl, kl_loss_coef=None)}
of_presets("skyrl", SURROGATES["regular"], BOTH, **KL_OF_NAMES)
named_recipe("skyrl.regular", SURROGATES["regular"], DECOUPLED, **KL_OF_NAMES)
named_recipe("skyrl.ppo", SURROGATES["regular"], DECOUPLED, "policy_loss_type regular")
ITS_KL = f"{SAME_AS_PPO}; the KL loss of its defaults"
named_recipe("skyrl.grpo", SURROGATES["regular"], WITH_REFERENCE, ITS_KL, kl=Named(_kl, kl_loss_coef=0.001))
named_recipe("skyrl.dual_clip", SURROGATES["dual_clip"], DECOUPLED)
named_recipe("skyrl.cispo", Named(around_one, **CISPO_BOUNDS), DECOUPLED, 'cispo_anchor: Score(of="new/rollout")')
named_recipe("skyrl.gspo", SURROGATES["gspo"], DECOUPLED, NO_LOWER_CLAMP)
named_recipe("skyrl.sapo", SAPO(), DECOUPLED)
named_recipe("skyrl.rollout_is", SURROGATES["rollout_is"], BYPASS, OPEN_ENDS)
named_recipe("skyrl.dppo", SURROGATES["dppo"], BYPASS, spec=Named(_positive_dppo, **DELTAS))

# --- the configuration ---

# The fields of OffPolicyCorrectionConfig, checked by `spec`.
OF_SPEC = {name: unchecked(default) for name, default in defaults_of(spec).items()}
AROUND = {"off_policy_correction": Block(OF_SPEC), "use_tis": False, "tis_imp_ratio_cap": unchecked(-1.0)}
# The settings of the loss, with the defaults of AlgorithmConfig.
TABLE: dict[str, Any] = CLIP | {
    "policy_loss_type": unchecked("regular"),
    "loss_reduction": unchecked("token_mean"),
    "max_seq_len": unchecked(None),
    "clip_ratio_c": maybe(3.0),
    "sapo": Block(SAPO_FIELDS),
    "cispo": Block(CISPO_FIELDS),
    "dppo": Block(DPPO_FIELDS),
    "use_kl_loss": True,
    "kl_loss_coef": 0.001,
    "kl_estimator_type": word("k3", KL_KINDS),
    **AROUND,
}
# These keys show that the whole of `trainer.algorithm` is given, with many keys that do not concern this package.
OF_ALGORITHM = ("advantage_estimator", "policy_loss_type", "loss_reduction", "kl_loss_coef", "eps_clip_low")


def settings(config: object) -> Given:
    """Find the block `algorithm`, in a whole configuration too, or the block `off_policy_correction` alone."""
    given, whole = fields_of(config), False
    for outer in ("trainer", "algorithm"):
        if outer in given:
            given, whole = fields_of(given[outer], outer), True
    whole = whole or any(key in given for key in OF_ALGORITHM)
    if whole or given.keys() & TABLE.keys():
        return given_in(given, TABLE, whole=whole or not isinstance(config, Mapping))
    return Given(TABLE, {"off_policy_correction": given})


def read(given: Given) -> Spec:
    """Read `off_policy_correction`, and the `use_tis` that was before it."""
    block = given["off_policy_correction"]
    if given["use_tis"]:
        # In SkyRL use_tis overrules tis_ratio_type, and its default cap of -1 would turn every ratio into -1.
        cap = needed("tis_imp_ratio_cap", "use_tis", given["tis_imp_ratio_cap"])
        new = f'{{tis_ratio_type: "token", token_tis_ratio_clip_high: {cap!r}}}'
        warn_old("skyrl", ("use_tis", "tis_imp_ratio_cap"), f"write off_policy_correction: {new}")
        block = block.but(tis_ratio_type="token", token_tis_ratio_clip_high=cap)
    low, high = "token_mask_is_threshold_low", "token_mask_is_threshold_high"
    if block.says(low) != block.says(high):
        message = f"skyrl: {low} and {high} work only together; with one alone SkyRL masks no token, nor does this"
        warn_once(low, message, "skyrl")
    return spec(**block)


# Where what is written stands in a configuration.
PLACE = "trainer.algorithm.off_policy_correction"


OUTLIER = {"outlier_token_is_threshold_low": LOW, "outlier_token_is_threshold_high": HIGH}
TOKEN_MASK = {"token_mask_is_threshold_low": LOW, "token_mask_is_threshold_high": HIGH}
WRITTEN = (
    ({"tis_ratio_type": None}, *({"tis_ratio_type": x, f"{x}_tis_ratio_clip_high": HIGH} for x in TIS_LEVELS)),
    (
        {"sequence_mask_metric": None},
        {"sequence_mask_metric": "geometric", "geo_mask_low": LOW, "geo_mask_high": HIGH},
        {"sequence_mask_metric": "product", "product_mask_low": LOW, "product_mask_high": HIGH},
    ),
    (dict.fromkeys(OUTLIER), OUTLIER),
    (dict.fromkeys(TOKEN_MASK), TOKEN_MASK),
)


TYPES = ("regular", "dual_clip", "gspo", "sapo", "cispo", "rollout_is", "dppo", "importance_sampling")
MEANS: dict[str, Mean] = {
    "token_mean": TOKENS,
    # Of each micro-batch by itself: pass no total, and divide the loss by the number of micro-batches.
    "token_mean_legacy": TOKENS,
    "sequence_mean": ROWS,
    "seq_mean_token_sum_norm": Mean("sequence_sum", over="rows"),
}
# What SkyRL has by these names and no recipe does.
OF_MINI_BATCH = "chooses tokens by advantages that SkyRL has divided by the counts of the mini-batch before"
ABSENT = {
    "prompt_mean": "averages over each prompt's tokens, then over prompts; pass Mean('sum') and Batch(scale=...), "
    "for each sequence 1 / (prompts * tokens of its prompt)",
    "clip_cov": OF_MINI_BATCH,
    "kl_cov": OF_MINI_BATCH,
    "cross_entropy": "is fine-tuning, without a ratio",
}


def recipe(given: Given, *, kl_loss: bool = True) -> Recipe:
    """Read the whole loss from the block `algorithm` or a configuration that holds it.

    Args:
        given: The settings. The loss `rollout_is`, `dppo` and the anchor "rollout" of `cispo` compare with the
            engine's log-probs: `policy_loss` then needs `rollout_logp`.
        kl_loss: With False, SkyRL's KL loss is left out. It is a mean over rows whatever `loss_reduction` says.
    """
    for setting in ("policy_loss_type", "loss_reduction"):
        absent = given[setting]
        if absent in ABSENT:
            raise refused(setting, f"no recipe of {absent!r}, which {ABSENT[absent]}", NoEquivalent)
    kind = one_of("policy_loss_type", given["policy_loss_type"], TYPES)
    reduction = one_of("loss_reduction", given["loss_reduction"], MEANS)
    average, corrects = MEANS[reduction], read(given)
    if kind == "gspo" and corrects.criteria:
        # SkyRL's mean over a sequence takes the tokens before rejection.
        corrects = replace(corrects, rejected="zero")
    if reduction == "seq_mean_token_sum_norm":
        average = replace(average, length=needed("max_seq_len", reduction, given["max_seq_len"]))
    # importance_sampling, as Tinker has it, does not correct.
    found: Spec | None = corrects if corrects.acts and kind != "importance_sampling" else None
    if kind == "dppo":
        of, low, high = given["dppo"].values()
        if found is not None:
            raise refused("policy_loss_type", "expected no off_policy_correction with 'dppo'; no recipe does both")
        found = _dppo(low, high, of)
    return Recipe(found, Loss(_surrogate(kind, given, corrects), average, _read_kl(given) if kl_loss else None))


def _surrogate(kind: str, given: Given, corrects: Spec) -> Surrogate:
    if kind == "sapo":
        return SAPO(*given["sapo"].values())
    if kind == "cispo":
        low, high, anchor = given["cispo"].values()
        if anchor == "old":
            return around_one(low, high)
        return _against_rollout("cispo_anchor", "'rollout'", around_one(low, high, of="new/rollout"), corrects)
    made = SURROGATES[kind].of(given)
    return _against_rollout("policy_loss_type", "'rollout_is'", made, corrects) if kind == "rollout_is" else made


def _against_rollout(key: str, value: str, surrogate: Surrogate, corrects: Spec) -> Surrogate:
    """Refuse a weight old/rollout and the ratio new/rollout together, which count the mismatch twice."""
    if corrects.weight is not None:
        raise refused(
            key,
            f"{value} has the ratio new/rollout, expected no tis_ratio_type with it; SkyRL multiplies both: for "
            "that leave it out and pass Batch(scale=...), the weights of rc.correct(old_logp, rollout_logp, ...)",
            NoEquivalent,
        )
    return surrogate


def _read_kl(given: Given) -> KL | None:
    coefficient = given["kl_loss_coef"] if given["use_kl_loss"] else 0.0
    if coefficient == 0.0:
        return None
    made = penalty_over_rows(given["kl_estimator_type"], coefficient)
    # One pass computes both where the loss is a mean over rows too.
    return replace(made, mean=None) if given["loss_reduction"] == "sequence_mean" else made

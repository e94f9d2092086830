"""SkyRL's `off_policy_correction`, and the `use_tis` with `tis_imp_ratio_cap` that came before it."""

from __future__ import annotations

import inspect
from typing import Any

from rollout_corr.frameworks.shared.preset import warn_once
from rollout_corr.frameworks.shared.settings import boolean, fields_of, refuse_unknown
from rollout_corr.frameworks.skyrl import presets
from rollout_corr.spec.correction import Spec
from rollout_corr.spec.validate import positive

# The fields of OffPolicyCorrectionConfig.
KNOWN = tuple(inspect.signature(presets.spec).parameters)
AROUND = ("off_policy_correction", "use_tis", "tis_imp_ratio_cap")
# Whoever hands over the whole of `trainer.algorithm` hands over these, and much that is none of our business.
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
    return presets.spec(**given)

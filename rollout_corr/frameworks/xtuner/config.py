"""xtuner's `RolloutImportanceSampling`. Its pairs are (upper, lower), and stay so."""

from __future__ import annotations

from rollout_corr.frameworks.shared.settings import boolean, fields_of, refuse_unknown
from rollout_corr.frameworks.xtuner import presets
from rollout_corr.spec.correction import Spec

KNOWN = (
    "rollout_is_level",
    "rollout_is_mode",
    "rollout_is_threshold",
    "rollout_is_mask_threshold",
    "rollout_is_veto_threshold",
    # These two are of xtuner#2023.
    "rollout_is_veto_level",
    "rollout_is_veto_negative_adv_only",
)


def read(config: object) -> Spec:
    """Read `RolloutImportanceSampling`, or a loss configuration that holds it as `rollout_is`."""
    given = fields_of(config)
    if "rollout_is" in given:
        given = {} if given["rollout_is"] is None else fields_of(given["rollout_is"], "rollout_is")
    refuse_unknown(given, KNOWN)
    negative = "rollout_is_veto_negative_adv_only"
    return presets.spec(
        level=given.get("rollout_is_level", "token"),
        mode=given.get("rollout_is_mode", "truncate"),
        threshold=given.get("rollout_is_threshold"),
        mask_threshold=given.get("rollout_is_mask_threshold"),
        veto_threshold=given.get("rollout_is_veto_threshold"),
        veto_level=given.get("rollout_is_veto_level", "max"),
        veto_negative_adv_only=boolean(negative, given.get(negative)),
    )

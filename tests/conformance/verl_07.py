"""verl 0.7.0: its correction, called as it is, next to the reader of its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from conformance.batches import KINDS, Batch
from conformance.rows import Declared, Result, Row, spec_of
from conformance.sources import Source
from conformance.verl_parts import Proto, or_raises, weights_of

HELPER = "verl/trainer/ppo/rollout_corr_helper.py"
MAIN = "compute_rollout_correction_and_rejection_mask"
# verl raises without a valid token.
SOME = tuple(kind for kind in KINDS if kind != "all_masked")


def is_that_old(source: Source) -> bool:
    """Tell whether a verl has the configuration of 0.7: levels, a lower bound and the veto."""
    return source.says(HELPER, "rollout_token_veto_threshold")


def correction(rng: Random) -> dict[str, Any]:
    """Draw the settings of 0.7's correction."""
    level = rng.choice((None, "token", "sequence", "geometric"))
    return {
        "rollout_is": rng.choice((None, "token", "sequence")),
        "rollout_is_threshold": rng.choice((1.05, 2.0)),
        "rollout_rs": level,
        "rollout_rs_threshold": rng.choice((1.001, 1.3, 2.0)),
        "rollout_rs_threshold_lower": rng.choice((None, 0.8, 0.999)) if level else None,
        "rollout_token_veto_threshold": rng.choice((None, 1e-4, 0.7)),
        "rollout_is_batch_normalize": rng.random() < 0.3,
    }


def rows(source: Source, declared: tuple[Declared, ...]) -> Iterator[Row]:
    """Compare weights, mask and metrics of the drop-in, and weights and mask of the reader."""
    theirs = source.cut(HELPER, MAIN, DataProto=Proto)

    def corrected(given: Batch, settings: dict[str, Any]) -> dict[str, Any]:
        held, mask, _ = theirs(given.old, given.rollout, given.mask, **settings)
        return {"mask": mask, "weights": weights_of(held)}

    def reader(given: Batch, settings: dict[str, Any]) -> Result:
        return or_raises(lambda: corrected(given, settings))

    more: dict[str, Any] = {"declared": declared, "kinds": SOME, "within": (1e-7, 2e-5)}
    yield spec_of("verl", f"{HELPER}: {MAIN}", reader, correction, " of 0.7", **more)

"""NeMo RL: ClippedPGLossFn is constructed and called as it is."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from conformance.batches import KINDS, Batch
from conformance.rows import Declared, Row, recipe
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = None, "nemo_rl", "nemo-rl"

LOSS = "nemo_rl/algorithms/loss/loss_functions.py"
DEFAULTS = {
    "disable_ppo_ratio": False,
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.0,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "positive_example_nll_weight": 0.0,
}

NONFINITE = Declared(
    "a non-finite token rejects its sequence here, itself there",
    "presets.md",
    "weight is 0 at a token with non-finite log-probs",
    lambda given, settings: given.kind in ("infinite", "nan_in_front"),
)


def rows(source: Source) -> Iterator[Row]:
    """Compare the recipes."""
    loss_class = source.cut(LOSS, "ClippedPGLossFn")

    def loss(given: Batch, **config: Any) -> Tensor:
        def wide(x: Tensor) -> Tensor:
            return pad(x, (1, 0))

        data = {
            "token_mask": wide(given.mask.to(given.new.dtype)),
            "sample_mask": torch.ones(len(given.mask), dtype=given.new.dtype),
            "advantages": wide(given.token_advantages),
            "prev_logprobs": wide(given.old),
            "generation_logprobs": wide(given.rollout),
        }
        made = loss_class(SimpleNamespace(**{**DEFAULTS, **config}))
        sequences = given.mask.any(1).sum()
        value, _ = made(given.new, data, sequences, given.mask.sum())
        return value

    def bounds(rng: Random) -> dict[str, Any]:
        return {"ratio": rng.choice((1.05, 2.0)), "ratio_min": rng.choice((0.5, 0.9))}

    def truncated(kind: str) -> Any:
        def run(given: Batch, ratio: float, ratio_min: float) -> Tensor:
            return loss(
                given,
                truncated_importance_sampling_type=kind,
                truncated_importance_sampling_ratio=ratio,
                truncated_importance_sampling_ratio_min=ratio_min,
            )

        return run

    def gspo(given: Batch) -> Tensor:
        return loss(given, sequence_level_importance_ratios=True, token_level_loss=False)

    kinds = tuple(kind for kind in KINDS if kind != "nan_behind_mask")
    # NeMo adds 1e-8 to what it divides by.
    more: dict[str, Any] = {"declared": (NONFINITE,), "kinds": kinds, "within": (3e-8, 2e-5)}
    for ours, kind in (("tis", "tis"), ("icepop", "icepop"), ("seq_mask_tis", "seq-mask-tis")):
        yield recipe(
            f"nemo.{ours}",
            f"{LOSS}: ClippedPGLossFn, {kind}",
            truncated(kind),
            bounds,
            **more,
        )
    yield recipe("nemo.gspo_is", f"{LOSS}: ClippedPGLossFn, sequence level", gspo, **more)

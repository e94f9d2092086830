"""open-instruct's configuration: clamp, mask and their levels read into Specs; the loss into a recipe."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import rollout_corr as rc
from rollout_corr.specs.correction import Criterion, Spec, Weight

WEIGHT = Weight.token(upper=2.0, token_clamp=10.0)


@dataclass
class Experiment:
    rho_mask_lower_bound: float = 0.5
    rho_mask_upper_bound: float = 2.0
    beta: float = 0.0
    total_episodes: int = 100000


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        ({}, rc.spec("open_instruct.default")),
        ({"use_rho_correction": False}, Spec()),
        ({"rho_clamp_upper_bound": 0.0, "rho_clamp_lower_bound": 0.5}, Spec(Weight.token(lower=0.5, token_clamp=10.0))),
        (Experiment(), rc.spec("open_instruct.icepop")),
        ({"rho_mask_sequence_level": True}, Spec(Weight.geometric(upper=2.0, token_clamp=10.0))),
        (
            {"rho_mask_sequence_level": True, "rho_mask_lower_bound": 0.5, "rho_mask_upper_bound": 2.0},
            rc.spec("open_instruct.seq"),
        ),
        ({"rho_mask_tv_divergence": True, "rho_mask_upper_bound": 2.0}, rc.spec("open_instruct.vaco")),
        (
            {"rho_mask_upper_bound": 2.0, "num_mini_batches": 4, "ref_policy_update_freq": 1},
            Spec(WEIGHT, (Criterion("ratio", upper=2.0, token_clamp=10.0),), "zero"),
        ),
    ],
)
def test_spec(config, spec):
    assert rc.spec("open_instruct", config) == spec


def test_recipe():
    assert rc.recipe("open_instruct", {"beta": 0.0}) == rc.recipe("open_instruct.default")
    assert rc.recipe("open_instruct", Experiment()) == rc.recipe("open_instruct.icepop")
    assert rc.recipe("open_instruct", {}).loss.kl == rc.KL("k3", 0.05, log_clamp=40.0)
    other = {"loss_fn": "cispo", "kl_estimator": 3, "clip_higher": 0.3}
    assert rc.recipe("open_instruct", other) == rc.recipe(
        "open_instruct.cispo", beta=0.05, kl_estimator=3, clip_higher=0.3
    )
    assert rc.recipe("open_instruct", {"load_ref_policy": False}).loss.kl is None
    assert rc.recipe("open_instruct", {"loss_denominator": "512"}).batch == {"total": 512.0}
    engine = rc.recipe("open_instruct", {"use_vllm_logprobs": True, "use_rho_correction": False})
    assert engine.loss.surrogate == rc.PPO(0.2, 0.272, of="new/rollout") and engine.spec is None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rho_clamp_uper_bound": 3.0}, r"unknown key 'rho_clamp_uper_bound' \(did you mean 'rho_clamp_upper_bound'"),
        ({"rho_mask_lower_bound": -1.0}, "rho_mask_lower_bound: expected a number >= 0"),
        ({"use_vllm_logprobs": True}, "open-instruct refuses it beside use_rho_correction"),
        ({"kl_estimator": 4}, "kl_estimator: expected 0, 1, 2 or 3, got 4"),
        ({"loss_fn": "gspo"}, r"loss_fn: expected one of \['dapo', 'cispo'\]"),
        ({"loss_denominator": 0.0}, "loss_denominator: expected a finite number > 0"),
    ],
)
def test_refused(config, says):
    with pytest.raises(ValueError, match=rf"^recipe\('open_instruct'\): .*{says}"):
        rc.recipe("open_instruct", config)

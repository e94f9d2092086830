"""NeMo RL's configuration: every setting of its loss read into a Spec, a surrogate, a KL and a reduction."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import rollout_corr as rc
from rollout_corr.specs.correction import Criterion, Spec, Weight

CORRECTED = {"use_importance_sampling_correction": True}
WHOLE = {"sequence_level_importance_ratios": True, "token_level_loss": False}


def truncated(kind, ratio=2.0, least=None):
    return CORRECTED | {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": ratio,
        "truncated_importance_sampling_ratio_min": least,
    }


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        ({}, Spec()),
        (CORRECTED, Spec(Weight.token())),
        (CORRECTED | WHOLE, Spec(Weight.product())),
        (truncated("tis"), Spec(Weight.token(upper=2.0))),
        (truncated("tis", 3.0, 0.5) | WHOLE, Spec(Weight.product(lower=0.5, upper=3.0))),
        (truncated("icepop", 5.0, 0.5), Spec(Weight.token(lower=0.5, upper=5.0, outside="zero"))),
        (truncated("seq-mask-tis", 1.002, 0.999), rc.spec("nemo.seq_mask_tis")),
        ({"seq_logprob_error_threshold": 2.0}, rc.spec("nemo.mult_err")),
        ({"loss_fn": truncated("tis"), "grpo": {"num_prompts_per_step": 8}, "policy": {}}, rc.spec("nemo.tis")),
        (
            {"loss_fn": SimpleNamespace(**truncated("tis")), "grpo": {"seq_logprob_error_threshold": 1.5}},
            Spec(Weight.token(upper=2.0), (Criterion("ratio_error", "sequence", "mean", upper=1.5),)),
        ),
    ],
)
def test_spec(config, spec):
    assert rc.spec("nemo", config) == spec


def test_recipe():
    none = {"reference_policy_kl_penalty": 0.0}
    penalty = rc.KL("k3", 0.01, gradient="k2", log_clamp=20.0, value_clamp=10.0)
    assert rc.recipe("nemo", {}) == rc.Recipe(None, rc.Loss(rc.PPO(0.2, 0.2), kl=penalty))
    settings = none | WHOLE | CORRECTED | {"ratio_clip_min": 0.1, "ratio_clip_c": 3.0}
    loss = rc.Loss(rc.GSPO(0.1, 0.2, 3.0), rc.Mean("sequence"))
    assert rc.recipe("nemo", settings) == rc.Recipe(Spec(Weight.product()), loss)
    surrogates = {
        "use_cispo": rc.Score(0.8, 1.2),
        "disable_ppo_ratio": rc.GPG(),
        "force_on_policy_ratio": rc.PPO(0.2, 0.2),
    }
    for name, surrogate in surrogates.items():
        assert rc.recipe("nemo", none | {name: True}).loss.surrogate == surrogate
    assert rc.recipe("nemo", {"use_kl_in_reward": True}).loss.kl is None
    assert rc.recipe("nemo", {"seq_logprob_error_threshold": 2.0}).loss.mean.over == "kept"
    clamps = {"kl_input_clamp_value": None, "kl_output_clamp_value": None}
    assert rc.recipe("nemo", clamps).loss.kl == rc.KL("k3", 0.01, gradient="k2", log_clamp=40.0)


def test_without_a_type_nothing_is_bounded():
    config = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio_min": 0.5}
    assert rc.spec("nemo", config) == rc.Spec(rc.Weight.token())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"use_cipso": True}, r"unknown key 'use_cipso' \(did you mean 'use_cispo'\?\)"),
        ({"truncated_importance_sampling_ratio": 2.0}, "truncated_importance_sampling_type: expected one of"),
        (
            truncated("tis") | {"use_importance_sampling_correction": False},
            "truncated_importance_sampling_type: needs use_importance_sampling_correction: true",
        ),
        (truncated("tis", None), "truncated_importance_sampling_ratio: expected a number with type 'tis'"),
        (truncated("icepop"), "truncated_importance_sampling_ratio_min: expected a number with type 'icepop'"),
        (truncated("seq-mask-tis", 1.0, 1.0) | WHOLE, "'seq-mask-tis' weighs tokens"),
        (truncated("seq-mask-tis", 1.0, 1.0) | {"seq_logprob_error_threshold": 2.0}, "no Spec does both"),
        (truncated("mis"), "expected null or one of"),
        ({"sequence_level_importance_ratios": True}, "needs token_level_loss: false"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "use_cispo: NeMo refuses it beside"),
        ({"reference_policy_kl_type": "k1"}, "reference_policy_kl_type: expected 'k3', got 'k1'"),
        ({"use_on_policy_kl_approximation": True}, "weighs the KL by new/rollout"),
        ({"positive_example_nll_weight": 0.1}, "add this loss to the value of policy_loss"),
    ],
)
def test_refused(config, says):
    with pytest.raises(ValueError, match=rf"^recipe\('nemo'\): .*{says}"):
        rc.recipe("nemo", config)

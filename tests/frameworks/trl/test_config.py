"""The reader of GRPOConfig; the conformance rows run its losses beside TRL's."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

import rollout_corr as rc

GIVEN = {"loss_type": "grpo", "vllm_importance_sampling_mode": "token_truncate", "epsilon": 0.1, "beta": 0.04}


@pytest.mark.parametrize(
    "config",
    [GIVEN, SimpleNamespace(**GIVEN), argparse.Namespace(**GIVEN, lr=1.0), GIVEN | {"num_generations": 8, "seed": 1}],
    ids=["mapping", "attributes", "flags", "whole"],
)
def test_configurations(config):
    spec = rc.spec("trl.token_truncate")
    assert rc.spec("trl", config) == spec
    made = rc.recipe("trl", config)
    assert made == rc.recipe("trl.grpo", vllm_importance_sampling_mode="token_truncate", epsilon=0.1, beta=0.04)
    assert made.spec == spec


def test_defaults_are_trl_s():
    assert rc.recipe("trl", {}) == rc.recipe("trl.dapo")
    # The recipe's default is the recommended one, 5.0.
    assert rc.recipe("trl", {"loss_type": "cispo"}).loss.surrogate == rc.Score(upper=0.2)


@pytest.mark.parametrize("off", ["use_vllm", "vllm_importance_sampling_correction"])
def test_nothing_is_corrected_without_vllm_or_the_switch(off):
    assert rc.spec("trl", {off: False}) == rc.Spec()
    assert rc.recipe("trl", {off: False}).spec is None
    masks = rc.spec("trl", {off: False, "off_policy_mask_threshold": 0.5})
    assert masks.weight is None and [test.upper for test in masks.criteria] == [0.5] and masks.rejected == "zero"


def test_the_off_policy_mask_keeps_the_mode():
    made = rc.spec("trl", {"off_policy_mask_threshold": 0.5, "vllm_importance_sampling_mode": "token_truncate"})
    assert made.weight == rc.spec("trl.token_truncate").weight and len(made.criteria) == 1


def test_the_old_name_of_the_bound():
    with pytest.warns(UserWarning, match="write vllm_importance_sampling_clip_max: 2.0"):
        made = rc.spec("trl", {"vllm_importance_sampling_cap": 2.0})
    assert made == rc.spec("trl.sequence_mask", clip_max=2.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"epsilon_hi": 0.3}, r"unknown key 'epsilon_hi' \(did you mean 'epsilon_high'\?\)"),
        (SimpleNamespace(epsilon_hig=0.3), r"unknown key 'epsilon_hig' \(did you mean 'epsilon_high'\?\)"),
        ({"learning_rat": 1.0}, "unknown key 'learning_rat'"),
        ({"loss_type": "vespo"}, r"vllm_importance_sampling_mode: expected one of \['token_truncate', 'token_mask'\]"),
        ({"loss_type": "gspo"}, "loss_type: expected one of"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "expected 'token' with loss_type 'sapo'"),
        ({"vllm_importance_sampling_mode": "geometric"}, "vllm_importance_sampling_mode: expected one of"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile: needs the whole distribution"),
        ({"entropy_coef": 0.2}, "entropy_coef: needs the whole distribution"),
    ],
)
def test_refused(config, message):
    with pytest.raises(ValueError, match=message):
        rc.recipe("trl", config)


@pytest.mark.peers
def test_grpo_config_itself(tmp_path):
    from trl import GRPOConfig

    from rollout_corr.frameworks.trl.config import KNOWN

    given = GRPOConfig(output_dir=str(tmp_path), use_vllm=True, use_cpu=True, report_to=[], bf16=False)
    assert rc.recipe("trl", given) == rc.recipe("trl.dapo")
    assert rc.recipe("trl", given.to_dict()) == rc.recipe("trl.dapo")
    defaults = {name: getattr(given, name) for name in KNOWN}
    assert defaults == KNOWN

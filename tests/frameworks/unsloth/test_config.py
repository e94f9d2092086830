"""TRL's GRPOConfig as unsloth reads it; the conformance rows run its losses beside unsloth-zoo's."""

from __future__ import annotations

import pytest

import rollout_corr as rc

GEOMETRIC = {"vllm_importance_sampling_mode": "geometric_mask", "vllm_importance_sampling_clip_max": 1.5}


def test_configurations():
    assert rc.spec("unsloth", GEOMETRIC) == rc.spec("unsloth.geometric_mask", clip_max=1.5)
    made = rc.recipe("unsloth", GEOMETRIC | {"loss_type": "dapo"})
    settings = {"vllm_importance_sampling_mode": "geometric_mask", "clip_max": 1.5}
    assert made == rc.recipe("unsloth.dapo", vllm_importance_sampling_correction=True, **settings)
    with pytest.raises(ValueError, match="vllm_importance_sampling_mode: expected one of"):
        rc.spec("trl", GEOMETRIC)


def test_dapo_s_upper_clip_is_what_is_given():
    assert rc.recipe("unsloth.dapo").loss.surrogate == rc.PPO(0.2, 0.28)
    assert rc.recipe("unsloth.dapo", epsilon_high=0.3).loss.surrogate == rc.PPO(0.2, 0.3)


def test_misspelled():
    with pytest.raises(ValueError, match=r"unknown key 'beat' \(did you mean 'beta'\?\)"):
        rc.recipe("unsloth", {"beat": 0.1})

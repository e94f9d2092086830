"""AReaL's configuration: the block, the actor around it, and the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

import rollout_corr as rc


@dataclass
class RejectionSampling:
    """AReaL's RejectionSamplingConfig."""

    level: str = "token"
    action: str = "mask"
    metric: str = "ratio"
    agg: str = "mean"
    upper: float = 5.0
    lower: float | None = None


@dataclass
class Actor:
    """Some of AReaL's PPOActorConfig."""

    path: str = "model"
    kl_ctl: float = 0.1
    eps_clip: float = 0.2
    use_decoupled_loss: bool = True
    rejection_sampling: RejectionSampling | None = field(default_factory=RejectionSampling)
    optimizer: Any = None


ACTOR = {"use_decoupled_loss": True, "rejection_sampling": {"upper": 5.0}}


@pytest.mark.parametrize(
    "config",
    [
        {"metric": "ratio"},
        RejectionSampling(),
        ACTOR,
        Actor(),
        {"actor": ACTOR, "rollout": {}, "gconfig": {}},
        {"actor": Actor()},
    ],
    ids=["block", "dataclass", "actor", "actor's dataclass", "whole", "whole with a dataclass"],
)
def test_kinds(config):
    assert rc.spec("areal", config) == rc.spec("areal.token_mask", lower=None)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"lower": 0.5}, rc.spec("areal.token_mask")),
        ({"level": "sequence", "agg": "sum"}, rc.spec("areal.seq", agg="sum")),
        (
            {"metric": "kl_k1", "level": "sequence", "upper": 0.5},
            rc.spec("areal.kl", metric="kl_k1", level="sequence", upper=0.5),
        ),
        ({"metric": "binary_kl", "upper": 2.0}, rc.spec("areal.kpop")),
        ({"action": "clamp", "lower": 0.0}, rc.Spec(weight=rc.Weight.token(upper=5.0), nonfinite="neutral")),
        (
            {"action": "clamp", "level": "sequence", "lower": 0.5},
            rc.Spec(weight=rc.Weight.geometric(lower=0.5, upper=5.0), nonfinite="neutral"),
        ),
    ],
)
def test_blocks(block, expected):
    assert rc.spec("areal", block) == expected


def test_nothing_is_corrected_without_the_decoupled_loss():
    for actor in ({"use_decoupled_loss": False, "rejection_sampling": {}}, {"use_decoupled_loss": True}):
        assert rc.spec("areal", actor) == rc.Spec()
        assert rc.recipe("areal", actor).spec is None


@pytest.mark.parametrize(
    ("actor", "surrogate"),
    [
        ({"eps_clip": 0.1}, rc.PPO(0.1, 0.1)),
        ({"eps_clip_higher": 0.28, "c_clip": 3.0}, rc.PPO(0.2, 0.28, 3.0)),
        ({"importance_sampling_level": "sequence"}, rc.GSPO(0.2, 0.2)),
        ({"use_sapo_loss": True, "sapo_tau_neg": 2.0}, rc.SAPO(1.0, 2.0)),
        ({"use_cispo_loss": True, "eps_clip": 1.0, "eps_clip_higher": 4.0}, rc.Score(0.0, 5.0)),
    ],
)
def test_losses(actor, surrogate):
    assert rc.recipe("areal", {"actor": actor}) == rc.Recipe(None, rc.Loss(surrogate))


def test_m2po():
    actor = {"use_decoupled_loss": True, "m2_threshold": 0.08, "eps_clip": 0.1}
    spec = rc.Spec(criteria=(rc.Criterion("k2", upper=rc.MeanBelow(0.04), label="m2po"),), nonfinite="propagate")
    made = rc.recipe("areal", actor)
    assert made == rc.recipe("areal.m2po", m2_threshold=0.08, eps_clip=0.1)
    assert made.spec == rc.spec("areal", actor) == spec and made.loss.mean.over == "kept"
    # It compares the policy with itself.
    assert rc.recipe("areal", {"m2_threshold": 0.08}).spec is None


def test_the_rejection_and_the_loss():
    made = rc.recipe("areal", {"actor": {**ACTOR, "use_cispo_loss": True, "eps_clip_higher": 4.0}})
    assert made.spec == rc.spec("areal.token_mask", lower=None) and made.loss.surrogate == rc.Score(0.8, 5.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"leve": "token"}, r"unknown key 'leve' \(did you mean 'level'\?\)"),
        ({"actor": {"use_decoupled_los": True}}, r"unknown key .* \(did you mean 'use_decoupled_loss'\?\)"),
        ({"actor": ACTOR | {"rejection_sampling": {"uper": 2.0}}}, r"unknown key 'uper' \(did you mean 'upper'\?\)"),
        ({"action": "clamp", "metric": "kl_k3"}, "action: expected 'mask' with metric 'kl_k3', as AReaL does"),
        ({"action": "clamp", "level": "sequence", "agg": "sum"}, "agg: expected 'mean' with action 'clamp'"),
        ({"actor": {"behave_imp_weight_cap": 5.0}}, "behave_imp_weight_cap: AReaL has removed it"),
    ],
)
def test_refused(config, message):
    with pytest.raises(ValueError, match=message):
        rc.spec("areal", config)


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        ({"m2_threshold": 0.0}, "m2_threshold: expected a finite number > 0"),
        ({**ACTOR, "m2_threshold": 0.04}, "m2_threshold: expected None beside rejection_sampling"),
        ({"use_sapo_loss": True, "use_decoupled_loss": True}, "use_sapo_loss: AReaL refuses"),
        (
            {"use_sapo_loss": True, "importance_sampling_level": "sequence"},
            "importance_sampling_level: expected 'token'",
        ),
        ({"use_cispo_loss": True, "use_sapo_loss": True, "eps_clip_higher": 4.0}, "use_cispo_loss: AReaL refuses"),
        ({"use_cispo_loss": True}, "eps_clip_higher, which use_cispo_loss needs"),
        ({"c_clip": 1.0}, "c_clip: expected a number > 1"),
    ],
)
def test_losses_that_are_refused(actor, message):
    with pytest.raises((ValueError, TypeError), match=message):
        rc.recipe("areal", {"actor": actor})

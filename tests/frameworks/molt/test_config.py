"""molt's flags: levels and modes read into Specs; loss modes and KL into recipes."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

import rollout_corr as rc
from rollout_corr.specs.correction import Spec


def flags(**advantage):
    return {"algo": {"advantage": {f"is_correction_{name}": value for name, value in advantage.items()}}}


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (flags(), Spec()),
        (flags(level="token"), rc.spec("molt.token")),
        (
            flags(level="token", mode="clip", threshold=[0.4, 3.0]),
            rc.spec("molt.token", low=0.4, high=3.0, mode="clip"),
        ),
        (flags(level="token", mode="trunc"), rc.spec("molt.token", mode="trunc")),
        (flags(level="seq"), rc.spec("molt.seq")),
        (flags(level="geo", threshold=(0.99, 1.01)), rc.spec("molt.geo")),
        (
            argparse.Namespace(**{"algo.advantage.is_correction_level": "seq", "actor.muon.lr": 1e-3, "seed": 1}),
            rc.spec("molt.seq"),
        ),
    ],
)
def test_spec(config, spec):
    assert rc.spec("molt", config) == spec


def test_recipe():
    assert rc.recipe("molt", flags()) == rc.recipe("molt.ppo")
    actor = {"eps_clip_low_high": (0.1, 0.3), "dual_clip": 4.0}
    assert rc.recipe("molt", flags(level="token") | {"actor": actor}) == rc.recipe("molt.token", **actor)
    assert rc.recipe("molt", {"actor": {"loss_mode": "gspo"}}) == rc.recipe("molt.gspo")
    cispo = {"actor": {"loss_mode": "cispo", "eps_clip_low_high": [0.2, 1.3]}}
    assert rc.recipe("molt", cispo).loss.surrogate == rc.Score(upper=1.3, clamp=30.0)
    kl = SimpleNamespace(use_loss=True, init_coef=None, estimator="k3", horizon=10)
    held = SimpleNamespace(algo=SimpleNamespace(kl=kl, advantage=SimpleNamespace(estimator="rloo")))
    assert rc.recipe("molt", held).loss.kl == rc.KL("k3", 0.01, log_clamp=30.0, value_clamp=10.0)
    held.algo.advantage.estimator = "on_policy_distill"
    assert rc.recipe("molt", held).loss.kl is None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (flags(levl="token"), r"unknown key 'algo\.advantage\.is_correction_levl' \(did you mean"),
        (flags(level="geo", mode="clip"), "expected 'mask' with is_correction_level 'geo', got 'clip'"),
        (flags(level="token", threshold=[2.0]), "is_correction_threshold: expected LOW HIGH"),
        ({"actor": {"loss_mode": "cispo"}}, "eps_clip_low_high: expected the highest ratio, at least 1"),
        ({"actor": {"loss_mode": "gspo", "dual_clip": 3.0}}, "dual_clip: expected None with actor.loss_mode 'gspo'"),
    ],
)
def test_refused(config, says):
    with pytest.raises(ValueError, match=rf"^recipe\('molt'\): .*{says}"):
        rc.recipe("molt", config)

"""OpenRLHF's flags: levels, modes and gatings read into Specs; loss types, aggregation and KL into recipes."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

import rollout_corr as rc
from rollout_corr.specs.correction import Criterion, Spec, Weight

pytestmark = pytest.mark.usefixtures("nothing_said_yet")


def flags(**advantage):
    return {"algo": {"advantage": {f"is_correction_{name}": value for name, value in advantage.items()}}}


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (flags(), Spec()),
        (flags(level="token", mode="clip"), rc.spec("openrlhf.tis")),
        (flags(level="token", threshold=[0.4, 3.0]), rc.spec("openrlhf.icepop", low=0.4, high=3.0)),
        (flags(level="seq"), rc.spec("openrlhf.seq_mask_tis")),
        (flags(level="seq", gating="binary_kl", threshold=[3e-3]), rc.spec("openrlhf.flash_reinforce")),
        (flags(level="token", gating="binary_kl", threshold=(0.0, 0.05)), rc.spec("openrlhf.dppo_like")),
        (
            flags(level="seq", gating="tv", threshold=[0.1]),
            Spec(Weight.token(), (Criterion("tv", "sequence", "mean", upper=0.1, eps=1e-6),), "zero"),
        ),
        (
            argparse.Namespace(
                **{"algo.advantage.is_correction_level": "seq", "actor.adam.lr": 1e-6, "train.batch_size": 8}
            ),
            rc.spec("openrlhf.seq_mask_tis"),
        ),
    ],
)
def test_spec(config, spec):
    assert rc.spec("openrlhf", config) == spec


@pytest.mark.parametrize(("kind", "name"), [("tis", "tis"), ("icepop", "icepop"), ("seq-mask-tis", "seq_mask_tis")])
def test_names_before_0_11_2(kind, name):
    with pytest.warns(UserWarning, match=r"is_correction_enable, is_correction_type are old names; write --algo\."):
        assert rc.spec("openrlhf", flags(enable=True, type=kind)) == rc.spec(f"openrlhf.{name}")
    assert rc.spec("openrlhf", flags(enable=False, type=kind)) == Spec()


def test_recipe():
    assert rc.recipe("openrlhf", flags()) == rc.recipe("openrlhf.ppo")
    actor = {"eps_clip_low_high": (0.2, 0.28), "dual_clip": 3.0, "loss_agg_mode": "seq-mean-token-mean"}
    config = flags(level="token", mode="clip") | {"actor": actor}
    assert rc.recipe("openrlhf", config) == rc.recipe("openrlhf.tis", **actor)
    kl = {"use_loss": True, "init_coef": 0.1, "estimator": "k3"}
    algo = SimpleNamespace(advantage=SimpleNamespace(is_correction_level="off"), kl=SimpleNamespace(**kl))
    made = rc.recipe("openrlhf", SimpleNamespace(algo=algo, actor=SimpleNamespace(optim="adam")))
    assert made.loss.kl == rc.KL("k3", 0.1, value_clamp=10.0)
    corrected = flags(level="token") | {"actor": {"policy_loss_type": "gspo"}}
    gspo = rc.recipe("openrlhf", corrected)
    assert gspo.loss.surrogate == rc.GSPO(0.2, 0.2, of="new/rollout") and gspo.spec is None
    assert rc.recipe("openrlhf", {"actor": {"policy_loss_type": "gspo"}}) == rc.recipe("openrlhf.gspo")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (flags(levl="token"), r"unknown key 'algo\.advantage\.is_correction_levl' \(did you mean"),
        (flags(level="seq", mode="clip"), "'clip' needs is_correction_level 'token'"),
        (flags(level="seq", gating="tv"), "expected an upper bound alone with gating 'tv'"),
        (flags(level="seq", threshold=[1.0, 2.0, 3.0]), "expected HIGH or LOW HIGH"),
        (flags(level="sequence"), r"expected one of \['off', 'token', 'seq'\]"),
        (
            {"actor": {"loss_agg_mode": "seq-mean-token-mean"}, "algo": {"kl": {"use_loss": True}}},
            "divides the KL by tokens and this policy loss by sequences",
        ),
        ({"algo": {"kl": {"use_loss": True, "unbiased_gradient": True}}}, "weighs the KL's gradient and not its value"),
    ],
)
def test_refused(config, says):
    with pytest.raises(ValueError, match=rf"^recipe\('openrlhf'\): .*{says}"):
        rc.recipe("openrlhf", config)

"""slime's and miles's flags: functions of `--use-tis`, mis.yaml, OPSM, estimators, the KL and the reductions."""

from __future__ import annotations

from argparse import Namespace

import pytest

import rollout_corr as rc
from rollout_corr.specs.correction import Spec

MIS = {
    "use_tis": True,
    "custom_tis_function_path": "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
}
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"


@pytest.mark.parametrize("framework", ["slime", "miles"])
@pytest.mark.parametrize(
    ("config", "spec"),
    [
        ({}, Spec()),
        ({"use_tis": True}, rc.spec("slime.tis")),
        ({"use_tis": True, "tis_clip": 5.0, "lr": 1e-6}, rc.spec("slime.tis", tis_clip=5.0)),
        (Namespace(use_tis=True, hf_checkpoint="x", tis_clip_low=0.5), rc.spec("slime.tis", tis_clip_low=0.5)),
        ({"use_tis": True, "custom_tis_function_path": ICEPOP}, rc.spec("slime.icepop")),
        (
            {"use_tis": True, "custom_tis_function_path": "rollout_corr.frameworks.slime.icepop"},
            rc.spec("slime.icepop"),
        ),
        ({"get_mismatch_metrics": True, **MIS, "use_tis": False}, Spec()),
        ({"use_opsm": True}, rc.spec("slime.opsm")),
    ],
)
def test_read(framework, config, spec):
    assert rc.spec(framework, config) == spec


def test_mis():
    """As it is shipped, by its path or by its keys alone."""
    shipped = rc.spec("slime", MIS)
    assert rc.spec("slime", {"use_tis": True, "use_rs": True, "tis_level": "token"}) == shipped
    preset = rc.spec("slime.mis")
    assert (shipped.weight, shipped.rejected) == (preset.weight, preset.rejected)
    bounds = [[(c.over, c.reduce, c.lower, c.upper, c.drop) for c in spec.criteria] for spec in (shipped, preset)]
    assert bounds[0] == bounds[1]


def test_recipe():
    assert rc.recipe("slime", {"use_tis": True}) == rc.recipe("slime.tis")
    flags = {"advantage_estimator": "gspo", "eps_clip": 0.1, "eps_clip_c": 3.0, "calculate_per_token_loss": True}
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True}
    penalty = rc.KL("k3", 0.1, value_clamp=10.0, weight="ratio")
    assert rc.recipe("miles", flags | kl) == rc.Recipe(None, rc.Loss(rc.GSPO(0.1, 0.1, 3.0), kl=penalty))
    cispo = rc.recipe("slime", {"advantage_estimator": "cispo", "eps_clip": 1.5, "eps_clip_high": 4.0})
    assert cispo.loss.surrogate == rc.Score(0.0, 5.0)
    of = rc.spec("slime", {"use_opsm": True, "use_rollout_logprobs": True}).criteria[0].of
    assert of == "new/rollout"


@pytest.mark.parametrize(
    ("framework", "config", "message"),
    [
        ("slime", {"tis_clp": 2.0}, r"unknown key 'tis_clp' \(did you mean 'tis_clip'\?\)"),
        ("miles", Namespace(use_tis=True, tis_clip_lo=0.5), r"'tis_clip_lo' \(did you mean 'tis_clip_low'\?\)"),
        ("slime", {"use_tis": True, "custom_tis_function_path": "a.b"}, "custom_tis_function_path: expected one that"),
        ("slime", {"custom_pg_loss_reducer_function_path": "a.b"}, "a function of its own cannot be read"),
        ("slime", {"loss_type": "sft_loss"}, "loss_type: expected 'policy_loss'"),
        ("slime", {"use_tis": True, "use_rollout_logprobs": True}, "use_rollout_logprobs: the ratio is the correction"),
        ("miles", {"advantage_estimator": "cispo"}, "advantage_estimator: expected one of"),
        ("slime", {"use_kl_loss": True, "kl_loss_type": "k4"}, "kl_loss_type: expected one of"),
        ("slime", MIS | {"tis_level": "word"}, "tis_level: expected one of"),
        (
            "slime",
            MIS | {"use_opsm": True, "use_kl_loss": True, "kl_loss_coef": 0.1},
            "use_opsm: leaves the KL as it is",
        ),
    ],
)
def test_refused(framework, config, message):
    with pytest.raises(ValueError, match=message):
        rc.recipe(framework, config)

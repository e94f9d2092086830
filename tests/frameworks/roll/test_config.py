"""ROLL's configuration: weight and filters of its correction, the clip, the variants and the means of its loss."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import rollout_corr as rc
from rollout_corr.specs.correction import Criterion, Spec, Weight

ON = {"enabled": True}
DEFAULT = {"is_weight": ON, "filters": [ON]}


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (DEFAULT, rc.spec("roll.default")),
        ({"train_infer_correction": DEFAULT, "exp_name": "x", "pg_clip": 0.1}, rc.spec("roll.default")),
        (
            SimpleNamespace(train_infer_correction=SimpleNamespace(is_weight=SimpleNamespace(enabled=False)), seed=1),
            Spec(),
        ),
        ({"train_infer_correction": None}, Spec()),
        ({"is_weight": ON | {"weight_type": "sequence", "upper_bound": None}}, Spec(Weight.product())),
        (
            {"filters": [{"enabled": False}, ON | {"agg_type": "geometric", "ratio_low": 0.9, "ratio_high": 1.1}]},
            Spec(None, (Criterion("ratio", "sequence", "mean", lower=0.9, upper=1.1),)),
        ),
        (
            {"filters": [ON | {"ratio_enabled": False, "diff_enabled": True}, ON | {"agg_type": "sequence"}]},
            Spec(
                None,
                (
                    Criterion("prob_diff", lower=-0.2, upper=0.2, label="filter_0_diff"),
                    Criterion("ratio", "sequence", "sum", lower=0.8, upper=1.2, label="filter_1_ratio"),
                ),
            ),
        ),
    ],
)
def test_read(config, spec):
    assert rc.spec("roll", config) == spec


def test_recipe():
    assert rc.recipe("roll", {"train_infer_correction": DEFAULT}) == rc.recipe("roll.default")
    settings = {"use_kl_loss": True, "kl_loss_coef": 0.1, "loss_agg_mode": "token-mean", "importance_sampling": "seq"}
    ranged = {"use_pg_clip_range": True, "pg_clip_high": 0.28, "dual_clip_loss": True}
    loss = rc.Loss(rc.GSPO(0.2, 0.28, 1.4), rc.Mean(over="kept"), rc.KL("k3", 0.1, value_clamp=10.0))
    assert rc.recipe("roll", settings | ranged) == rc.Recipe(None, loss)


@pytest.mark.parametrize(
    ("actor", "recipe", "settings"),
    [
        ({"pg_variant": "vanilla"}, "vanilla", {}),
        ({"pg_variant": "tis", "tis_upper_bound": 2.0, "device_mapping": None}, "tis", {"tis_upper_bound": 2.0}),
        ({"pg_variant": "cispo", "cispo_epsilon_low": 0.2}, "cispo", {"cispo_epsilon_low": 0.2}),
        ({"pg_variant": "kimi15", "kimi15_tau": 0.5}, "kimi15", {"kimi15_tau": 0.5}),
    ],
)
def test_variants(actor, recipe, settings):
    made = rc.recipe("roll", {"actor_train": actor, "importance_sampling": "seq"})
    assert made.loss.surrogate == rc.recipe(f"roll.{recipe}", **settings).loss.surrogate
    ppo = rc.recipe("roll", {"actor_train": {"pg_variant": "ppo"}, "importance_sampling": "seq"})
    assert ppo.loss.surrogate == rc.PPO(0.2, 0.2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train_infer_correction": {"is_weigth": ON}}, r"unknown key 'is_weigth' \(did you mean 'is_weight'\?\)"),
        (
            {"train_infer_correction": {"is_weight": {"uper_bound": 1.0}}},
            r"unknown key 'uper_bound' \(did you mean 'upper_bound'\?\)",
        ),
        (
            {"train_infer_correction": {"filters": [{"ratio_hi": 1.0}]}},
            r"unknown key 'ratio_hi' \(did you mean 'ratio_high'\?\)",
        ),
        ({"pg_clip_hig": 0.2}, r"unknown key 'pg_clip_hig' \(did you mean 'pg_clip_high'\?\)"),
        (
            {"train_infer_correction": {"is_weight": ON | {"weight_type": "turn"}}},
            "is_weight.weight_type: expected one",
        ),
        ({"train_infer_correction": {"is_weight": ON | {"detach": False}}}, "is_weight.detach: expected true"),
        ({"ratio_type": "turn"}, "ratio_type: expected one of"),
        ({"ratio_type": "segment", "actor_train": {"pg_variant": "tis"}}, "ratio_type: expected 'token' beside"),
        (
            {"ratio_type": "segment", "train_infer_correction": {"filters": [{"enabled": True}]}},
            "ratio_type: 'segment' beside a filter with agg_type 'token'",
        ),
        ({"actor_train": {"pg_variant": "topr"}}, "'topr' needs the sign of the reward"),
        ({"actor_train": {"pg_variant": "x"}}, "actor_train.pg_variant: expected one of"),
        ({"actor_train": {"pg_variant": "cispo", "cispo_use_unified_mask": True}}, "cispo_use_unified_mask: expected"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "loss_agg_mode: 'seq-mean-token-sum-norm' divides by"),
        ({"rl_loss_coef": 0.5}, "rl_loss_coef: multiply the value"),
        ({"length_loss_weight": True}, "length_loss_weight: multiply the advantages"),
    ],
)
def test_refused(config, message):
    with pytest.raises(ValueError, match=message):
        rc.recipe("roll", config)

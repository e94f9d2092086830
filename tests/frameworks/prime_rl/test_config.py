"""prime-rl's block `loss`, of both generations, and settings that are none of a type's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

import rollout_corr as rc


@dataclass
class IPOLossConfig:
    type: str = "ipo"
    eps: float = 0.2
    adv_tau: float = 1.0
    kl_tau: float = 0.01


@pytest.mark.parametrize(
    ("config", "name", "settings"),
    [
        ({}, "ipo", {}),
        ({"eps": 0.3}, "ipo", {"eps": 0.3}),
        ({"type": "ipo", "kl_tau": 0.5}, "ipo", {"kl_tau": 0.5}),
        ({"dppo_mask_low": 0.1}, "dppo", {"dppo_mask_low": 0.1}),
        ({"type": "default", "dppo_mask_high": 0.1, "kl_tau": 0.0}, "dppo", {"dppo_mask_high": 0.1, "kl_tau": 0.0}),
        ({"type": "icepop", "ratio_high": 4.0}, "icepop", {"ratio_high": 4.0}),
        ({"type": "kpop", "kpop_threshold": 0.2}, "kpop", {"kpop_threshold": 0.2}),
        (IPOLossConfig(), "ipo", {"eps": 0.2, "kl_tau": 0.01}),
        ({"trainer": {"loss": {"eps": 0.3}, "optim": {}}, "orchestrator": {}}, "ipo", {"eps": 0.3}),
        ({"loss": IPOLossConfig(), "model": {}}, "ipo", {"eps": 0.2, "kl_tau": 0.01}),
        ({"model": {}, "optim": {}}, "ipo", {}),
    ],
)
def test_read(config, name, settings):
    assert rc.recipe("prime_rl", config) == rc.recipe(f"prime_rl.{name}", **settings)
    settings.pop("kl_tau", None)
    assert rc.spec("prime_rl", config) == rc.spec(f"prime_rl.{name}", **settings)


def test_adv_tau_is_a_factor_of_the_policy_term_alone():
    made, plain = (rc.recipe("prime_rl", {"type": "ipo", **more}) for more in ({"adv_tau": 0.5}, {}))
    surrogate = replace(plain.loss.surrogate, coef=0.5)
    assert made == rc.Recipe(plain.spec, replace(plain.loss, surrogate=surrogate))


@pytest.mark.usefixtures("nothing_said_yet")
def test_old_name():
    with pytest.warns(UserWarning, match="ipo_threshold is an old name; write eps = 0.3"):
        spec = rc.spec("prime_rl", {"type": "ipo", "ipo_threshold": 0.3})
    assert spec == rc.spec("prime_rl.ipo", eps=0.3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"epss": 0.1}, r"unknown key 'epss' \(did you mean 'eps'\?\)"),
        ({"trainer": {"loss": {"kl_ta": 0.1}}}, r"unknown key 'kl_ta' \(did you mean 'kl_tau'\?\)"),
        ({"type": "ipo", "ratio_low": 0.1}, "ratio_low: no setting of type 'ipo', which has"),
        ({"type": "icepop", "kl_tau": 0.1}, "kl_tau: no setting of type 'icepop', which has"),
        ({"type": "custom", "import_path": "a.b"}, "type: 'custom' names a function of its own"),
        ({"type": "dapo"}, "type: expected one of"),
        ({"adv_tau": 0.0}, "adv_tau: expected a"),
    ],
)
def test_refused(config, message):
    with pytest.raises(ValueError, match=message):
        rc.recipe("prime_rl", config)

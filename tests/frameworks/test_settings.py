"""Settings are found in whatever object holds them, and misspelled ones are refused with the nearest right name."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import pytest

import rollout_corr as rc
from rollout_corr.frameworks.shared.settings import Block, Given, Setting, flags_in, given_in, maybe, or_null, word
from rollout_corr.specs.validate import positive

KNOWN = {"clip_low": 0.2, "clip_high": 0.2, "mode": word(None, ["a"])}


class Model:
    """A pydantic model, as far as reading it goes."""

    def model_dump(self):
        return {"clip_low": 0.1, "_target_": "hydra's"}


@dataclass
class Arguments:
    clip_low: float = 0.1
    learning_rate: float = 1e-6
    mode: str | None = None


@pytest.mark.parametrize(
    "config",
    [
        {"clip_low": 0.1},
        MappingProxyType({"clip_low": 0.1}),
        Model(),
        Arguments(),
        argparse.Namespace(clip_low=0.1, lr=1.0, epochs=3),
        SimpleNamespace(clip_low=0.1),
        {"loss": {"clip_low": 0.1}, "clip_low": 7.0, "optimizer": {}},
        {"trainer": {"loss": SimpleNamespace(clip_low=0.1)}},
        {"clip_low": 0.1, "optimizer": {"lr": 1.0}},
    ],
    ids=["mapping", "read only", "model", "dataclass", "namespace", "attributes", "block", "nested", "whole"],
)
def test_kinds_of_configurations(config):
    read = given_in(config, KNOWN, blocks=[("loss",), ("trainer", "loss")], whole=["optimizer"])
    assert dict(read) == {"clip_low": 0.1, "clip_high": 0.2, "mode": None}


@pytest.mark.parametrize(
    "config", [{"clip_lo": 1}, SimpleNamespace(clip_lo=1), {"clip_lo": 1, "optimizer": 0}, {"loss": {"clip_lo": 1}}]
)
def test_misspelled(config):
    with pytest.raises(ValueError, match=r"unknown key 'clip_lo' \(did you mean 'clip_low'\?\)"):
        given_in(config, KNOWN, blocks=[("loss",)], whole=["optimizer"])


@pytest.mark.usefixtures("nothing_said_yet")
@pytest.mark.parametrize(
    ("read", "given"),
    [
        (lambda given: given_in(given, KNOWN)["clip_low"], {"clip_low": 0.1, "of_next_year": 1}),
        (lambda given: Given({"loss": Block(KNOWN)}, {"loss": given})["loss"]["clip_low"],
         {"clip_low": 0.1, "of_next_year": 1}),
        (lambda given: flags_in(given, FLAGS)["actor.clip"], {"actor": {"clip": 0.1, "of_next_year": 1}}),
        (lambda given: rc.spec("verl", given).weight.upper, {"rollout_is_threshold": 0.1, "rollout_is": "token",
         "of_next_year": 1}),
        (lambda given: rc.spec("xtuner", given).weight.upper, {"rollout_is_threshold": (0.1, 0.0), "of_next_year": 1}),
    ],
)  # fmt: skip
def test_a_key_of_a_newer_release_is_left_out_with_a_warning(read, given):
    with pytest.warns(UserWarning, match=r"unknown key '(actor\.)?of_next_year' is ignored"):
        assert read(given) == 0.1


@pytest.mark.usefixtures("nothing_said_yet")
@pytest.mark.parametrize(
    ("framework", "config", "like"),
    [
        ("trl", {"epsilon": 0.2, "entropy_coef_max": 0.1}, "entropy_coef"),
        ("trl", {"epsilon": 0.2, "max_prompt_length": 8}, "max_completion_length"),
        ("verl", {"policy_loss": {"loss_mode": "dro", "dro_beta": 0.1, "jsd_beta": 0.1}}, "dro_beta"),
        ("nemo", {"loss_fn": {"ratio_clip_min": 0.2, "ratio_eps_max": 0.2}}, "ratio_clip_max"),
        ("verl", {"actor_rollout_ref": {"actor": {"clip_ratio": 0.2, "clip_ratio_mid": 0.2}}, "algorithm": {}},
         "clip_ratio_c"),
        ("xtuner", {"loss_cfg": {"policy_loss_cfg": {"cliprange_low": 0.1, "cliprange_high": 0.2, "cliprange_mid": 1}}},
         "cliprange_high"),
    ],
)  # fmt: skip
def test_a_key_that_is_like_another_may_be_of_a_newer_release(framework, config, like):
    """Three letters are no slip: these are names that the frameworks or their open pull requests have had."""
    with pytest.warns(UserWarning, match=rf"is ignored; it may belong to a newer release \(did you mean '{like}'\?\)"):
        rc.recipe(framework, config)


@pytest.mark.filterwarnings("error:unknown key")
def test_the_block_algorithm_of_verl_holds_keys_of_no_concern():
    config = {"gamma": 1.0, "kl_penalty": "kl", "filter_groups": {}, "rollout_correction": {"rollout_is": "token"}}
    assert rc.spec("verl", config) == rc.spec("verl", {"rollout_is": "token"})
    with pytest.raises(ValueError, match=r"'rollout_corection' \(did you mean 'rollout_correction'\?\)"):
        rc.spec("verl", {"gamma": 1.0, "rollout_corection": {}})


def test_unknown():
    with pytest.raises(ValueError, match="unknown key 'x', expected some of"):
        given_in({"x": 1}, KNOWN)
    with pytest.raises(TypeError, match="loss: expected a mapping or a config object, got int 3"):
        given_in({"loss": 3}, KNOWN, blocks=[("loss",)])
    with pytest.raises(ValueError, match=r"recipe: expected a framework .*one of \[.*\], got 'none'"):
        rc.recipe("none", {})


@pytest.mark.parametrize(
    ("framework", "config", "said"),
    [
        ("trl", SimpleNamespace(beta="batch", learning_rate=1e-6), "beta: expected a number"),
        ("openrlhf", SimpleNamespace(actor=SimpleNamespace(eps_clip="x")), "actor.eps_clip: expected a number"),
    ],
)
def test_an_error_names_the_frameworks_own_key(framework, config, said):
    with pytest.raises(TypeError) as caught:
        rc.recipe(framework, config)
    assert str(caught.value).startswith(f"recipe({framework!r}): {said}"), caught.value
    assert caught.value.key == said.partition(":")[0]
    assert caught.value.why and caught.value.why in str(caught.value)


TABLE = {
    "on": False,
    "low": 0.2,
    "high": None,
    "cap": maybe(2.0),
    "tau": Setting(1.0, positive),
    "limit": Setting(None, or_null(positive)),
    "mode": word("mask", ("mask", "clip")),
    "loss": Block({"beta": 0.1}),
    "other": "unchecked",
}
DEFAULTS = {"on": False, "low": 0.2, "high": None, "cap": 2.0, "tau": 1.0, "limit": None, "mode": "mask"}


def test_a_row_says_which_values_a_setting_takes():
    given = Given(TABLE, {})
    assert {name: given[name] for name in DEFAULTS} == DEFAULTS and given["loss"]["beta"] == 0.1
    changed = {"on": None, "low": 1, "high": 3, "cap": None, "limit": 5.0, "mode": "clip", "loss": None, "other": []}
    given = Given(TABLE, changed)
    assert dict(given) == {**DEFAULTS, **changed, "on": False, "loss": given["loss"]}
    assert dict(given["loss"]) == {"beta": 0.1}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("on", 1, "on: expected true or false, got int 1"),
        ("low", None, "low: expected a number, got NoneType None"),
        ("high", "1", "high: expected a number, got the string '1'"),
        ("tau", 0, "tau: expected a finite number > 0, got 0.0"),
        ("limit", -1, "limit: expected a finite number > 0, got -1.0"),
        ("mode", None, r"mode: expected one of \['mask', 'clip'\], got None"),
        ("loss", 3, "loss: expected a mapping or a config object, got int 3"),
        ("loss", {"beta": "x"}, "loss.beta: expected a number, got the string 'x'"),
    ],
)
def test_a_wrong_value_is_refused_when_it_is_read_and_not_before(name, value, said):
    given = Given(TABLE, {name: value})
    assert given["cap"] == 2.0
    with pytest.raises((TypeError, ValueError), match=f"^{said}$") as caught:
        dict(given[name]) if name == "loss" else given[name]
    assert caught.value.key == said.partition(":")[0] and said.startswith(f"{caught.value.key}: ")


def test_an_error_of_a_spec_is_laid_to_the_settings_with_its_value():
    given = Given(TABLE, {"low": 3.0, "high": 2, "cap": 2.0})
    with pytest.raises(ValueError, match="lower <= upper") as caught:
        rc.Weight.token(lower=given["low"], upper=given["high"])
    # `cap` has this value too, and was not read.
    assert str(given.blamed(caught.value)) == f"low=3.0, high=2: {caught.value}"


FLAGS = {"actor.clip": 0.2, "algo.kl.coef": 0.0}
OTHERS = ("actor.adam", "algo.kl.target")


@pytest.mark.parametrize(
    "config",
    [
        {"actor": {"clip": 0.1}},
        {"actor.clip": 0.1, "actor.adam.lr": 1e-6, "ckpt.path": "."},
        argparse.Namespace(**{"actor.clip": 0.1}),
        SimpleNamespace(
            actor=SimpleNamespace(clip=0.1, adam=SimpleNamespace(lr=1.0)),
            algo=SimpleNamespace(kl=SimpleNamespace(target=None), other=1),
            use_ms=False,
        ),
    ],
    ids=["nested", "dotted", "flat namespace", "nested namespace"],
)
def test_flags(config):
    assert dict(flags_in(config, FLAGS, OTHERS)) == {"actor.clip": 0.1, "algo.kl.coef": 0.0}


@pytest.mark.parametrize(
    "config", [{"actor": {"clp": 1}}, {"actor.clp": 1}, SimpleNamespace(actor=SimpleNamespace(clp=1))]
)
def test_misspelled_flag(config):
    with pytest.raises(ValueError, match=r"unknown key 'actor\.clp' \(did you mean 'actor\.clip'\?\)"):
        flags_in(config, FLAGS, OTHERS)


def test_flags_without_their_block():
    with pytest.raises(ValueError, match=r"unknown key 'clip', expected some of \['actor', 'algo'\]"):
        flags_in({"clip": 0.1}, FLAGS)
    with pytest.raises(TypeError, match="actor: expected a mapping or a config object, got int 3"):
        flags_in({"actor": 3}, FLAGS)

"""Settings are found in whatever object holds them, and misspelled ones are refused with the nearest right name."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import pytest

import rollout_corr as rc
from rollout_corr.frameworks.shared.settings import block_of, flags_of, in_its_words, settings_of

KNOWN = {"clip_low": 0.2, "clip_high": 0.2, "mode": None}


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
    read = settings_of(config, KNOWN, blocks=[("loss",), ("trainer", "loss")], whole=["optimizer"])
    assert read == {"clip_low": 0.1, "clip_high": 0.2, "mode": None}


@pytest.mark.parametrize(
    "config", [{"clip_lo": 1}, SimpleNamespace(clip_lo=1), {"clip_lo": 1, "optimizer": 0}, {"loss": {"clip_lo": 1}}]
)
def test_misspelled(config):
    with pytest.raises(ValueError, match=r"unknown key 'clip_lo' \(did you mean 'clip_low'\?\)"):
        settings_of(config, KNOWN, blocks=[("loss",)], whole=["optimizer"])


@pytest.mark.usefixtures("nothing_said_yet")
@pytest.mark.parametrize(
    ("read", "given"),
    [
        (lambda given: settings_of(given, KNOWN)["clip_low"], {"clip_low": 0.1, "of_next_year": 1}),
        (lambda given: block_of(given, "loss", KNOWN)["clip_low"], {"clip_low": 0.1, "of_next_year": 1}),
        (lambda given: flags_of(given, FLAGS)["actor.clip"], {"actor": {"clip": 0.1, "of_next_year": 1}}),
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
        ("xtuner", {"loss_cfg": {"policy_loss_cfg": {"cliprange_low": 0.1, "cliprange_high": 0.2, "cliprange_mid": 1}}},
         "cliprange_high"),
    ],
)  # fmt: skip
def test_a_key_that_is_like_another_may_be_of_a_newer_release(framework, config, like):
    """Three letters are no slip: these are names that the frameworks or their open pull requests have had."""
    with pytest.warns(UserWarning, match=rf"is ignored; it may belong to a newer release \(did you mean '{like}'\?\)"):
        rc.recipe(framework, config)


def test_unknown():
    with pytest.raises(ValueError, match="unknown key 'x', expected some of"):
        settings_of({"x": 1}, KNOWN)
    with pytest.raises(TypeError, match="loss: expected a mapping or a config object, got int 3"):
        settings_of({"loss": 3}, KNOWN, blocks=[("loss",)])
    with pytest.raises(ValueError, match=r"recipe: expected a framework .*one of \[.*\], got 'none'"):
        rc.recipe("none", {})


REFUSED = [
    ("trl", {"vllm_importance_sampling_clip_max": "2.0"}, "vllm_importance_sampling_clip_max='2.0': clip_max"),
    ("trl", {"epsilon": "k1", "beta": "batch"}, "epsilon='k1': PPO.low"),
    ("trl", SimpleNamespace(beta="batch", learning_rate=1e-6), "beta"),
    ("nemo", {"loss_fn": {"ratio_clip_min": "x"}}, "loss_fn.ratio_clip_min='x': PPO.low"),
    ("nemo", {"loss_fn": {}, "grpo": {"seq_logprob_error_threshold": {1: 2}}},
     "grpo.seq_logprob_error_threshold={1: 2}: Criterion.upper"),
    ("openrlhf", SimpleNamespace(actor=SimpleNamespace(eps_clip="x")), "actor.eps_clip='x': PPO.low"),
]  # fmt: skip


@pytest.mark.parametrize(("framework", "config", "said"), REFUSED)
def test_an_error_names_the_frameworks_own_key(framework, config, said):
    with pytest.raises((TypeError, ValueError)) as caught:
        rc.recipe(framework, config)
    assert str(caught.value).startswith(f"recipe({framework!r}): {said}: expected a number"), caught.value


def read_pair(config):
    """Read two bounds, with words of its own in the errors."""

    def read(given):
        lower, upper = (int(given.get(name, default)) for name, default in (("eps_low", 0), ("eps_high", 9)))
        if lower < 0:
            raise ValueError("eps_low: too small")
        if lower > upper:
            raise ValueError("expected lower <= upper")

    try:
        read(config)
    except ValueError as error:
        return in_its_words(error, read, config)


def test_two_keys_that_do_not_fit_each_other_are_both_named():
    assert read_pair({"eps_low": 3, "eps_high": "2", "other": 1}) == "eps_low=3, eps_high='2': expected lower <= upper"


def test_an_error_that_names_the_key_stays_as_it_is():
    assert read_pair({"eps_low": -1, "other": 1}) == "eps_low: too small"


def test_a_configuration_that_holds_itself_ends():
    config = {"eps_low": 3, "eps_high": 2}
    config["more"] = config
    assert read_pair(config) == "eps_low=3, eps_high=2: expected lower <= upper"


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
    assert flags_of(config, FLAGS, OTHERS) == {"actor.clip": 0.1, "algo.kl.coef": 0.0}


@pytest.mark.parametrize(
    "config", [{"actor": {"clp": 1}}, {"actor.clp": 1}, SimpleNamespace(actor=SimpleNamespace(clp=1))]
)
def test_misspelled_flag(config):
    with pytest.raises(ValueError, match=r"unknown key 'actor\.clp' \(did you mean 'actor\.clip'\?\)"):
        flags_of(config, FLAGS, OTHERS)


def test_flags_without_their_block():
    with pytest.raises(ValueError, match=r"unknown key 'clip', expected some of \['actor', 'algo'\]"):
        flags_of({"clip": 0.1}, FLAGS)
    with pytest.raises(TypeError, match="actor: expected a mapping or a config object, got int 3"):
        flags_of({"actor": 3}, FLAGS)

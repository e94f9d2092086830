"""Settings are found in whatever object holds them, and misspelt ones are refused with the nearest right name."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import rollout_corr as rc
from rollout_corr.frameworks.shared.settings import flags_of, settings_of

KNOWN = {"clip_low": 0.2, "clip_high": 0.2, "mode": None}


@dataclass
class Arguments:
    clip_low: float = 0.1
    learning_rate: float = 1e-6
    mode: str | None = None


@pytest.mark.parametrize(
    "config",
    [
        {"clip_low": 0.1},
        Arguments(),
        argparse.Namespace(clip_low=0.1, lr=1.0, epochs=3),
        SimpleNamespace(clip_low=0.1),
        {"loss": {"clip_low": 0.1}, "clip_low": 7.0, "optimizer": {}},
        {"trainer": {"loss": SimpleNamespace(clip_low=0.1)}},
        {"clip_low": 0.1, "optimizer": {"lr": 1.0}},
    ],
    ids=["mapping", "dataclass", "namespace", "attributes", "block", "nested", "whole"],
)
def test_kinds_of_configurations(config):
    read = settings_of(config, KNOWN, blocks=[("loss",), ("trainer", "loss")], whole=["optimizer"])
    assert read == {"clip_low": 0.1, "clip_high": 0.2, "mode": None}


@pytest.mark.parametrize(
    "config", [{"clip_lo": 1}, SimpleNamespace(clip_lo=1), {"clip_lo": 1, "optimizer": 0}, {"loss": {"clip_lo": 1}}]
)
def test_misspelt(config):
    with pytest.raises(ValueError, match=r"unknown key 'clip_lo' \(did you mean 'clip_low'\?\)"):
        settings_of(config, KNOWN, blocks=[("loss",)], whole=["optimizer"])


def test_unknown():
    with pytest.raises(ValueError, match="unknown key 'x', expected some of"):
        settings_of({"x": 1}, KNOWN)
    with pytest.raises(TypeError, match="loss: expected a mapping or a config object, got int 3"):
        settings_of({"loss": 3}, KNOWN, blocks=[("loss",)])
    with pytest.raises(ValueError, match=r"recipe_from_config: expected one of \[.*\], got 'none'"):
        rc.recipe_from_config("none", {})


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
def test_misspelt_flag(config):
    with pytest.raises(ValueError, match=r"unknown key 'actor\.clp' \(did you mean 'actor\.clip'\?\)"):
        flags_of(config, FLAGS, OTHERS)


def test_flags_without_their_block():
    with pytest.raises(ValueError, match=r"unknown key 'clip', expected some of \['actor', 'algo'\]"):
        flags_of({"clip": 0.1}, FLAGS)
    with pytest.raises(TypeError, match="actor: expected a mapping or a config object, got int 3"):
        flags_of({"actor": 3}, FLAGS)

"""Configurations: the kinds of objects that are read, and xtuner's configuration."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch

import rollout_corr as rc
from builders.config_cases import VERL, XTUNER, cases, ratio
from rollout_corr.api.correct import correct
from rollout_corr.specs.correction import Criterion, Spec, Weight

pytestmark = pytest.mark.usefixtures("nothing_said_yet")


@dataclass
class BaseConfig(Mapping):
    """verl's configuration classes are dataclasses and mappings at once."""

    _target_: str = ""

    def __getitem__(self, key: str) -> object:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        return len(self.__dataclass_fields__)


@dataclass
class RolloutCorrectionConfig(BaseConfig):
    rollout_is: str | None = "sequence"
    rollout_is_threshold: float = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | None = None
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"


@dataclass
class PlainConfig:
    rollout_is: str = "sequence"
    rollout_is_threshold: float = 2.0


@dataclass
class AlgorithmConfig:
    adv_estimator: str = "grpo"
    rollout_correction: PlainConfig = field(default_factory=PlainConfig)


class Model:
    """A pydantic model, as far as reading it goes."""

    def __init__(self, **values: object) -> None:
        self.hidden = values

    def model_dump(self) -> dict[str, object]:
        return self.hidden


class Attributes:
    def __init__(self) -> None:
        self.rollout_is = "sequence"
        self._private = 1


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    "config",
    [
        {"rollout_is": "sequence"},
        types.MappingProxyType({"rollout_is": "sequence"}),
        RolloutCorrectionConfig(),
        PlainConfig(),
        AlgorithmConfig(),
        Model(rollout_is="sequence", rollout_is_threshold=2.0),
        types.SimpleNamespace(rollout_is="sequence"),
        Attributes(),
    ],
    ids=lambda config: type(config).__name__,
)
def test_kinds_of_configuration(config):
    assert rc.spec("verl", config) == Spec(Weight.product(upper=2), **VERL)


@pytest.mark.peers
def test_omegaconf():
    from omegaconf import OmegaConf

    config = OmegaConf.create(
        """
        algorithm:
          adv_estimator: grpo
          cap: 3.0
          rollout_correction: {rollout_is: token, rollout_is_threshold: "${algorithm.cap}"}
        """
    )
    assert rc.spec("verl", config) == Spec(Weight.token(upper=3), **VERL)
    assert rc.spec("verl", config.algorithm.rollout_correction) == Spec(Weight.token(upper=3), **VERL)
    listed = OmegaConf.create({"rollout_is": "token", "rollout_is_threshold": [0.5, 2]})
    assert rc.spec("verl", listed) == Spec(Weight.token(lower=0.5, upper=2, outside="zero"), **VERL)


@pytest.mark.parametrize("config", [None, 3, ["rollout_is"], RolloutCorrectionConfig], ids=repr)
def test_no_configuration_at_all(config):
    with pytest.raises(TypeError, match=r"spec\('verl'\): config: expected a mapping or a config object, got "):
        rc.spec("verl", config)


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"k1_bounds: expected one of \['verl', 'ratio'\], got 'mended'"):
        rc.spec("verl", {}, k1_bounds="mended")
    with pytest.raises(ValueError, match=r"version: expected None or '0\.6\.0', got '0\.7'"):
        rc.spec("verl", {}, version="0.7")
    with pytest.raises(TypeError, match=r"spec\('xtuner'\): .*k1_bounds"):
        rc.spec("xtuner", {}, k1_bounds="ratio")
    with pytest.raises(ValueError, match=r"spec: expected a framework .*one of \[.*'skyrl', .*'xtuner'\], got 'none'"):
        rc.spec("none", {})


# xtuner


@pytest.mark.usefixtures("strict")
def test_xtuner_shipped_configurations():
    shipped = {
        "rollout_is_level": "token",
        "rollout_is_mode": "both",
        "rollout_is_threshold": (5, 0.5),
        "rollout_is_mask_threshold": (5, 0.5),
        "rollout_is_veto_threshold": (20, 0),
    }
    reasoning = Spec(
        Weight.token(lower=0.5, upper=5),
        (ratio(0.5, 5, label="mask"), ratio(0, 20, drop="sequence", label="veto")),
        **XTUNER,
    )
    assert rc.spec("xtuner", shipped) == reasoning == rc.spec("xtuner.reasoning")
    agentic = shipped | {"rollout_is_threshold": [5, 0]}
    assert rc.spec("xtuner", agentic) == replace(reasoning, weight=Weight.token(lower=0, upper=5))
    assert rc.spec("xtuner", agentic) == rc.spec("xtuner.agentic")
    assert rc.spec("xtuner", Model(**shipped)) == reasoning
    assert rc.spec("xtuner", types.SimpleNamespace(loss_reduction="token", rollout_is=Model(**shipped))) == reasoning


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rollout_is_threshold": None, "rollout_is_veto_threshold": (20, 0), "rollout_is_mode": "both"},
        {"rollout_is": None},
    ],
)
def test_xtuner_without_threshold_is_off_with_its_veto(config):
    assert rc.spec("xtuner", config) == Spec(**XTUNER)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    ("level", "made", "reduce"),
    [("token", Weight.token, None), ("sequence", Weight.product, "sum"), ("geometric", Weight.geometric, "mean")],
)
def test_xtuner_levels_and_modes(level, made, reduce):
    def read(mode: str, **more: object) -> Spec:
        return rc.spec(
            "xtuner",
            {"rollout_is_level": level, "rollout_is_mode": mode, "rollout_is_threshold": (2, 0.25)} | more,
        )

    mask = ratio(0.25, 2, reduce, label="mask")
    assert read("truncate") == Spec(made(lower=0.25, upper=2), **XTUNER)
    assert read("mask") == Spec(made(), (mask,), "mask", **XTUNER)
    assert read("both") == Spec(made(lower=0.25, upper=2), (mask,), "mask", **XTUNER)
    own = read("both", rollout_is_mask_threshold=(3, 0))
    assert own == Spec(made(lower=0.25, upper=2), (ratio(0, 3, reduce, label="mask"),), "mask", **XTUNER)
    vetoed = read("truncate", rollout_is_veto_threshold=(20, 1e-4))
    assert vetoed == Spec(
        made(lower=0.25, upper=2), (ratio(1e-4, 20, drop="sequence", label="veto"),), "mask", **XTUNER
    )


@pytest.mark.usefixtures("strict")
def test_xtuner_veto_of_the_open_pull_request():
    def read(**more: object) -> tuple[Criterion, ...]:
        config = {"rollout_is_threshold": (2, 0.5), "rollout_is_veto_threshold": (20, 0.1)}
        return rc.spec("xtuner", config | {f"rollout_is_veto_{key}": value for key, value in more.items()}).criteria

    negative = {"when": "negative_advantage"}
    assert read(level="max", negative_adv_only=False) == (ratio(0.1, 20, drop="sequence", label="veto"),)
    assert read(level="geometric") == (ratio(0.1, 20, "mean", label="veto"),)
    assert read(level="geometric", negative_adv_only=True) == (ratio(0.1, 20, "mean", label="veto", **negative),)
    kl3 = Criterion("k3", over="sequence", reduce="mean", upper=20, label="veto")
    assert read(level="kl3") == (kl3,)
    assert read(level="kl3", negative_adv_only=True) == (replace(kl3, when="negative_advantage"),)
    assert read(negative_adv_only=True) == (
        ratio(0.1, None, "min", label="veto_low", **negative),
        ratio(None, 20, "max", label="veto_high", **negative),
    )


@pytest.mark.usefixtures("strict")
def test_xtuner_selects_by_the_mean_advantage():
    # One token of the first sequence has a negative advantage, its mean is positive: no veto.
    d = torch.tensor([[math.log(0.01), 0.0]] * 2, dtype=torch.float64)
    advantages = torch.tensor([[-1.0, 3.0], [1.0, -3.0]])
    config = {"rollout_is_threshold": (2, 0.5), "rollout_is_veto_threshold": (20, 0.1)}
    spec = rc.spec("xtuner", config | {"rollout_is_veto_negative_adv_only": True})
    out = correct(d - 1, torch.full_like(d, -1.0), spec=replace(spec, report=()), advantages=advantages)
    assert out.keep.tolist() == [True, False]


XTUNER_REFUSED = """
{rollout_is_treshold: [2, 1]} | ValueError unknown key 'rollout_is_treshold' (did you mean 'rollout_is_threshold'?)
{rollout_is: {typo: 1}} | ValueError unknown key 'typo'
{rollout_is: both} | TypeError rollout_is: expected a mapping or a config object, got str 'both'
{rollout_is_level: turn} | ValueError rollout_is_level: expected one of ['token', 'sequence', 'geometric']
{rollout_is_mode: clip} | ValueError rollout_is_mode: expected one of ['truncate', 'mask', 'both']
{rollout_is_veto_level: mean} | ValueError rollout_is_veto_level: expected one of ['max', 'geometric', 'kl3']
{rollout_is_veto_negative_adv_only: 'yes'} | TypeError rollout_is_veto_negative_adv_only: expected true or false
{rollout_is_threshold: [0.8, 1.2]} | ValueError rollout_is_threshold: expected (upper, lower)...(0.8, 1.2)
{rollout_is_threshold: [1, 1]} | ValueError rollout_is_threshold: expected (upper, lower) with upper > lower
{rollout_is_threshold: 5} | TypeError rollout_is_threshold: expected a pair (upper, lower), got int 5
{rollout_is_threshold: '5_0.5'} | TypeError rollout_is_threshold: expected a pair (upper, lower), got str
{rollout_is_threshold: [5]} | ValueError rollout_is_threshold: expected a pair (upper, lower), got (5,)
{rollout_is_threshold: [5, -1]} | ValueError rollout_is_threshold: expected a number >= 0, got -1
{rollout_is_threshold: [5, .nan]} | ValueError rollout_is_threshold: expected a number, got nan
{rollout_is_threshold: [5, true]} | TypeError rollout_is_threshold: expected a number, got bool True
{rollout_is_threshold: [5, 0.5], rollout_is_mode: mask, rollout_is_mask_threshold: [0.5, 5]} |
    ValueError rollout_is_mask_threshold: expected (upper, lower)
{rollout_is_threshold: [5, 0.5], rollout_is_veto_threshold: [0, 20]} |
    ValueError rollout_is_veto_threshold: expected (upper, lower)
"""


@pytest.mark.parametrize(("config", "kind", "message"), cases(XTUNER_REFUSED, pairs=True))
def test_xtuner_refuses(config, kind, message):
    with pytest.raises(kind, match=r"^spec\('xtuner'\): " + message):
        rc.spec("xtuner", config)

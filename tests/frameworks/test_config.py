"""Configurations: options of readers, and old names, which warn once."""

from __future__ import annotations

import re

import pytest
import torch
import yaml

import rollout_corr as rc
from builders.config_cases import VERL, error, k1, option, ratio, rows
from rollout_corr.specs.correction import Spec, Weight

pytestmark = pytest.mark.usefixtures("nothing_said_yet")


@pytest.mark.parametrize("config", [None, 3, ["rollout_is"], Spec], ids=repr)
def test_no_configuration_at_all(config):
    with pytest.raises(TypeError, match=r"spec\('verl'\): config: expected a mapping or a config object, got "):
        rc.spec("verl", config)


# --- options of readers ---


@pytest.mark.usefixtures("quiet")
def test_options():
    config = {"rollout_rs": "seq_mean_k1,token_k2", "rollout_rs_threshold": "0.6_1.4,3"}
    tests = option("token_k2", None, 3.0)
    assert rc.spec("verl", config).criteria == (k1("seq_mean_k1", 0.6, 1.4), tests)
    of_ratio = ratio(0.6, 1.4, "mean", label="seq_mean_k1")
    assert rc.spec("verl", config, k1_bounds="ratio").criteria == (of_ratio, tests)
    gspo = {"policy_loss": {"loss_mode": "gspo"}}
    assert [rc.recipe("verl", gspo, version=v).loss.mean.of for v in (None, "0.9.0")] == ["token", "sequence"]
    assert rc.recipe("skyrl", {}, kl_loss=False) == rc.recipe("skyrl.ppo")


WRONG_OPTIONS = """
rc.spec("verl", {}, k1_bounds="mended") | k1_bounds: expected one of ['verl', 'ratio'], got 'mended'
rc.recipe("verl", {}, version="0.8") | version: expected None or '0.9.0'
rc.spec("xtuner", {}, k1_bounds="ratio") | TypeError spec('xtuner'): ...k1_bounds
rc.spec("none", {}) | spec: expected a framework ...one of [...'skyrl', ...'xtuner'], got 'none'
rc.recipe("megatron", {}) | its configuration cannot be read, but by name there is megatron.grpo, megatron.tis
rc.spec("verl.disabled", {}) | 'verl.disabled' is built by name, expected its settings as keywords
rc.spec("verl", {}, {}) | TypeError spec: expected a framework and one configuration, got 2
rc.spec("verl", "disabled") | TypeError the string 'disabled'; by name it is rc.spec('verl.disabled')
rc.spec("verl") | got the framework 'verl' alone, expected the configuration too, rc.spec('verl', config), or one of
"""


@pytest.mark.parametrize(("call", "message"), rows(WRONG_OPTIONS))
def test_wrong_options(call, message):
    kind, pattern = error(message)
    with pytest.raises(kind or ValueError, match=pattern):
        eval(call, {"rc": rc})


# --- old names ---

OLD_NAMES = """
verl {bypass_old_logprob_for_rollout: true} | bypass_old_logprob_for_rollout is an old name; write bypass_mode: true
verl {use_policy_gradient: false} | use_policy_gradient is an old name; write loss_type: "ppo_clip"
verl {rollout_token_veto_threshold: 0.0001} | write Criterion("ratio", lower=0.0001, drop="sequence", label="veto")
verl {rollout_rs_threshold_lower: null} | rollout_rs_threshold_lower is an old name; leave it out: it is off
verl {rollout_rs: geometric, rollout_rs_threshold: 1.25, rollout_rs_threshold_lower: 0.9} |
    rollout_rs: geometric, rollout_rs_threshold_lower are old names; write rollout_rs: "seq_mean_k1",
    rollout_rs_threshold: "0.9_1.25", with k1_bounds="ratio"
verl {rollout_is: token, rollout_is_threshold: 0.5_2} | rollout_is_threshold: 0.52 ...YAML ...quote it: '0.5_2'
skyrl {use_tis: true, tis_imp_ratio_cap: 3.0} | use_tis, ...token_tis_ratio_clip_high: 3.0}
skyrl {token_mask_is_threshold_high: 2} | work only together
openrlhf {algo.advantage.is_correction_enable: true} | are old names; write --algo.advantage.is_correction_level token
trl {vllm_importance_sampling_cap: 2.0} | write vllm_importance_sampling_clip_max: 2.0
prime_rl {ipo_threshold: 0.3} | ipo_threshold is an old name; write eps = 0.3 and kl_tau = 0.001
areal {use_sapo_loss: true, rejection_sampling: {}} | use_sapo_loss does not read rejection_sampling; leave that out
swift {loss_type: real, rollout_importance_sampling_mode: token_mask} | the loss real has no weights; leave it out
"""


@pytest.mark.parametrize(("given", "message"), rows(OLD_NAMES))
def test_old_names_warn_once_with_the_new_line(given, message):
    framework, _, text = given.partition(" ")
    config = yaml.safe_load(text)
    before = dict(config)
    with pytest.warns(UserWarning, match=error(message)[1]) as caught:
        rc.spec(framework, config)
        rc.spec(framework, dict(config))
    assert len(caught) == 1 and caught[0].filename == __file__ and config == before


def test_the_new_line_is_the_same_spec():
    with pytest.warns(UserWarning, match="write") as caught:
        old = rc.spec("verl", yaml.safe_load(OLD_RS))
    line, _, options = str(caught[0].message).partition("write ")[2].partition(", with ")
    new = {key: yaml.safe_load(value) for key, value in re.findall(r'(\w+): ("[^"]*"|[\d.]+)', line)}
    assert rc.spec("verl", new, **eval(f"dict({options})")) == old


OLD_RS = "{rollout_rs: geometric, rollout_rs_threshold: 1.001, rollout_rs_threshold_lower: 0.999}"

# --- the frameworks' own objects ---


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
    listed = OmegaConf.create({"rollout_is": "token", "rollout_is_threshold": [0.5, 2]})
    assert rc.spec("verl", listed) == Spec(Weight.token(lower=0.5, upper=2, outside="zero"), **VERL)


@pytest.mark.peers
@pytest.mark.filterwarnings("error:unknown key")
def test_verl_itself():
    from verl.trainer.config.algorithm import AlgoConfig, RolloutCorrectionConfig

    recipes = [name for name, value in vars(RolloutCorrectionConfig).items() if isinstance(value, classmethod)]
    assert {f"verl.{name}" for name in recipes} == {n for n in rc.spec_names() if n.startswith("verl.")} - {
        "verl.staleness"
    }
    for name in recipes:
        config = getattr(RolloutCorrectionConfig, name)()
        assert rc.spec("verl", AlgoConfig(rollout_correction=config)) == rc.spec(f"verl.{name}")


@pytest.mark.peers
def test_grpo_config_itself(tmp_path):
    from trl import GRPOConfig

    from rollout_corr.frameworks.shared.settings import default_of
    from rollout_corr.frameworks.trl.config import TABLE

    given = GRPOConfig(output_dir=str(tmp_path), use_vllm=True, use_cpu=True, report_to=[], bf16=False)
    assert rc.recipe("trl", given) == rc.recipe("trl", given.to_dict()) == rc.recipe("trl.dapo")
    assert all(getattr(given, name) == default_of(row) for name, row in TABLE.items())


# --- settings that verl 0.6.0 and AReaL had once: refused, with the block that means the same today ---


def block_of(framework, config):
    """Return the block that a refusal says to write, and what it says behind it."""
    with pytest.raises(ValueError, match="write") as caught:
        rc.spec(framework, config)
    _, _, line = str(caught.value).partition("write ")
    block, _, rest = line.partition("}")
    return yaml.safe_load(block.partition(": ")[2] + "}"), rest


def of_060(**changes):
    """The values that verl 0.6.0 shipped, its switch turned on."""
    given = {"rollout_is_level": "token", "rollout_is_mode": "truncate", "rollout_is_veto_threshold": 1e-4}
    return {"rollout_is": True, "rollout_is_threshold": 2.0, "rollout_is_threshold_lower": None, **given, **changes}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("lower", [None, 0.8])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_the_block_that_replaces_settings_of_0_6_0(level, lower, mode):
    """The weight that 0.6.0 had: cut at 2, 0 outside of its bounds, or in the mask alone within them."""
    block, rest = block_of(
        "verl", of_060(rollout_is_level=level, rollout_is_threshold_lower=lower, rollout_is_mode=mode)
    )
    assert 'for its veto, rc.Criterion("ratio", lower=0.0001, drop="sequence", label="veto")' in rest
    low, ratio = lower or 0.5, torch.tensor([0.3, 0.75, 0.85, 1.9, 2.3])
    out = rc.correct(ratio.log()[:, None], torch.zeros(5, 1), spec=rc.spec("verl", block))
    inside = (ratio >= low) & (ratio <= 2.0)
    wanted = {"truncate": ratio.clamp(max=2.0), "clip": ratio.where(inside, 0.0), "mask": ratio}[mode]
    kept = inside if mode == "mask" else torch.ones(5, dtype=torch.bool)
    assert out.mask.flatten().tolist() == kept.tolist()
    torch.testing.assert_close(out.weights.flatten()[kept], wanted[kept])


@pytest.mark.parametrize(
    ("framework", "config", "block"),
    [
        ("verl", {"tis_imp_ratio_cap": 2.0}, {"rollout_is": "token", "rollout_is_threshold": 2.0}),
        ("verl", {"imp_ratio_cap": 8}, {"rollout_is": "token", "rollout_is_threshold": 8.0}),
        ("verl", {"behav_imp_weight_cap": 5.0}, {"rollout_is": "token", "rollout_is_threshold": 5.0}),
        ("verl", of_060(rollout_is=False), {"rollout_is": None}),
        ("verl", of_060(rollout_is_threshold=None), {"rollout_is": None}),
        ("areal", {"behav_imp_weight_cap": 5}, {"level": "token", "action": "mask", "metric": "ratio", "upper": 5.0}),
        (
            "areal",
            {"behave_imp_weight_cap": 2.0, "behave_imp_weight_mode": "sequence_truncate"},
            {"level": "sequence", "action": "clamp", "metric": "ratio", "upper": 2.0},
        ),
    ],
)
def test_the_block_that_replaces_a_cap(framework, config, block):
    made, _ = block_of(framework, config)
    assert made == block
    assert rc.spec(framework, made)


def test_a_geometric_weight_is_no_setting_any_more():
    config = of_060(rollout_is_level="geometric", rollout_is_veto_threshold=None)
    with pytest.raises(ValueError, match=r"write rc\.Weight\.geometric\(upper=2\.0\), which verl has no more$"):
        rc.spec("verl", config)

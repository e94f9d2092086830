"""Configurations of verl that rc.spec refuses, and the warnings that it gives once."""

from __future__ import annotations

import re

import pytest
import yaml

import rollout_corr as rc
from builders.config_cases import VERL, cases, flat
from rollout_corr.specs.correction import Criterion, Spec, Weight

pytestmark = pytest.mark.usefixtures("nothing_said_yet")

REFUSED = """
{rollout_iss: token} | ValueError unknown key 'rollout_iss' (did you mean 'rollout_is'?), expected some of
{3: token} | ValueError unknown key 3,
{rollout_correction: {}, typo: 1} | ValueError unknown key 'typo'
{algorithm: {gamma: 1, rollout_is_treshold: 2}} | ValueError unknown key 'rollout_is_treshold'
{rollout_is: geometric} | ValueError rollout_is: expected null, 'token' or 'sequence', got 'geometric'; ...Weight
{rollout_is: turn} | ValueError rollout_is: expected null, 'token' or 'sequence', got 'turn'$
{rollout_is: 3} | ValueError rollout_is: expected null, 'token' or 'sequence', got 3
{rollout_is: [token]} | ValueError rollout_is: expected null, 'token' or 'sequence', got ['token']
{rollout_is: token, rollout_is_threshold: null} | ValueError rollout_is_threshold: ...silently
{rollout_is: token, rollout_is_threshold: '1_2_3'} | ValueError rollout_is_threshold: ...got '1_2_3'
{rollout_is: token, rollout_is_threshold: .nan} | ValueError rollout_is_threshold: ...got nan
{rollout_is: token, rollout_is_threshold: true} | TypeError rollout_is_threshold: ...got bool True
{rollout_is: token, rollout_is_batch_normalize: 1} | TypeError rollout_is_batch_normalize: ...got int 1
{rollout_rs: token_k1} | ValueError rollout_rs_threshold: expected a threshold for rollout_rs, got null
{rollout_rs: token} | ValueError rollout_rs_threshold: expected a threshold for rollout_rs, got null
{rollout_rs: '', rollout_rs_threshold: 2} | ValueError rollout_rs: expected at least one of
{rollout_rs: ',', rollout_rs_threshold: 2} | ValueError rollout_rs: expected at least one of
{rollout_rs: seq_max_k1, rollout_rs_threshold: 2} | ValueError rollout_rs: expected one of [...'seq_max_k1'
{rollout_rs: [token_k1], rollout_rs_threshold: 2} | TypeError rollout_rs: expected a comma-separated string
{rollout_rs: 'token_k2,token_k3', rollout_rs_threshold: '1,2,3'} |
    ValueError rollout_rs_threshold: expected one threshold or 2, one for each of ['token_k2', 'token_k3']
{rollout_rs: token_k2, rollout_rs_threshold: ','} | ValueError rollout_rs_threshold: expected one threshold
{rollout_rs: 'token_k1,token_k2', rollout_rs_threshold: 0.5_2.0} |
    ValueError rollout_rs_threshold of token_k2: expected one upper bound, got '0.5_2.0'
{rollout_rs: token_k1, rollout_rs_threshold: 0} | ValueError token_k1: expected a finite number > 0, got 0
{rollout_rs: seq_sum_k1, rollout_rs_threshold: 0.52} |
    ValueError seq_sum_k1: expected a single bound >= 1...YAML ...0.5_2 is the number 0.52...quote it: '0.5_2'
{rollout_rs: seq_sum_k1, rollout_rs_threshold: '0.52'} | ValueError single bound >= 1, ...got '0.52'$
{rollout_rs: token_k1, rollout_rs_threshold: 2, rollout_rs_threshold_lower: 0.5} |
    ValueError rollout_rs_threshold_lower: expected with rollout_rs token, sequence or geometric ..."lower_upper"
{rollout_rs_threshold_lower: 0.5} | ValueError rollout_rs_threshold_lower: expected with rollout_rs ...None
{rollout_rs: token, rollout_rs_threshold: 2, rollout_rs_threshold_lower: 3} |
    ValueError rollout_rs_threshold_lower: expected at most the upper bound 2.0, got 3
{rollout_token_veto_threshold: 0} | ValueError rollout_token_veto_threshold: expected a finite number > 0, got 0
{bypass_mode: 'yes'} | TypeError bypass_mode: expected true or false, got str 'yes'
{loss_type: ppo} | ValueError loss_type: expected one of ['ppo_clip', 'reinforce'], got 'ppo'
{use_policy_gradient: 'no'} | TypeError use_policy_gradient: expected true or false, got str 'no'
{bypass_old_logprob_for_rollout: 1} | TypeError bypass_old_logprob_for_rollout: expected true or false
flat {rollout_is_level: turn} | ValueError rollout_is_level: expected one of ['token', 'sequence', 'geometric']
flat {rollout_is_mode: both} | ValueError rollout_is_mode: expected one of ['truncate', 'mask', 'clip'], got 'both'
flat {rollout_is_threshold: -1} | ValueError rollout_is_threshold: expected a finite number > 0, got -1
flat {rollout_is_threshold: '0.5_2'} | ValueError rollout_is_threshold: expected a finite number > 0, got '0.5_2'
flat {rollout_is_threshold_lower: 3} | ValueError rollout_is_threshold_lower: expected at most the upper bound 2.0
flat {rollout_is_veto_threshold: 0} | ValueError rollout_is_veto_threshold: expected a finite number > 0, got 0
flat {rollout_is: token} |
    ValueError one generation ...'rollout_is_threshold_lower' (flat, 0.6.0) beside 'rollout_is' (nested
flat {rollout_rs: token_k1} | ValueError one generation ...'rollout_is' (flat, 0.6.0) beside 'rollout_rs' (nested
flat {tis_imp_ratio_cap: 2} | ValueError one generation ...'tis_imp_ratio_cap' (a cap ...beside 'rollout_is' (flat
{tis_imp_ratio_cap: 2, rollout_is_threshold: 2} |
    ValueError unknown key 'rollout_is_threshold', ...'tis_imp_ratio_cap'
{tis_imp_ratio_cap: 2, imp_ratio_cap: 2} | ValueError expected one cap, got {
{tis_imp_ratio_cap: two} | ValueError tis_imp_ratio_cap: expected a number, got 'two'
{tis_imp_ratio_cap: true} | TypeError tis_imp_ratio_cap: expected a number, got bool True
{algorithm: grpo} | TypeError algorithm: expected a mapping or a config object, got str 'grpo'
"""


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("config", "kind", "message"), cases(REFUSED))
def test_verl_refuses(config, kind, message):
    with pytest.raises(kind, match=r"^spec\('verl'\): .*" + message):
        rc.spec("verl", config)


OLD_NAMES = """
{tis_imp_ratio_cap: 2.0} | tis_imp_ratio_cap is an old name; write rollout_is: "token", rollout_is_threshold: 2.0
{imp_ratio_cap: 8} | imp_ratio_cap is an old name; write rollout_is: "token", rollout_is_threshold: 8.0
{behav_imp_weight_cap: 10} | behav_imp_weight_cap is an old name; write rollout_is:
{tis_imp_ratio_cap: -1} | tis_imp_ratio_cap is an old name; leave it out: it is off
{rollout_is: true, rollout_is_threshold: 2.0, rollout_is_level: token, rollout_is_veto_threshold: null} |
    rollout_is_level, rollout_is_veto_threshold are old names; write Spec(weight=Weight.token(upper=2.0),
    report=("native", "verl"))$
{rollout_is: true, rollout_is_threshold: 2.0} | rollout_is: true is an old name; write Spec(...label="veto"...0.6.0
{rollout_is_level: token} | rollout_is_level is an old name; leave it out: without rollout_is_threshold
{bypass_old_logprob_for_rollout: true} | bypass_old_logprob_for_rollout is an old name; write bypass_mode: true
{bypass_old_logprob_for_rollout: false} | bypass_old_logprob_for_rollout is an old name; write bypass_mode: false
{use_pure_rollout_correction: true} | use_pure_rollout_correction is an old name; write loss_type: "reinforce"
{use_policy_gradient: true} | use_policy_gradient is an old name; write loss_type: "reinforce"
{use_policy_gradient: false} | use_policy_gradient is an old name; write loss_type: "ppo_clip"
{rollout_token_veto_threshold: 0.0001} |
    rollout_token_veto_threshold is an old name; write Criterion("ratio", lower=0.0001, drop="sequence",
    label="veto")
{rollout_token_veto_threshold: null} | rollout_token_veto_threshold is an old name; leave it out: it is off
{rollout_rs_threshold_lower: null} | rollout_rs_threshold_lower is an old name; leave it out: it is off
{rollout_rs: geometric, rollout_rs_threshold: 1.25, rollout_rs_threshold_lower: 0.9} |
    rollout_rs: geometric, rollout_rs_threshold_lower are old names; write rollout_rs: "seq_mean_k1",
    rollout_rs_threshold: "0.9_1.25", with k1_bounds="ratio"
{rollout_rs: token, rollout_rs_threshold: 2.0} |
    rollout_rs: token is an old name; write rollout_rs: "token_k1", rollout_rs_threshold: "0.5_2.0", with
"""


@pytest.mark.parametrize(("config", "kind", "message"), cases(OLD_NAMES))
def test_verl_old_names_warn_once_with_the_new_line(config, kind, message):
    with pytest.warns(UserWarning, match=r"^verl: " + message) as caught:
        rc.spec("verl", config)
        rc.spec("verl", dict(config))
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "config",
    [
        {"tis_imp_ratio_cap": 2.5},
        {"rollout_rs": "token", "rollout_rs_threshold": 3.0},
        {"rollout_rs": "geometric", "rollout_rs_threshold": 1.001, "rollout_rs_threshold_lower": 0.999},
    ],
)
def test_the_new_line_is_the_same_spec(config):
    with pytest.warns(UserWarning, match="write") as caught:
        old = rc.spec("verl", config)
    line, _, options = str(caught[0].message).partition("write ")[2].partition(", with ")
    new = {key: yaml.safe_load(value) for key, value in re.findall(r'(\w+): ("[^"]*"|[\d.]+)', line)}
    assert rc.spec("verl", new, **({"k1_bounds": "ratio"} if options else {})) == old


@pytest.mark.parametrize("mode", ["truncate", "mask", "clip"])
@pytest.mark.parametrize("version", [None, "0.6.0"])
@pytest.mark.parametrize("veto", [None, 1e-4])
def test_the_flat_generation_says_the_spec_that_it_makes(mode, version, veto):
    with pytest.warns(UserWarning, match="write") as caught:
        spec = rc.spec("verl", flat(rollout_is_mode=mode, rollout_is_veto_threshold=veto), version=version)
    line, _, rest = str(caught[0].message).partition("write ")[2].partition("; ")
    assert eval(line, {"Spec": Spec, "Weight": Weight, "Criterion": Criterion}) == spec
    differs = spec != rc.spec("verl", flat(rollout_is_mode=mode, rollout_is_veto_threshold=veto), version="0.6.0")
    assert bool(rest) == differs == ("0.6.0" in rest)


def test_a_bound_that_yaml_has_mangled_is_named():
    config = yaml.safe_load("{rollout_is: token, rollout_is_threshold: 0.5_2}")
    assert config["rollout_is_threshold"] == 0.52
    with pytest.warns(UserWarning, match=r"rollout_is_threshold: 0\.52 .*YAML .*quote it: '0\.5_2'") as caught:
        spec = rc.spec("verl", config)
        rc.spec("verl", config)
    assert spec == Spec(Weight.token(upper=0.52), **VERL) and len(caught) == 1


def test_the_configuration_is_left_alone():
    config = flat(rollout_is_mode="mask")
    before = dict(config)
    with pytest.warns(UserWarning, match="old names"):
        rc.spec("verl", config)
    assert config == before

"""What each framework's configuration reads as, and what it refuses: a table a framework, and docs/migrate.md.

Rows are `CONFIG | EXPECTED` and `CONFIG | ERROR`. CONFIG is YAML; EXPECTED is a Spec, a
Recipe or a part of a Loss, in which `named` and `made` build the framework's spec or recipe by name.
Settings that tests/conformance draws for a configuration are recorded there with the framework's own loss.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml

import rollout_corr as rc
from builders.config_cases import VERL, WORDS, XTUNER, error, rows
from rollout_corr.frameworks.shared.lookup import part, readable
from rollout_corr.frameworks.shared.preset import off_policy
from rollout_corr.frameworks.shared.scripts import command_settings
from rollout_corr.frameworks.shared.settings import anything, rows_in
from rollout_corr.specs.correction import Spec
from rollout_corr.specs.validate import number

pytestmark = pytest.mark.usefixtures("nothing_said_yet")

REPORTS = {"verl": VERL, "xtuner": XTUNER, "skyrl": {"report": ("native", "skyrl")}}

READ = {
    "axolotl": """
{} | made("dapo")
""",
    "cosmos_rl": """
{epsilon_low: -1.0, epsilon_high: -1.0} | PPO(1.0, float("inf"), 3.0)
{off_policy_masking_delta: 0.1} | Spec(None, (off_policy(0.1, of="new/old"),), "zero", nonfinite="propagate")
""",
    "torchtitan": """
{} | made("grpo")
""",
    "areal": """
{metric: kl_k1, level: sequence, agg: max, upper: 0.5, lower: -1.0} |
    Spec(Weight.token(), (Criterion("k1", "sequence", "min", lower=-0.5, upper=1.0),), "both")
{action: clamp, level: sequence, lower: 0.5} | Spec(Weight.geometric(lower=0.5, upper=5.0), nonfinite="neutral")
{use_cispo_loss: true, eps_clip: 1.0, eps_clip_higher: 4.0} | Score(0.0, 5.0)
{use_decoupled_loss: true, m2_threshold: 0.08} | Mean(over="kept")
{m2_threshold: 0.08} | Recipe(None, Loss(PPO(0.2, 0.2)))
""",
    "molt": """
{} | made("ppo")
{algo.advantage.is_correction_level: token, algo.advantage.is_correction_mode: clip,
    algo.advantage.is_correction_threshold: [0.4, 3.0]} | named("token", low=0.4, high=3.0, mode="clip")
{algo.advantage.is_correction_level: seq, actor.muon.lr: 0.1, seed: 1} | named("seq")
{algo.advantage.is_correction_level: geo, algo.advantage.is_correction_threshold: [0.99, 1.01]} | named("geo")
""",
    "nemo": """
{use_importance_sampling_correction: true, sequence_level_importance_ratios: true,
    truncated_importance_sampling_type: tis, truncated_importance_sampling_ratio: 3.0,
    truncated_importance_sampling_ratio_min: 0.5} | Spec(Weight.product(lower=0.5, upper=3.0))
{use_importance_sampling_correction: true, truncated_importance_sampling_type: seq-mask-tis,
    truncated_importance_sampling_ratio: 1.002, truncated_importance_sampling_ratio_min: 0.999} | named("seq_mask_tis")
{} | Recipe(None, Loss(PPO(0.2, 0.2), kl=KL("k3", 0.01, gradient="k2", log_clamp=20.0, value_clamp=10.0)))
""",
    "open_instruct": """
{rho_mask_sequence_level: true} | Spec(Weight.geometric(upper=2.0, token_clamp=10.0))
{} | KL("k3", 0.05, log_clamp=40.0)
""",
    "openrlhf": """
{} | made("ppo")
{algo.advantage.is_correction_level: seq, algo.advantage.is_correction_gating: binary_kl,
    algo.advantage.is_correction_threshold: [0.003]} | named("flash_reinforce")
{algo.advantage.is_correction_level: token, algo.advantage.is_correction_gating: binary_kl,
    algo.advantage.is_correction_threshold: [0.0, 0.05]} | named("dppo_like")
{algo.advantage.is_correction_level: seq, algo.advantage.is_correction_gating: tv,
    algo.advantage.is_correction_threshold: [0.1]} |
    Spec(Weight.token(), (Criterion("tv", "sequence", "mean", upper=0.1, eps=1e-6),), "zero")
{algo.advantage.is_correction_enable: true, algo.advantage.is_correction_type: tis} | named("tis")
""",
    "prime_rl": """
{} | made("ipo")
{type: icepop, ratio_high: 4.0} | made("icepop", ratio_high=4.0)
{trainer: {loss: {type: kpop, kpop_threshold: 0.2}, optim: {}}, orchestrator: {}} | made("kpop", kpop_threshold=0.2)
""",
    "rllm": """
{} | Spec()
{tis_mode: token} | Spec(Weight.token(upper=2.0))
{rollout_correction: {tis_mode: sequence, tis_cap: 5.0, bypass_mode: false}} | Spec(Weight.product(upper=5.0))
{algorithm: {adv_estimator: grpo, rollout_correction: {bypass_mode: true, tis_cap: 5.0}}} | Spec()
""",
    "roll": """
{train_infer_correction: {is_weight: {enabled: true}, filters: [{enabled: true}]}, exp_name: x} | made("default")
{is_weight: {enabled: true, weight_type: sequence, upper_bound: null}} | Spec(Weight.product())
{filters: [{enabled: false}, {enabled: true, agg_type: geometric, ratio_low: 0.9, ratio_high: 1.1}]} |
    Spec(None, (ratio(0.9, 1.1, "mean"),))
{filters: [{enabled: true, ratio_enabled: false, diff_enabled: true}, {enabled: true, agg_type: sequence}]} |
    Spec(None, (Criterion("prob_diff", lower=-0.2, upper=0.2, label="filter_0_diff"),
    ratio(0.8, 1.2, "sum", label="filter_1_ratio")))
{train_infer_correction: {is_weight: {enabled: true, weight_type: segment}, filters: [{enabled: true,
    agg_type: segment}]}, ratio_type: segment} | made("segment")
{actor_train: {pg_variant: tis, tis_upper_bound: 2.0, device_mapping: null}} | Score(0.0, 2.0)
""",
    "skyrl": """
{sequence_mask_metric: geometric} | Spec(None, (ratio(0.99, 1.01, "mean", label="geo_sequence_mask"),))
{sequence_mask_metric: product, product_mask_high: 3, product_mask_low: 0} |
    Spec(None, (ratio(0, 3, "sum", label="product_sequence_mask"),))
{trainer: {policy: {}, train_batch_size: 8}} | Spec()
{token_mask_is_threshold_low: 0.5} | Spec()
{policy_loss_type: dual_clip, kl_loss_coef: 0} | Recipe(None, Loss(PPO(0.2, 0.2, dual=3.0)))
""",
    "slime": """
{use_tis: true, use_rs: true, tis_level: token} |
    Spec(Weight.token(lower=0, upper=2, normalize="batch"), (ratio(0.5, 2, label="rs"), VETO))
{use_tis: true, custom_tis_function_path: x.mis, tis_mode: mask, tis_level: sequence, rs_level: geometric,
    tis_batch_normalize: false, rs_veto_threshold: null, rs_lower_bound: 0.9, tis_lower_bound: null} |
    Spec(Weight.product(), (ratio(0.5, 2, "sum", label="tis_mask"), ratio(0.9, 2, "mean", label="rs")))
{use_tis: true} | made("tis")
""",
    "miles": """
{use_tis: true, tis_clip_low: 0.5, hf_checkpoint: x} | Spec(Weight.token(lower=0.5, upper=2.0))
""",
    "swift": """
{off_policy_sequence_mask_delta: 0.1} | Spec(criteria=named("opsm").criteria)
{loss_type: real, real_tau: 0.3, num_generations: 4, beta: 0.02, rollout_importance_sampling_mode: token_mask} |
    made("real", real_tau=0.3, num_generations=4, beta=0.02)
{loss_type: real, rollout_importance_sampling_mode: token_mask} | Spec()
""",
    "trl": """
{vllm_importance_sampling_correction: false, off_policy_mask_threshold: 0.5} |
    Spec(None, named("opsm", delta=0.5).criteria[1:], "zero", nonfinite="neutral")
{off_policy_mask_threshold: 0.1} | named("opsm")
""",
    "xtuner": """
{} | Spec()
{loss_cfg: {policy_loss_cfg: {cliprange_low: 0.2, cliprange_high: 0.3}}} | Spec()
{loss_cfg: {rollout_is: {rollout_is_threshold: [2, 0.25]}}} | Spec(Weight.token(lower=0.25, upper=2))
{rollout_is_threshold: null, rollout_is_veto_threshold: [20, 0], rollout_is_mode: both} | Spec()
{rollout_is: null} | Spec()
{rollout_is: {rollout_is_level: token, rollout_is_mode: both, rollout_is_threshold: [5, 0.5],
    rollout_is_mask_threshold: [5, 0.5], rollout_is_veto_threshold: [20, 0]}, loss_reduction: token} |
    named("reasoning")
{rollout_is_level: sequence, rollout_is_threshold: [2, 0.25]} | Spec(Weight.product(lower=0.25, upper=2))
{rollout_is_level: geometric, rollout_is_mode: mask, rollout_is_threshold: [2, 0.25]} |
    Spec(Weight.geometric(), (ratio(0.25, 2, "mean", label="mask"),))
{rollout_is_mode: both, rollout_is_threshold: [2, 0.25], rollout_is_mask_threshold: [3, 0]} |
    Spec(Weight.token(lower=0.25, upper=2), (ratio(0, 3, label="mask"),))
{rollout_is_threshold: [2, 0.5], rollout_is_veto_threshold: [20, 0.1], rollout_is_veto_level: geometric,
    rollout_is_veto_negative_adv_only: true} |
    Spec(Weight.token(lower=0.5, upper=2), (ratio(0.1, 20, "mean", label="veto", when="negative_advantage"),))
{rollout_is_threshold: [2, 0.5], rollout_is_veto_threshold: [20, 0.1], rollout_is_veto_level: kl3} |
    Spec(Weight.token(lower=0.5, upper=2), (Criterion("k3", "sequence", "mean", upper=20, label="veto"),))
{rollout_is_threshold: [2, 0.5], rollout_is_veto_threshold: [20, 0.1], rollout_is_veto_negative_adv_only: true} |
    Spec(Weight.token(lower=0.5, upper=2), (
    ratio(0.1, None, "min", label="veto_low", when="negative_advantage"),
    ratio(None, 20, "max", label="veto_high", when="negative_advantage")))
{loss_cfg: {policy_loss_cfg: {cliprange_low: 0.2, cliprange_high: 0.28}, use_kl_loss: true, kl_loss_type: low_var_kl,
    chunk_size: 1, rollout_is: {rollout_is_threshold: [5, 0.5]}}} |
    Recipe(Spec(Weight.token(lower=0.5, upper=5)), Loss(PPO(0.2, 0.28, dual=3.0), Mean(over="kept"),
    KL("k3", 0.001, value_clamp=10.0)))
""",
    "verl": """
{rollout_is: null, rollout_is_threshold: 2.0, rollout_rs: null, rollout_rs_threshold: null, bypass_mode: false,
    loss_type: ppo_clip, rollout_is_batch_normalize: false} | Spec()
{_target_: verl.RolloutCorrectionConfig, rollout_is: token} | Spec(Weight.token(upper=2))
{rollout_is: sequence, rollout_is_threshold: '5', rollout_is_batch_normalize: true} |
    Spec(Weight.product(upper=5, normalize="batch"))
{rollout_is: token, rollout_is_threshold: [0.5, 2]} | Spec(Weight.token(lower=0.5, upper=2, outside="zero"))
{rollout_rs: 'token_k1, seq_max_k2,seq_sum_k3', rollout_rs_threshold: '0.5_2.0, 2.5,0.1'} |
    Spec(None, (k1("token_k1", 0.5, 2), option("seq_max_k2", None, 2.5), option("seq_sum_k3", None, 0.1)))
{rollout_rs: 'token_k2,seq_mean_k3,token_k2', rollout_rs_threshold: 0.01} |
    Spec(None, (option("token_k2", None, 0.01), option("seq_mean_k3", None, 0.01)))
{rollout_rs: token, rollout_rs_threshold: 2} | Spec(None, (ratio(0.5, 2, label="token_k1"),))
{rollout_rs: sequence, rollout_rs_threshold: 2, rollout_rs_threshold_lower: 0} |
    Spec(None, (ratio(0, 2, "sum", label="seq_sum_k1"),))
{rollout_is: sequence, rollout_is_threshold: 2.0, rollout_is_batch_normalize: true, rollout_rs: geometric,
    rollout_rs_threshold: 1.01, rollout_rs_threshold_lower: 0.99, rollout_token_veto_threshold: 1.0e-4} |
    Spec(Weight.product(upper=2, normalize="batch"), (ratio(0.99, 1.01, "mean", label="seq_mean_k1"), VETO))
{rollout_rs: token_k2, rollout_rs_threshold: 1, rollout_token_veto_threshold: 1.0e-6} |
    Spec(None, (option("token_k2", None, 1.0), replace(VETO, lower=1e-6)))
{rollout_is: sequence, bypass_old_logprob_for_rollout: true, use_pure_rollout_correction: true} |
    Spec(Weight.product(upper=2))
{imp_ratio_cap: -1} | Spec()
{algorithm: {adv_estimator: grpo, kl_ctrl: {}, rollout_correction: {rollout_is: token}}, trainer: {},
    actor_rollout_ref: {actor: {tis_imp_ratio_cap: -1, lr: 1}}} | Spec(Weight.token(upper=2))
{algorithm: {gamma: 1.0, rollout_correction: null}} | Spec()
{} | made("ppo")
{clip_ratio_low: 0.1, strategy: fsdp} | PPO(0.1, 0.2, dual=3.0)
{clip_ratio_low: null, clip_ratio: 0.3} | PPO(0.3, 0.2, dual=3.0)
{actor_rollout_ref: {actor: {use_kl_loss: true}}, algorithm: {rollout_correction: {}}} | made("grpo")
{actor_rollout_ref: {actor: {use_kl_loss: true}}, algorithm: {rollout_correction: {rollout_is: token,
    rollout_rs: token_k2, rollout_rs_threshold: 0.1, bypass_mode: true}}} |
    Recipe(Spec(None, (option("token_k2", None, 0.1),)),
    Loss(PPO(0.2, 0.2, dual=3.0), kl=KL("k3", 0.001, value_clamp=10.0, scope="all")))
{policy_loss: {loss_mode: bypass_mode, rollout_correction: {rollout_is: token, loss_type: reinforce}}} |
    Recipe(Spec(Weight.token(upper=2)), Loss(Score()))
{policy_loss: {loss_mode: bypass_mode, rollout_correction: {loss_type: reinforce}}} | GPG()
{policy_loss: {loss_mode: clip_cov, clip_cov_ratio: 0.1, clip_cov_ub: 3}, clip_ratio_high: 0.3} |
    ClipCov(0.2, 0.3, share=0.1, upper=3.0)
{policy_loss: {loss_mode: kl_cov, ppo_kl_coef: 1.0}} | KLCov(0.0002, 1.0)
{policy_loss: {loss_mode: sapo}, use_kl_loss: true, tau_pos: 2.0} |
    Recipe(None, Loss(SAPO(2.0, 1.05), ROWS, KL("k3", 0.001, value_clamp=10.0, mean=Mean())))
""",
}

# Refused by rc.spec, and so by rc.recipe where it reads the correction too; what a row of a table refuses by itself is
# below.
SPEC_REFUSED = {
    "areal": """
{actor: {use_decoupled_loss: true, rejection_sampling: {uper: 2.0}}} | unknown key 'uper' (did you mean 'upper'?)
{action: clamp, metric: kl_k3} | action: expected 'mask' with metric 'kl_k3', as AReaL does
{action: clamp, level: sequence, agg: sum} | agg: expected 'mean' with action 'clamp'
{agg: min} | agg: expected one of
{behave_imp_weight_cap: 5.0, eps_clip: 0.1} | behave_imp_weight_cap: a setting of AReaL before rejection_sampling
""",
    "rllm": """
{tis_mode: token, bypass_mode: true} | tis_mode: expected null with bypass_mode
{tis_cap: 0.0} | tis_cap: expected a finite number > 0
""",
    "skyrl": """
{off_policy_correction: token} | TypeError off_policy_correction: expected a mapping or a config object, got str
{tis_ratio_type: geometric} | tis_ratio_type: expected null or one of ['token', 'sequence']
{sequence_mask_metric: geo} | sequence_mask_metric: expected null or one of ['geometric', 'product']
{tis_ratio_type: token, token_tis_ratio_clip_high: -1.0} | token_tis_ratio_clip_high: expected a number > 0, got -1.0
{use_tis: true} | tis_imp_ratio_cap, which use_tis needs: expected a number > 0, got -1.0
{sequence_mask_metric: geometric, geo_mask_high: '1.01'} | TypeError geo_mask_high: expected a number, got the string
{sequence_mask_metric: geometric, geo_mask_low: 2.0} | geo_mask_low: expected a number <= geo_mask_high, which is 1.01
{outlier_token_is_threshold_high: 0} | outlier_token_is_threshold_high: expected a number > 0, got 0.0
""",
    "xtuner": """
{rollout_is_level: turn} | rollout_is_level: expected one of ['token', 'sequence', 'geometric']
{rollout_is_mode: clip} | rollout_is_mode: expected one of ['truncate', 'mask', 'both']
{rollout_is_veto_level: mean} | rollout_is_veto_level: expected one of ['max', 'geometric', 'kl3']
{rollout_is_veto_negative_adv_only: 'yes'} | TypeError rollout_is_veto_negative_adv_only: expected true or false
{rollout_is_threshold: [1, 1]} | rollout_is_threshold: expected (upper, lower) with upper > lower
{rollout_is_threshold: 5} | TypeError rollout_is_threshold: expected a pair (upper, lower), got int 5
{rollout_is_threshold: [5]} | rollout_is_threshold: expected a pair (upper, lower), got [5]
{rollout_is_threshold: [5, -1]} | rollout_is_threshold: expected a number >= 0, got -1
{rollout_is_veto_threshold: [0, 20]} | rollout_is_veto_threshold: expected (upper, lower)
{rollout_is_mask_threshold: [0.5, 5]} | rollout_is_mask_threshold: expected (upper, lower)
""",
    "verl": """
{3: token} | unknown key 3,
{rollout_is: geometric} | rollout_is: expected null, 'token' or 'sequence', got 'geometric'; ...Weight
{rollout_is: 3} | rollout_is: expected null, 'token' or 'sequence', got 3
{rollout_is: token, rollout_is_threshold: null} | rollout_is_threshold: ...silently
{rollout_is: token, rollout_is_threshold: true} | TypeError rollout_is_threshold: ...got bool True
{rollout_rs: token_k1} | expected a threshold for rollout_rs, got null
{rollout_rs: token} | rollout_rs_threshold: expected a threshold for rollout_rs, got null
{rollout_rs: ',', rollout_rs_threshold: 2} | rollout_rs: expected at least one of
{rollout_rs: seq_max_k1, rollout_rs_threshold: 2} | rollout_rs: expected one of [...'seq_max_k1'
{rollout_rs: [token_k1], rollout_rs_threshold: 2} | TypeError rollout_rs: expected a comma-separated string
{rollout_rs: 'token_k2,token_k3', rollout_rs_threshold: '1,2,3'} | expected one threshold or 2, one for each of
{rollout_rs: 'token_k1,token_k2', rollout_rs_threshold: 0.5_2.0} |
    rollout_rs_threshold of token_k2: expected one upper bound, got '0.5_2.0'
{rollout_rs: seq_sum_k1, rollout_rs_threshold: 0.52} |
    rollout_rs_threshold of seq_sum_k1: expected a single bound >= 1...0.5_2 is the number 0.52...quote it: '0.5_2'
{rollout_rs: token_k1, rollout_rs_threshold: 2, rollout_rs_threshold_lower: 0.5} |
    rollout_rs_threshold_lower: expected with rollout_rs token, sequence or geometric ..."lower_upper"
{rollout_rs: token, rollout_rs_threshold: 2, rollout_rs_threshold_lower: 3} | expected at most the upper bound 2.0
{rollout_token_veto_threshold: 0} | rollout_token_veto_threshold: expected a finite number > 0, got 0
{algorithm: {gamma: 1.0}, actor_rollout_ref: {actor: {tis_imp_ratio_cap: 8, lr: 1}}} | tis_imp_ratio_cap: a setting of
{rollout_is: true, rollout_is_level: token} | rollout_is_level: a setting of verl up to 0.6.0; write algorithm.rollout_c
{algorithm: grpo} | TypeError algorithm: expected a mapping or a config object, got str 'grpo'
""",
    "trl": "{vllm_importance_sampling_mode: geometric_mask} | vllm_importance_sampling_mode: expected one of",
}
RECIPE_REFUSED = {
    "axolotl": """
{trl: {vllm_importance_sampling_cap: 0.5}} | vllm_importance_sampling_cap: expected a number >= 1, got 0.5
{top_entropy_quantile: 0.2} | top_entropy_quantile: needs the whole distribution
""",
    "cosmos_rl": """
{aipo_rho: 0.5} | aipo_rho: expected a number >= 1, got 0.5
{epsilon_low: 0.1, epsilon_high: 3.5, lower_bound_ratio: 0.5} | lower_bound_ratio=0.5: PPO.dual: expected a number >= 1
""",
    "rllm": "{} | loss_fn: its backend has the loss: rc.recipe('verl', ...) reads",
    "areal": """
{m2_threshold: 0.0} | m2_threshold: expected a finite number > 0
{use_decoupled_loss: true, rejection_sampling: {}, m2_threshold: 0.04} | m2_threshold: expected None with
    ...pass as mask the one of rc.correct(..., spec=rc.spec('areal.m2po', m2_threshold=0.04))
{use_sapo_loss: true, use_decoupled_loss: true} | use_sapo_loss: AReaL refuses
{use_sapo_loss: true, importance_sampling_level: sequence} | importance_sampling_level: expected 'token'
{use_cispo_loss: true, use_sapo_loss: true, eps_clip_higher: 4.0} | use_cispo_loss: AReaL refuses
{use_cispo_loss: true} | TypeError eps_clip_higher, which use_cispo_loss needs
{c_clip: 1.0} | c_clip: expected a number > 1
""",
    "molt": """
{algo.advantage.is_correction_level: geo, algo.advantage.is_correction_mode: clip} | expected 'mask' with ...'geo'
{algo.advantage.is_correction_level: token, algo.advantage.is_correction_threshold: [2.0]} | expected LOW HIGH
{algo.advantage.is_correction_level: token, algo.advantage.is_correction_threshold: 2.0} | expected LOW HIGH, got 2.0
{actor.eps_clip_low_high: 1.0} | expected LOW HIGH, got 1.0
{actor: {loss_mode: cispo}} | eps_clip_low_high: expected the highest ratio, at least 1
{actor: {loss_mode: gspo, dual_clip: 3.0}} | dual_clip: expected None with actor.loss_mode 'gspo'
""",
    "nemo": """
{truncated_importance_sampling_ratio: 2.0} | truncated_importance_sampling_type: expected one of
{truncated_importance_sampling_type: tis} | needs use_importance_sampling_correction: true
{use_importance_sampling_correction: true, truncated_importance_sampling_type: tis} | expected a number with
{use_importance_sampling_correction: true, truncated_importance_sampling_type: icepop,
    truncated_importance_sampling_ratio: 2.0} | truncated_importance_sampling_ratio_min: expected a number with
{use_importance_sampling_correction: true, truncated_importance_sampling_type: seq-mask-tis,
    truncated_importance_sampling_ratio: 1.0, truncated_importance_sampling_ratio_min: 1.0,
    sequence_level_importance_ratios: true} | 'seq-mask-tis' weighs tokens
{use_importance_sampling_correction: true, truncated_importance_sampling_type: seq-mask-tis,
    truncated_importance_sampling_ratio: 1.0, truncated_importance_sampling_ratio_min: 1.0,
    seq_logprob_error_threshold: 2.0} | no Spec does both
{sequence_level_importance_ratios: true} | needs token_level_loss: false
{use_cispo: true, ratio_clip_c: 3.0} | use_cispo: NeMo refuses it together with
{reference_policy_kl_type: k1} | reference_policy_kl_type: expected 'k3', got 'k1'
{use_on_policy_kl_approximation: true} | weighs the KL by new/rollout
{loss_fn: {}, grpo: {seq_logprob_error_threshold: {1: 2}}} | TypeError seq_logprob_error_threshold: expected a number
""",
    "open_instruct": """
{loss_denominator: 0.0} | loss_denominator: expected a finite number > 0
{rho_mask_lower_bound: -1.0} | rho_mask_lower_bound: expected a number >= 0
{use_vllm_logprobs: true} | open-instruct refuses it together with use_rho_correction
""",
    "openrlhf": """
{algo.advantage.is_correction_level: seq, algo.advantage.is_correction_mode: clip} | 'clip' needs
{algo.advantage.is_correction_level: seq, algo.advantage.is_correction_gating: tv} | expected an upper bound alone
{algo.advantage.is_correction_level: seq, algo.advantage.is_correction_threshold: [1.0, 2.0, 3.0]} | HIGH or LOW HIGH
{actor: {loss_agg_mode: seq-mean-token-mean}, algo: {kl: {use_loss: true}}} | divides the KL by tokens
{algo: {kl: {use_loss: true, unbiased_gradient: true}}} | weighs the KL's gradient and not its value
""",
    "prime_rl": """
{adv_tau: 0.0} | adv_tau: expected a
{type: ipo, ratio_low: 0.1} | ratio_low: no setting of type 'ipo', which has
{type: icepop, kl_tau: 0.1} | kl_tau: no setting of type 'icepop', which has
{type: custom, import_path: a.b} | type: 'custom' names a function of its own
""",
    "roll": """
{ratio_type: segment, actor_train: {pg_variant: tis}} | ratio_type: expected 'token' with
{ratio_type: segment, train_infer_correction: {filters: [{enabled: true}]}} | 'segment' together with a filter
{actor_train: {pg_variant: topr}} | 'topr' needs the sign of the reward
{loss_agg_mode: seq-mean-token-sum-norm} | loss_agg_mode: 'seq-mean-token-sum-norm' divides by
""",
    "skyrl": """
{policy_loss_type: word} | policy_loss_type: expected one of
{policy_loss_type: kl_cov} | policy_loss_type: no recipe of 'kl_cov', which chooses tokens by advantages that SkyRL
{loss_reduction: prompt_mean} | loss_reduction: no recipe of 'prompt_mean', which averages over each prompt's tokens
{loss_reduction: seq_mean_token_sum_norm} | TypeError max_seq_len, which seq_mean_token_sum_norm needs
{policy_loss_type: dppo, off_policy_correction: {tis_ratio_type: token}} | expected no off_policy_correction with
{policy_loss_type: rollout_is, off_policy_correction: {tis_ratio_type: token}} | expected no tis_ratio_type with it
{policy_loss_type: dppo, dppo: {dppo_type: binary_kl, delta_low: 0.1}} | delta_low: expected the same as delta_high
""",
    "slime": """
{use_tis: true, custom_tis_function_path: a.b} | custom_tis_function_path: expected one that
{use_tis: true, use_rollout_logprobs: true} | use_rollout_logprobs: the ratio is then the correction itself
{use_tis: true, use_rs: true, tis_level: word} | tis_level: expected one of
{use_tis: true, use_rs: true, use_opsm: true, use_kl_loss: true, kl_loss_coef: 0.1} | use_opsm: leaves the KL as it is
""",
    "miles": "{advantage_estimator: cispo} | advantage_estimator: expected one of",
    "swift": """
{loss_type: reel} | loss_type: expected one of
{loss_type: fipo} | it is rc.recipe('swift.fipo') by name
{loss_type: real, off_policy_sequence_mask_delta: 0.1} | off_policy_sequence_mask_delta: with real
{rollout_importance_sampling_mode: token_mask, off_policy_sequence_mask_delta: 0.1, loss_type: bnpo} | with bnpo and
{loss_type: sapo, importance_sampling_level: sequence} | expected 'token' with loss_type 'sapo'
{chord_sft_dataset: [x]} | chord_sft_dataset: add this loss
""",
    "trl": """
{loss_type: vespo} | vllm_importance_sampling_mode: expected one of ['token_truncate', 'token_mask']
{top_entropy_quantile: 0.2} | top_entropy_quantile: needs the whole distribution
{vllm_importance_sampling_clip_max: '2.0'} | TypeError vllm_importance_sampling_clip_max: expected a number
{epsilon: k1, beta: batch} | TypeError beta: expected a number
{epsilon: -1.0, beta: 0.5} | epsilon=-1.0: PPO.low: expected a number >= 0
{vllm_importance_sampling_clip_max: 2.0, vllm_importance_sampling_clip_min: 3.0} |
    vllm_importance_sampling_clip_max=2.0, vllm_importance_sampling_clip_min=3.0: Criterion: expected lower
""",
    "verl": """
{use_kl_loss: true, policy_loss: {loss_mode: sapo}, loss_agg_mode: seq-mean-token-sum-norm} | the KL loss by
{actor_rollout_ref: {actor: {policy_loss: {loss_mode: geo_mean}}}, algorithm: {rollout_correction: {rollout_is: token}}}
    | expected no rollout_is with
{actor_rollout_ref: {actor: {loss_agg_mode: seq-mean-token-mean}},
    algorithm: {rollout_correction: {rollout_rs: token_k2, rollout_rs_threshold: 0.1}}} |
    verl divides by a row's tokens after rejection
""",
    "xtuner": """
{} | TypeError policy_loss_cfg.cliprange_low: expected a number
{policy_loss_cfg: {cliprange_low: 0.2, cliprange_high: 0.2}, use_kl_loss: true} | kl_loss_type: expected one of
""",
}


def cases(tables):
    return [
        pytest.param(framework, *row, id=f"{framework}-{row[0][:50]}")
        for framework, table in tables.items()
        for row in rows(table)
    ]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("framework", "text", "expected"), cases(READ))
def test_read(framework, text, expected):
    words = WORDS | {name: getattr(rc, name) for name in rc.__all__} | {"replace": replace}
    words |= {"off_policy": off_policy}
    words |= {"Spec": partial(Spec, **REPORTS.get(framework, {})), "ROWS": rc.Mean("sequence", over="rows")}
    words["named"] = lambda name, **settings: rc.spec(f"{framework}.{name}", **settings)
    words["made"] = lambda name, **settings: rc.recipe(f"{framework}.{name}", **settings)
    wanted, config = eval(expected, words), yaml.safe_load(text)
    if isinstance(wanted, Spec):
        assert rc.spec(framework, config) == wanted
        return
    found = rc.recipe(framework, config)
    if isinstance(wanted, rc.Recipe):
        assert found == wanted and repr(found.batch) == repr(wanted.batch)
    else:
        assert wanted in (found.loss.surrogate, found.loss.mean, found.loss.kl)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("call", "case"),
    [("spec", case) for case in cases(SPEC_REFUSED)] + [("recipe", case) for case in cases(RECIPE_REFUSED)],
    ids=lambda value: getattr(value, "id", value),
)
def test_refused(call, case):
    framework, text, message = case.values
    kind, pattern = error(message)
    with pytest.raises(kind or ValueError, match=rf"^{call}\('{framework}'\): .*{pattern}") as caught:
        getattr(rc, call)(framework, yaml.safe_load(text))
    if named := re.match(r"(?:TypeError )?([\w.]+)(?:=[^:]*)?: ", message):
        assert f".{caught.value.key}".endswith(f".{named[1]}")


PAGE = (Path(__file__).parents[2] / "docs/migrate.md").read_text(encoding="utf-8")
# Rows of its tables: YAML or flags, and the spec or the recipe by name that they are.
TRANSLATED = re.findall(r"^\| (?:[\w-]+: )?`([^`]+)`[^|]*\| `(rc\.(spec|recipe)\(\"(\w+)\.[^`]+)`", PAGE, re.MULTILINE)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("old", "new", "call", "framework"), TRANSLATED)
def test_what_the_page_translates(old, new, call, framework):
    flags = [pair[:2] for pair in command_settings(old.split())]
    config = dict(flags) if old.startswith("--") else yaml.safe_load(f"{{{old}}}")
    assert getattr(rc, call)(framework, config) == eval(new, {"rc": rc})


def checked_rows(framework):
    found = {name: row for name, row in rows_in(part(framework).settings({}).rows) if row.kind is not anything}
    assert len(found) >= 2
    return found


@pytest.mark.parametrize("framework", readable("recipe"))
def test_each_setting_is_checked_by_its_row(framework):
    """No switch, number, word or pair is "x"; the default is one, or the setting is needed."""
    for name, row in checked_rows(framework).items():
        with pytest.raises((TypeError, ValueError)) as caught:
            row.kind(name, "x")
        assert caught.value.key == name and str(caught.value).startswith(f"{name}: ")
        if row.kind is not number:
            row.kind(name, row.default)


@pytest.mark.parametrize("framework", readable("recipe"))
def test_a_misspelled_setting_is_refused(framework):
    blocks = ("actor.", "policy_loss_cfg.") if framework in ("verl", "xtuner") else ()
    path, row = next(found for found in checked_rows(framework).items() if not found[0].startswith(blocks))
    name = path.removeprefix("rollout_correction.")
    wrong = name + name[-1]
    with pytest.raises(ValueError, match=rf"unknown key '{wrong}' \(did you mean '{name}'\?\)"):
        rc.recipe(framework, {name: row.default, wrong: 1})

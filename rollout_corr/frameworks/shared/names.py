"""Names for editors and type checkers: `python -m rollout_corr.frameworks names` prints this file.

When the package runs, names are found by the folders of the frameworks. A name that is known only then, as a `str`, is
for a type checker `typing.cast(rc.SpecName, name)`.
"""

from typing import Literal

_SpecAndRecipe = Literal[
    "areal.kl", "areal.kpop", "areal.m2po", "areal.seq", "areal.token_mask",
    "ctpo.cumprod", "ctpo.cumprod_la", "ctpo.geomean", "ctpo.geomean_la",
    "dppo.kl", "dppo.tv",
    "flash_rl.tis",
    "glm.icepop",
    "megatron.tis",
    "molt.geo", "molt.seq", "molt.token",
    "nemo.gspo_is", "nemo.icepop", "nemo.mult_err", "nemo.seq_mask_tis", "nemo.tis",
    "open_instruct.default", "open_instruct.icepop", "open_instruct.seq", "open_instruct.vaco",
    "openrlhf.dppo_like", "openrlhf.flash_reinforce", "openrlhf.icepop", "openrlhf.seq_mask_tis", "openrlhf.tis",
    "prime_rl.dppo", "prime_rl.icepop", "prime_rl.ipo", "prime_rl.kpop", "prime_rl.ref_kl",
    "rlinf.decoupled",
    "roll.default", "roll.segment",
    "skyrl.geometric_mask", "skyrl.outlier_mask", "skyrl.product_mask", "skyrl.sequence_tis", "skyrl.tldr",
    "skyrl.token_mask", "skyrl.token_tis",
    "slime.icepop", "slime.mis", "slime.mis_geo", "slime.opsm", "slime.tis",
    "swift.opsm", "swift.sequence_mask", "swift.sequence_truncate", "swift.token_mask", "swift.token_truncate",
    "tunix.tis",
    "verl.bypass_pg_geo_rs", "verl.bypass_pg_geo_rs_seq_tis", "verl.bypass_pg_geo_rs_token_tis", "verl.bypass_pg_is",
    "verl.bypass_pg_token_icepop", "verl.bypass_ppo_clip", "verl.bypass_ppo_clip_geo_rs", "verl.bypass_ppo_clip_k3_rs",
    "verl.decoupled_geo_rs", "verl.decoupled_geo_rs_seq_tis", "verl.decoupled_geo_rs_token_tis", "verl.decoupled_k3_rs",
    "verl.decoupled_k3_rs_seq_tis", "verl.decoupled_k3_rs_token_tis", "verl.decoupled_seq_is",
    "verl.decoupled_seq_is_rs", "verl.decoupled_token_icepop", "verl.decoupled_token_is", "verl.disabled",
    "xtuner.agentic", "xtuner.reasoning",
]  # fmt: skip
SpecName = Literal[
    _SpecAndRecipe,
    "kimi.interval",
    "minirl.mask",
    "trl.default", "trl.opsm", "trl.sequence_mask", "trl.sequence_truncate", "trl.token_mask", "trl.token_truncate",
    "unsloth.default", "unsloth.geometric_mask", "unsloth.geometric_truncate", "unsloth.sequence_mask",
    "unsloth.sequence_truncate", "unsloth.token_mask", "unsloth.token_truncate",
    "verl.staleness",
    "xtuner.staleness",
]  # fmt: skip
RecipeName = Literal[
    _SpecAndRecipe,
    "areal.a3po", "areal.cispo", "areal.grpo", "areal.gspo", "areal.ppo", "areal.sapo",
    "art.default", "art.ppo",
    "fast_llm.grpo", "fast_llm.gspo",
    "glm.double_sided",
    "kimi.k25",
    "megatron.grpo",
    "minirl.default",
    "molt.cispo", "molt.grpo", "molt.gspo", "molt.ppo",
    "nemo.cispo", "nemo.grpo", "nemo.ppo",
    "open_instruct.cispo", "open_instruct.grpo", "open_instruct.ppo",
    "openrlhf.grpo", "openrlhf.gspo", "openrlhf.ppo",
    "pipeline_rl.gspo", "pipeline_rl.ppo", "pipeline_rl.reinforce",
    "rlinf.actor", "rlinf.grpo", "rlinf.importance_sampling_fix", "rlinf.ppo",
    "rllm.cispo", "rllm.dppo_kl", "rllm.dppo_tv", "rllm.gspo", "rllm.icepop", "rllm.ppo_clip", "rllm.reinforce",
    "rllm.reinforce_kl",
    "roll.cispo", "roll.grpo", "roll.kimi15", "roll.ppo", "roll.tis", "roll.topr", "roll.vanilla",
    "skyrl.cispo", "skyrl.dppo", "skyrl.dual_clip", "skyrl.grpo", "skyrl.gspo", "skyrl.ppo", "skyrl.regular",
    "skyrl.rollout_is", "skyrl.sapo",
    "slime.grpo", "slime.ppo",
    "swift.fipo", "swift.grpo", "swift.real",
    "tinker.cispo", "tinker.importance_sampling", "tinker.ppo",
    "torchforge.default",
    "trinity.cispo", "trinity.gspo", "trinity.importance_sampling", "trinity.opmd", "trinity.ppo", "trinity.rec",
    "trinity.sapo", "trinity.topr",
    "trl.async_grpo", "trl.bnpo", "trl.cispo", "trl.dapo", "trl.dr_grpo", "trl.gmpo", "trl.grpo", "trl.iw_opd",
    "trl.luspo", "trl.sapo", "trl.vespo",
    "tunix.dapo", "tunix.drgrpo", "tunix.grpo", "tunix.gspo_token", "tunix.ppo",
    "unsloth.bnpo", "unsloth.cispo", "unsloth.dapo", "unsloth.dr_grpo", "unsloth.grpo", "unsloth.luspo", "unsloth.sapo",
    "unsloth.vespo",
    "verl.cispo", "verl.clip_cov", "verl.dppo_kl", "verl.dppo_tv", "verl.dro", "verl.geo_mean", "verl.gpg", "verl.grpo",
    "verl.gspo", "verl.kl_cov", "verl.ppo", "verl.sapo",
    "xtuner.grpo", "xtuner.ppo",
]  # fmt: skip
FrameworkName = Literal[
    "areal", "miles", "molt", "nemo", "open_instruct", "openrlhf", "prime_rl", "rllm", "roll", "skyrl", "slime",
    "swift", "trl", "unsloth", "verl", "xtuner",
]  # fmt: skip

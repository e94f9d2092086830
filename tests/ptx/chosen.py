"""Which cases `make test` runs as compiled code; the tests of Triton's interpreter take others."""

from __future__ import annotations

# Those whose kernels take long to compile, or have no mask that the others lack. The others together have every mask of
# the kernels in their compiled code, and nine in ten of the source lines that any variant has there. A new variant is
# not slow until it is named here.
SLOW = (
    "full_padded", "token_fp64", "token_unaligned", "token_icepop_short", "token_propagate", "product_kept",
    "product_propagate", "geometric_clamped", "geometric_mixed", "tokens_of_d", "tokens_of_probabilities",
    "sequences_of_d", "sequences_of_exp", "sequences_of_probabilities", "extrema_of_d", "when_tokens", "late",
    "late_zeroed", "skyrl.tldr", "slime.mis", "areal.kpop", "open_instruct.vaco", "kept_set_replayed", "split_padded",
    "split_fp64",
    "loss_ppo_fp64", "loss_gspo_fp64", "loss_dro_sequence", "loss_kl_cov", "turns_split",
    "metrics_huge", "token_fp16", "token_bf16_rollout", "dry_run", "late_after_tokens", "turns_product",
    "loss_gmpo_padded", "loss_gspo_token", "loss_ppo_bf16",
    "metrics_short", "product_geometric_padded", "tokens_of_exp", "verl.decoupled_seq_is_rs", "kept_set",
    "turns_measured", "loss_ppo_padded", "loss_ppo_on_policy", "loss_ppo_value", "loss_gspo", "loss_ppo_kept_set",
    "xtuner.agentic", "file_metrics", "file_short", "file_bf16", "file_strided", "loss_rec_sequence",
    "loss_gspo_scaled",
    "step_tis_padded", "step_tis_unmasked", "step_tis_rejection", "step_geometric_veto", "step_cispo", "step_tis_kl",
    "step_tis_bf16", "step_tis_short", "step_bypass", "step_bypass_score", "step_of_new", "step_zeroed", "step_product",
    "step_tis_kl_of_all", "step_bypass_product", "step_geometric_zeroed",
)  # fmt: skip
# Losses of single tokens that differ from others in their formula: of these Triton's front end alone reads the source.
READ = (
    "loss_reinforce", "loss_cispo", "loss_icepop", "loss_score_by_weights", "loss_dppo_tv", "loss_dppo_kl", "loss_sapo",
    "loss_gpg", "loss_dro", "loss_rec_ring", "loss_sapo_stopped", "loss_topr", "loss_rec", "loss_reinforce_scaled",
)  # fmt: skip


def is_run(case: str) -> bool:
    """Tell whether `make test` runs a case as compiled code, on a hard batch beside the oracle."""
    return case not in SLOW and case not in READ

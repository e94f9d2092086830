"""Which cases `make test` runs as compiled code; `make ptx` and `make test-all` run every one."""

from __future__ import annotations

# One of each kind, in seconds of a compiler that has not met these kernels: weights of tokens in 16 bits, criteria with
# advantages and weights of sequences, sums between ranks, turns, losses of one pass and of two, a step, a file to copy.
RUN = (
    "token_bf16", "when_sequences", "split_packed", "turns_mixed", "loss_ppo_packed", "loss_gspo_padded",
    "step_tis_packed", "file_packed",
)  # fmt: skip
# Losses of single tokens that differ from others in their formula: of these Triton's front end reads the source too,
# whose types and constants its interpreter lets pass.
READ = (
    "loss_reinforce", "loss_cispo", "loss_icepop", "loss_score_by_weights", "loss_dppo_tv", "loss_dppo_kl", "loss_sapo",
    "loss_gpg", "loss_dro", "loss_rec_ring", "loss_sapo_stopped", "loss_topr", "loss_rec", "loss_reinforce_scaled",
)  # fmt: skip

"""xtuner's configuration of this name at the level token: weights, mask, three metrics, and the names of the others."""

from __future__ import annotations

from types import SimpleNamespace

import torch

OF_POLICIES = (
    *("training_ppl", "training_log_ppl", "kl", "k3_kl", "rollout_ppl", "rollout_log_ppl", "log_ppl_diff"),
    *("log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio", "logprob_abs_diff"),
)
OF_WEIGHTS = (
    *("veto_fraction", "catastrophic_token_fraction", "mean", "max", "min", "ratio_fraction_high"),
    *("ratio_fraction_low", "std", "eff_sample_size", "seq_mean", "seq_std", "seq_max", "seq_min"),
    *("seq_max_deviation", "seq_fraction_high", "seq_fraction_low", "masked_fraction", "seq_masked_fraction"),
)


class RolloutImportanceSampling(SimpleNamespace):
    def compute_rollout_importance_weights_and_metrics(self, old_log_prob, rollout_log_prob, num_tokens, response_mask):
        d = (old_log_prob - rollout_log_prob).double()
        (upper, lower), (mask_upper, mask_lower) = self.rollout_is_threshold, self.rollout_is_mask_threshold
        veto_upper, veto_lower = self.rollout_is_veto_threshold
        ratio, valid = d.exp(), response_mask.bool()
        mask = valid & (ratio >= mask_lower) & (ratio <= mask_upper)
        vetoed = valid & ((ratio < veto_lower) | (ratio > veto_upper))
        parts = zip(mask.split(num_tokens.tolist(), 1), vetoed.split(num_tokens.tolist(), 1), strict=True)
        mask = torch.cat([kept & ~bad.any() for kept, bad in parts], 1)
        weights = ratio.clamp(lower, upper).where(valid, 0.0)
        of_policies = {"mismatch/valid": 1.0} | {f"mismatch/mismatch_{name}": 0.0 for name in OF_POLICIES}
        of_policies["mismatch/mismatch_kl"] = float(-d[valid].mean())
        of_policies["mismatch/mismatch_k3_kl"] = float((d.expm1() - d)[valid].mean())
        of_weights = {f"mismatch/rollout_is_{name}": 0.0 for name in OF_WEIGHTS}
        kept = weights[valid]
        of_weights["mismatch/rollout_is_eff_sample_size"] = float(1.0 / (kept / (kept.mean() + 1e-8)).square().mean())
        return weights, mask.float(), of_policies, of_weights


def merge_rollout_is_metrics(rollout_is_metrics, device="cuda"):
    """Of xtuner's own, the signature alone, which install() compares before it puts ours here."""
    raise AssertionError("install() replaces this function, and the example calls it neither before nor after")

"""The computation of xtuner's configuration of this name at the level token, as plain loops."""

from __future__ import annotations

import torch

from oracles import peers as oracle_reports
from oracles.xtuner import Fields, by_hand, rows_of


class RolloutImportanceSampling(Fields):
    def compute_rollout_importance_weights_and_metrics(self, old_log_prob, rollout_log_prob, num_tokens, response_mask):
        rows = rows_of(old_log_prob, rollout_log_prob, num_tokens, response_mask)
        level, mode, bounds = self.rollout_is_level, self.rollout_is_mode, self.rollout_is_threshold
        weights, mask = by_hand(
            rows, level, mode, bounds, self.rollout_is_mask_threshold, self.rollout_is_veto_threshold
        )
        metrics = oracle_reports.xtuner(
            rows,
            level=level,
            mode=mode,
            upper=bounds[0],
            lower=bounds[1],
            mask=self.rollout_is_mask_threshold[::-1],
            veto=self.rollout_is_veto_threshold[::-1],
        )
        of_weights = {key: x for key, x in metrics.items() if key.startswith("mismatch/rollout_is")}
        of_policies = {key: x for key, x in metrics.items() if key not in of_weights}
        return torch.tensor([weights]), torch.tensor([mask]), of_policies, of_weights

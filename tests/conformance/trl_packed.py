"""Rows of AsyncGRPOTrainer: what its collator hands to `compute_loss`, and as much of the trainer as that touches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.batches import Batch

PADDING = 3


class Outputs(dict[str, Tensor]):
    """A model's output: read by key and by name."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


def trainer(**attributes: Any) -> SimpleNamespace:
    """Make a trainer of two processes with the same metrics, and with a router's loss."""
    steps = ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s")
    made = {
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "accelerator": SimpleNamespace(
            num_processes=2, reduce=lambda x, reduction: 2 * x, gather=lambda x: torch.stack([x, x])
        ),
        "current_gradient_accumulation_steps": 2,
        "aux_loss_enabled": True,
        "router_aux_loss_coef": 0.5,
        "_metrics": {"train": defaultdict(list)},
        "_train_tokens_start_time": None,
        **{f"_step_{name}": 0.0 for name in steps},
    }
    return SimpleNamespace(**made | attributes)


def in_terms(given: Batch) -> tuple[dict[str, Tensor], Callable[..., Outputs]]:
    """Lay a batch out as TRL 1.16.0 does: a list of loss terms that each name their position in the row."""
    mask = given.mask
    count = int(mask.sum())
    where = torch.randperm(2 * count, generator=torch.Generator().manual_seed(given.seed))[:count]
    terms = {
        "token_index": where,
        "old_log_probs": given.rollout[mask],
        "advantages": given.token_advantages[mask],
        "segment_id": torch.arange(len(mask))[:, None].expand(mask.shape)[mask],
    }
    inputs = {
        name: torch.cat([x, x.new_full((PADDING,), -1 if name == "token_index" else 0)])[None]
        for name, x in terms.items()
    }
    row = torch.ones(1, 2 * count, dtype=torch.int64)
    inputs |= dict.fromkeys(("input_ids", "position_ids", "shift_labels", "attention_mask"), row)
    inputs |= {f"tree_{name}": row for name in ("kv_index", "cu_seqlens_q", "cu_seqlens_k")}
    inputs |= {"tree_max_seqlens": torch.ones(1, 2, dtype=torch.int64)}
    inputs |= {name: torch.full((2,), 2.0 * count) for name in ("global_n_tokens", "global_n_forward_tokens")}
    inputs |= {"mean_seq_len": torch.ones(2)}

    def model(**kwargs: Any) -> Outputs:
        log_probs = given.new.new_zeros(2 * count).index_put((where,), given.new[mask])
        entropy = torch.zeros(1, 2 * count, dtype=given.new.dtype)
        return Outputs(log_probs=log_probs[None], entropy=entropy, aux_loss=torch.tensor(0.25))

    return inputs, model


def in_a_row(given: Batch) -> tuple[dict[str, Tensor], Callable[..., Outputs]]:
    """Lay a batch out as TRL did before: prompts of one token, then all that was generated, and padding behind."""

    def row(x: Tensor, prompt: float) -> Tensor:
        x = torch.cat([x.new_full((len(x), 1), prompt), x], dim=1).flatten()
        return torch.cat([x, x.new_zeros(PADDING)])[None]

    tokens = given.mask.numel() + len(given.mask)
    positions = torch.arange(1, given.mask.shape[1] + 1).expand(given.mask.shape)
    inputs = {
        "input_ids": torch.ones(1, tokens + PADDING, dtype=torch.int64),
        "attention_mask": (torch.arange(tokens + PADDING) < tokens).long()[None],
        "completion_mask": row(given.mask.long(), 0),
        "old_log_probs": row(given.rollout, 0.0),
        "position_ids": row(positions, 0),
        "advantages": row(given.token_advantages, 0.0),
        "global_n_tokens": torch.full((2,), 2.0 * int(given.mask.sum())),
        "metrics": {},
    }

    def model(**kwargs: Any) -> Outputs:
        log_probs = row(given.new, 0.0)[:, 1:tokens]
        return Outputs(log_probs=log_probs, entropy=torch.zeros_like(log_probs), aux_loss=torch.tensor(0.25))

    return inputs, model

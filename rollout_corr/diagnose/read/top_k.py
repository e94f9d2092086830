"""Top-k log-probs of engine and trainer, [N, k], become bounds for each token as they are read; no chunk holds them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .fields import TOP_K
from .problems import DumpError

# Columns of a chunk, float64, NaN where a token has no entries.
TV_LOW, TV_HIGH, KL_LOW = "topk_tv_low", "topk_tv_high", "topk_kl_rollout_train_low"
FIRST_DIFFERS, ORDER_DIFFERS = "topk_first_differs", "topk_order_differs"
MEASURES = (TV_LOW, TV_HIGH, KL_LOW, FIRST_DIFFERS, ORDER_DIFFERS)
# Entries of a token, and pairs of entries that are compared at a time.
MOST_ENTRIES, MOST_PAIRS = 1024, 1 << 22
# What rounding of float32 log-probs may take from the mass of the rest.
ROUNDING = 1e-6


def checked(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether there are top-k log-probs of both sides.

    Args:
        shapes: By role, [..., k].

    Raises:
        DumpError: Their k do not fit together, or are too large.
    """
    rollout, train, ids, train_ids = (shapes[role][-1] if role in shapes else None for role in TOP_K)
    if rollout is None or train is None:
        return False
    if train_ids is not None and ids is None:
        raise DumpError("train_topk_ids: expected topk_ids, the ids of rollout_topk_logp, as well")
    for role, shape in shapes.items():
        if shape[-1] > MOST_ENTRIES:
            raise DumpError(f"{role}: expected at most {MOST_ENTRIES:,} entries for each token, got {shape[-1]:,}")
    for role, k, like, wanted in (
        ("topk_ids", ids, "rollout_topk_logp", rollout),
        ("train_topk_ids", train_ids, "train_topk_logp", train),
        ("train_topk_logp", None if train_ids is not None else train, "rollout_topk_logp", rollout),
    ):
        if k is not None and k != wanted:
            hint = ", or train_topk_ids next to it" if role == "train_topk_logp" else ""
            raise DumpError(f"{role}: expected as many entries as {like}, k = {wanted}{hint}; got k = {k}")
    return True


def bounds(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bound the distance of both policies at each token by what is known of them.

    An entry that only one side has belongs to the rest of both. Of the rest only its mass is known: it may lie on the
    same tokens on both sides, or on others. The divergence of the rests has no upper bound.

    Args:
        entries: By role, [N, k]; ids of -1 and log-probs of NaN are no entries.

    Returns:
        The measures by name, [N] float64.
    """
    count = entries["rollout_topk_logp"].shape[0]
    k = max(x.shape[1] for x in entries.values())
    size = max(1, MOST_PAIRS // max(1, k * k))
    parts = [_bounds({role: x[i : i + size] for role, x in entries.items()}) for i in range(0, count, size)]
    empty = torch.zeros(0, dtype=torch.float64)
    return {name: torch.cat([empty, *(part[name] for part in parts)]) for name in MEASURES}


def _bounds(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    rollout, listed = (entries[role].double() for role in ("rollout_topk_logp", "train_topk_logp"))
    ids, train_ids = entries.get("topk_ids"), entries.get("train_topk_ids")
    there = ~rollout.isnan()
    if ids is not None:
        there &= (ids >= 0) & ~(ids[:, :, None] == ids[:, None, :]).tril(-1).any(2)
    train, both = listed, there & ~listed.isnan()
    if ids is not None and train_ids is not None:
        match = (ids[:, :, None] == train_ids[:, None, :]) & ~listed.isnan()[:, None, :]
        train = listed.gather(1, match.int().argmax(2))
        both = there & match.any(2)
        listed = listed.where(train_ids >= 0, torch.nan)
    p, q = (x.exp().where(both, 0.0) for x in (rollout, train))
    rests = [(1.0 - x.sum(1)).clamp(0.0, 1.0) for x in (p, q)]
    apart = (p - q).abs().sum(1)
    divergence = (p * (rollout - train)).where(p > 0, 0.0).sum(1)
    # More mass of the trainer's rest makes the bound lower.
    rest = rests[0] * ((rests[0] / (rests[1] + ROUNDING)).log()).where(rests[0] > 0, 0.0)
    # Entries that tie have no order.
    first = (rollout == _largest(rollout, there)) & both & (train == _largest(listed, ~listed.isnan()))
    found = {
        TV_LOW: 0.5 * (apart + (rests[0] - rests[1]).abs()),
        TV_HIGH: (0.5 * (apart + rests[0] + rests[1])).clamp(max=1.0),
        KL_LOW: (divergence + rest).clamp(min=0.0),
        FIRST_DIFFERS: ~first.any(1),
        ORDER_DIFFERS: _disordered(rollout, train, both) | (there & ~both).any(1),
    }
    known = there.any(1) & ~listed.isnan().all(1)
    return {name: x.double().where(known, torch.nan) for name, x in found.items()}


def _largest(x: Tensor, there: Tensor) -> Tensor:
    return x.where(there, -torch.inf).amax(1, keepdim=True)


def _disordered(one: Tensor, other: Tensor, both: Tensor) -> Tensor:
    """Return whether some pair of entries that both sides have is in another order, [N]."""
    one, other = (x.where(both, -torch.inf) for x in (one, other))
    by_other = other.argsort(dim=1, descending=True, stable=True)
    order = by_other.gather(1, one.gather(1, by_other).argsort(dim=1, descending=True, stable=True))
    ordered = other.gather(1, order)
    return (ordered[:, 1:] > ordered[:, :-1]).any(1)

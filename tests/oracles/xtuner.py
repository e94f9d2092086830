"""xtuner's configuration, and its weights and mask as plain loops."""

from __future__ import annotations

import itertools
import math

from oracles import peers as oracle_reports


class Fields:
    """As much of xtuner's pydantic model as is used of it."""

    rollout_is_level = "token"
    rollout_is_mode = "truncate"
    rollout_is_threshold = None
    rollout_is_mask_threshold = None
    rollout_is_veto_threshold = None

    def __init__(self, **fields):
        for name, value in fields.items():
            assert hasattr(self, name), name
            setattr(self, name, value)


def rows_of(old, rollout, num_tokens, mask):
    """Lists of (old, rollout, valid), a list per sequence."""
    tokens = zip(*(x[0].tolist() for x in (old.double(), rollout.double(), mask != 0)), strict=True)
    return [list(itertools.islice(tokens, n)) for n in num_tokens.tolist()]


def by_hand(rows, level, mode, threshold, mask_threshold, veto):
    """xtuner's weights and mask of each token, as loops."""
    weights, kept = [], []
    upper, lower = threshold
    mask_upper, mask_lower = mask_threshold or threshold
    for row in rows:
        valid = [old - rollout for old, rollout, ok in row if ok]
        whole = {"sequence": math.fsum(valid), "geometric": oracle_reports.average(valid)}
        vetoed = veto is not None and not all(veto[1] <= math.exp(d) <= veto[0] for d in valid)
        for old, rollout, ok in row:
            raw = oracle_reports.safe_exp(whole.get(level, old - rollout))
            inside = mode == "truncate" or mask_lower <= raw <= mask_upper
            weights.append((raw if mode == "mask" else min(max(raw, lower), upper)) if ok else 0.0)
            kept.append(float(ok and inside and not vetoed))
    return weights, kept

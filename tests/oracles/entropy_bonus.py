"""The oracle of the entropy bonus: loops over tokens, from the formulas in docs/loss_math.md."""

from __future__ import annotations

import math


def bonus(entropy, mask, trains, coef, scope, mean, total=None):
    """The term of the loss and its slope at each token's entropy; all arguments are lists of rows, or numbers.

    `total` divides in place of what the mean counts; `trains` is True at trained tokens.
    """
    valid = [[m != 0 for m in row] for row in mask]
    kept = [[a and b for a, b in zip(*rows, strict=True)] for rows in zip(valid, trains, strict=True)]
    among = valid if scope == "all" else kept
    counted = kept if mean.over == "kept" else valid
    if total is None:
        tokens = sum(sum(row) for row in counted)
        sequences = sum(any(row) for row in counted)
        total = {"token": tokens, "sum": 1}.get(mean.of, sequences)
    divisor = (total or 1) * (mean.length or 1)
    value, slopes = 0.0, []
    for row, picked, counts in zip(entropy, among, counted, strict=True):
        share = max(sum(counts), 1) if mean.of == "sequence" else 1
        slopes.append([])
        for h, here in zip(row, picked, strict=True):
            slope = -coef / share / divisor if here and math.isfinite(h) else 0.0
            slopes[-1].append(slope)
            value += slope * h if slope else 0.0
    return value, slopes

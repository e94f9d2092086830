"""Histograms of D and of weights' logarithms: counted on the device, read as percentiles on the host."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

HISTOGRAM_BINS = 512
HISTOGRAM = tuple(f"histogram_{i}" for i in range(HISTOGRAM_BINS))
HISTOGRAM_OF_WEIGHTS = tuple(f"histogram_of_weights_{i}" for i in range(HISTOGRAM_BINS))

# Bin 0 of a sign begins at this exponent, in eighths of a power of two.
FIRST = (127 - 24) << 3


def histogram(d: Tensor, measured: Tensor | None) -> Tensor:
    """Count how often each sign, exponent and top three mantissa bits of D occur: [512] int64.

    256 bins a sign. Bin 0 holds |D| < 2^-24 * 1.125, bin 255 |D| >= 2^8 * 0.9375; between them every power of two is
    cut into 8 equal parts. Counts are equal on every backend, because only bits of D decide.
    """
    bits = d.float().contiguous().view(torch.int32)
    bins = (((bits & 0x7FFFFFFF) >> 20) - FIRST).clamp(0, 255) + (bits < 0) * 256
    counted = d.isfinite() if measured is None else measured & d.isfinite()
    flat = torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=d.device)
    return flat.index_add_(0, bins.flatten().long(), counted.flatten().long())


def bin_edges(k: int) -> tuple[float, float]:
    """The bounds of bin k (0 to 255): it holds low <= |D| < high."""

    def edge(i: int) -> float:
        return float(struct.unpack("f", struct.pack("I", (i + FIRST) << 20))[0])

    half = HISTOGRAM_BINS // 2
    return (edge(k) if k else 0.0), (edge(k + 1) if k < half - 1 else math.inf)


def beyond(v: Mapping[str, float], bound: float) -> float:
    """Count the finite D with |D| >= a bound, which is an edge of the bins."""
    half = HISTOGRAM_BINS // 2
    return sum(v[HISTOGRAM[k + side]] for k in range(half) if bin_edges(k)[0] >= bound for side in (0, half))


def percentile(v: Mapping[str, float], percent: float) -> float:
    """Interpolate a percentile of D: linear inside a bin, never beyond the extrema seen; 0 where it is exactly 0."""
    inside = [v[name] for name in HISTOGRAM]
    zeros = sum(inside) - (v["tokens_differing"] - v["tokens_nonfinite"])
    return interpolated(inside, zeros, (-v["-min_d"], v["max_d"]), percent)


def interpolated(inside: list[float], zeros: float, ends: tuple[float, float], percent: float) -> float:
    """Interpolate a percentile in a histogram, next to whose bins so many values are known to be exactly 0."""
    half, total = HISTOGRAM_BINS // 2, sum(inside)
    if not total:
        return 0.0
    # Exact zeros lie in the two bins around 0, by their sign. They rank between the other values of these bins.
    positive = min(zeros, inside[0])
    inside[0] -= positive
    inside[half] -= zeros - positive
    low, high = ends
    rank, seen = percent / 100.0 * total, 0.0
    for i in (*range(HISTOGRAM_BINS - 1, half - 1, -1), None, *range(half)):
        here = zeros if i is None else inside[i]
        if here and seen + here >= rank:
            if i is None:
                return 0.0
            near, far = bin_edges(i % half)
            start, end = (-far, -near) if i >= half else (near, far)
            start, end = max(start, low), min(end, high)
            return start + (end - start) * (rank - seen) / here
        seen += here
    return high

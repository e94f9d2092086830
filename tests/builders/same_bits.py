"""Results that have to be the same to the bit, and statistics whose float sums alone are rounded."""

from __future__ import annotations

import math

import torch

from builders.rounding import margin


def outcome(laid, out):
    """Bits of weights, mask and decisions per sequence, and the statistics."""
    weights = None if out.weights is None else in_hex(laid.read(out.weights))
    return weights, laid.read(out.mask), out.keep.tolist(), out.statistics


def in_hex(rows):
    """Floats as they compare to the bit: NaN equals NaN, 0.0 differs from -0.0."""
    return [[value.hex() for value in row] for row in rows]


def pick(rows, order):
    return None if rows is None else [rows[s] for s in order]


def assert_same_results(got, wanted, order=None):
    order = range(len(wanted[2])) if order is None else order
    assert got[0] == pick(wanted[0], order)
    assert got[1] == pick(wanted[1], order)
    assert got[2] == pick(wanted[2], order)


def is_count(name):
    return name.startswith(("tokens", "sequences", "histogram_")) or name.endswith(("/tokens", "/sequences", "/units"))


def assert_same_statistics(got, wanted, rounds_means=False, most=math.inf):
    """Counts, extrema and histogram equal; float sums to rounding.

    Args:
        rounds_means: A sequence's mean of token weights, a float sum too, may differ by that with how tokens are cut.
        most: Where sums saturate.
    """
    a, b = got.metrics_async().values(), wanted.metrics_async().values()
    a, b = ({name: max(min(value, most), -most) for name, value in x.items()} for x in (a, b))
    assert list(a) == list(b)
    for name in list(b)[len(wanted.sums) :]:
        of_means = rounds_means and name.endswith(("sequence_raw", "sequence_weight"))
        of_means = of_means and wanted.spec.weight.per_token
        within = margin(torch.float32, size=max(1.0, abs(b[name]))) if of_means else 0.0
        if name.endswith(("max_raw", "min_raw", "max_weight", "min_weight")):
            # Of the largest and smallest D alone, or of every token's: two roundings of one number.
            within = max(within, margin(torch.float32, 1, max(1.0, abs(b[name]))))
        assert a[name] == b[name] or abs(a[name] - b[name]) <= within, (name, a[name], b[name])
    for name, value in list(b.items())[: len(wanted.sums)]:
        if is_count(name) or a[name] == value:
            assert a[name] == value, (name, a[name], value)
        else:
            # Metric sums run in fp32 inside a block: rounding is relative to what was added, not to what is left.
            added = max(1.0, abs(value), math.sqrt(b.get("tokens", b.get("loss_tokens")) * b.get(f"{name}2", 0.0)))
            assert abs(a[name] - value) <= margin(torch.float32, size=added), (name, a[name], value)

"""Statistics that the series over small |D| has already."""

from __future__ import annotations

from rollout_corr.definition.findings import Findings, Numbers


def known_statistics(f: Findings) -> tuple[Numbers, Numbers]:
    """Sums and maxima by name, for `Collector`."""
    tokens, sums, maxima = f.tokens, Numbers(), Numbers()
    if tokens.ends is not None:
        maxima["-min_d"], maxima["max_d"] = tokens.ends
    if tokens.is_within(tokens.clamp):
        sums["tokens_clamped"] = 0.0
    near, outliers, weight = tokens.near, f.few, f.spec.weight
    if near is None:
        return sums, maxima
    sums |= {
        "abs_d": (tokens._known["size"] if "size" in tokens._known else tokens.saturated.abs()).sum(),
        "d2": near.d2,
        "k3": near.k3,
        "ratio": near.excess(tokens.sum_d),
        "ratio2": near.excess2,
    }
    if outliers is not None and weight is not None:
        bounds, ends = outliers.bounds, tokens.excess_ends
        sums["raw2"] = near.excess2
        sums["weight2"] = outliers.squares() if weight.bounded else near.excess2
        sums["tokens_above"] = 0.0 if bounds.high is None else outliers.count(None, bounds.high)
        sums["tokens_below"] = 0.0 if bounds.low is None else outliers.count(bounds.low, None)
        maxima["-min_raw"], maxima["max_raw"] = ends
        maxima["-min_weight"], maxima["max_weight"] = outliers.extrema(ends)
    return sums, maxima

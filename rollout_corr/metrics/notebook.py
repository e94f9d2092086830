"""Metrics as a table of HTML, which notebooks show in place of a repr."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from rollout_corr.metrics.limits import BY_KEY

# Rows that are seen at once; the rest is folded.
FIRST = (
    *("tokens", "sequences", "kl_k3", "ratio_mean", "d_abs_mean", "d_abs_max", "chi2_token", "tokens_nonfinite"),
    *("tokens_kept_fraction", "sequences_kept_fraction", "weight_ess", "loss"),
)


def shown(about: str, metrics: Mapping[str, float], warnings: Sequence[str]) -> str:
    """Return a heading, the warnings, and the metrics with their healthy ranges, most of them folded."""
    first = [key for key in FIRST if key in metrics]
    rest = [key for key in metrics if key not in FIRST]
    said = "".join(f"<li>{html.escape(text)}</li>" for text in warnings)
    folded = f"<details><summary>{len(rest)} more</summary>{_table(metrics, rest)}</details>" if rest else ""
    return (
        f"<p><code>{html.escape(about)}</code></p>{f'<ul>{said}</ul>' if said else ''}{_table(metrics, first)}{folded}"
    )


def _table(metrics: Mapping[str, float], keys: Sequence[str]) -> str:
    rows = []
    for key in keys:
        limit = BY_KEY.get(key)
        value = f"{metrics[key]:,.6g}"
        if limit is not None and limit.crossed(metrics[key]):
            value = f"<b style='color:#c00'>{value}</b>"
        healthy = "" if limit is None else f"healthy: {html.escape(limit.range_of(limit.healthy))}"
        rows.append(f"<tr><td><code>{html.escape(key)}</code></td><td>{value}</td><td>{healthy}</td></tr>")
    return f"<table>{''.join(rows)}</table>"

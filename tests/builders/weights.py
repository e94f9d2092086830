"""Weights by the word for their ratio."""

from __future__ import annotations

from typing import Any

import rollout_corr as rc

KINDS = ("token", "product", "geometric", "prefix")


def weight_of(
    kind: str,
    lower: Any = None,
    upper: Any = None,
    outside: Any = "clamp",
    normalize: Any = None,
    token_clamp: float | None = None,
    reduce: Any = None,
    *,
    among: Any = "sequence",
    **others: Any,
) -> rc.Weight:
    """Make a weight of a kind; `among` is the stretch whose tokens it is made of, and "sequence" for tokens."""
    fields = {"lower": lower, "upper": upper, "outside": outside, "normalize": normalize, "token_clamp": token_clamp}
    if kind == "token":
        assert among == "sequence" and reduce is None
        return rc.Weight.token(**fields, **others)
    if kind == "prefix":
        return rc.Weight("prefix", reduce, **fields, within=among, **others)
    return rc.Weight(among, {"product": "sum", "geometric": "mean"}[kind], **fields, **others)

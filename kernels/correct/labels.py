"""Statistics of each sequence, which labels add up, beside those of the batch.

`partials.add` and `put_extrema` keep what is of sequences. What is of tokens comes from the slots, gathered here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.finish import weight_at
from rollout_corr.kernels.correct.plan import Plan
from rollout_corr.kernels.gather import Gathered, plain
from rollout_corr.kernels.partials import Partials, name_of, put_each
from rollout_corr.kernels.tokens import at, has, key_of, of_key, of_label, size


@triton.constexpr_function
def derived_place(plan: Plan, k: int) -> int:
    """Find which extremum of weights a maximum of labels is, as `finish` numbers them; -1: none that is derived."""
    name = plan.label_maxima[k]
    derived = plan.token_maxima[: plan.derived]
    return derived.index(name) if name in derived else -1


@triton.jit
def largest(found: Gathered, PLAN: tl.constexpr, name: tl.constexpr) -> tl.tensor:
    """Take a maximum over tokens of each sequence: -inf of one without any."""
    key = found.peaks[at(PLAN, "peaks", of_label(name))]
    return of_key(tl.maximum(key, key_of(tl.full(key.shape, float("-inf"), of_key(key).dtype))))


@triton.jit
def keep_sum(
    found: Gathered, like: tl.tensor, out: Partials, PLAN: tl.constexpr, name: tl.constexpr
) -> None:  # fmt: skip
    """Store a sum over the tokens of each sequence; nothing of a column that sequences have by themselves."""
    if has(PLAN, "floats", of_label(name)):
        put_each(out.sums, PLAN, "label_sums", name, plain(found, PLAN, of_label(name)))
    elif has(PLAN, "token_sums", name):
        put_each(out.sums, PLAN, "label_sums", name, tl.zeros_like(like))


@triton.jit
def keep_largest(
    found: Gathered, out: Partials, numbers: tl.tuple, PLAN: tl.constexpr, name: tl.constexpr, K: tl.constexpr
) -> None:
    """Store a maximum over the tokens of each sequence; the K-th extremum of weights from that of D."""
    if has(PLAN, "peaks", of_label(name)):
        put_each(out.maxima, PLAN, "label_maxima", name, largest(found, PLAN, name))
    elif K >= 0:
        high, low = largest(found, PLAN, "max_d"), largest(found, PLAN, "-min_d")
        if K % 2 == 0:
            weight = weight_at(K, high, low, numbers, PLAN)
        else:
            weight = weight_at(K, low, high, numbers, PLAN)
        put_each(out.maxima, PLAN, "label_maxima", name, weight)


@triton.jit
def keep_tokens(found: Gathered, like: tl.tensor, out: Partials, numbers: tl.tuple, PLAN: tl.constexpr) -> None:
    """Store what labels add up of the tokens of each sequence. like: [SEQUENCES] float64."""
    for k in tl.static_range(size(PLAN, "label_sums")):
        keep_sum(found, like, out, PLAN, name_of(PLAN, "label_sums", k))
    for k in tl.static_range(size(PLAN, "label_maxima")):
        keep_largest(found, out, numbers, PLAN, name_of(PLAN, "label_maxima", k), derived_place(PLAN, k))

"""Weights by what lies around a token, and log-probs by its age, next to plain loops: FIPO's, IW-OPD's and A-3PO's."""

from __future__ import annotations

import math
import random

import pytest
import torch

import rollout_corr as rc
from builders.rounding import near
from rollout_corr.api.per_token import decayed_suffix_sums

NAN, INF = math.nan, math.inf
# Sequences of 5, 1, 0 and 4 tokens. The last token of the first is not finite in NEW, and NAN stands where MASK is 0.
NEW = [[-0.5, -1.0, NAN, -0.25, NAN], [-2.0], [], [-0.1, -3.0, -0.7, -0.2]]
OLD = [[-0.75, -0.6, NAN, -0.5, -1.0], [-1.5], [], [-0.5, -2.0, -0.75, -1.0]]
ADVANTAGES = [[1.0, -0.5, NAN, -2.0, 0.25], [-1.0], [], [-0.5, INF, 0.0, -1.5]]
MASK = [[1, 1, 0, 1, 1], [1], [], [1, 1, 1, 1]]
# The current one is 7: ages of 4, 1 and 0, a filler, one of the future. Where NEW is NaN its age leaves it out.
VERSIONS = [[3, 6, 7, -1, 6], [5], [], [0, 9, 4, 7]]
LAYOUTS = ["packed", "gaps", "right", "left", "list", "jagged"]


def laid(rows, layout, dtype=torch.float64):
    """Rows as tensors of a layout."""
    rows = [torch.tensor(row, dtype=dtype) for row in rows]
    if layout == "list":
        return rows
    if layout == "jagged":
        return torch.nested.nested_tensor(rows, layout=torch.jagged)
    if layout in ("packed", "gaps"):
        outside = [torch.ones(2, dtype=dtype)] * (layout == "gaps")  # tokens of no sequence
        return torch.cat([*outside, *rows, *outside])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=layout)


def batch(layout, **more):
    """Mask and offsets of the rows."""
    offsets = torch.tensor([0, 5, 6, 6, 10]) + 2 * (layout == "gaps")
    offsets = {"cu_seqlens": offsets} if layout in ("packed", "gaps") else {}
    return rc.Batch(mask=laid(MASK, layout, torch.int64), **offsets, **more)


def read(found, layout):
    """The rows of a result; in the slots around them there is nothing."""
    lengths = list(map(len, MASK))
    if layout in ("right", "left"):
        rows = [row if layout == "right" else row.flip(0) for row in found]
        assert not any(any(row[n:].tolist()) for row, n in zip(rows, lengths, strict=True))
        rows = [row[:n] for row, n in zip(rows, lengths, strict=True)]
        return [(row if layout == "right" else row.flip(0)).tolist() for row in rows]
    if layout == "gaps":
        assert not found[:2].any() and not found[-2:].any()
        found, layout = found[2:-2], "packed"
    rows = {"packed": lambda x: x.split(lengths), "jagged": lambda x: x.unbind()}.get(layout, list)(found)
    return [row.tolist() for row in rows]


def fipo(s, half_life=32.0, lower=0.0, upper=INF, delta=None, safety=None):
    """The weights of a sequence."""
    differences = {t: a - b for t, (a, b, m) in enumerate(zip(NEW[s], OLD[s], MASK[s], strict=True)) if m}
    moved, found = {t: x for t, x in differences.items() if math.isfinite(x)}, [0.0] * len(MASK[s])
    for t in differences:
        adds = [x * 2 ** ((t - u) / half_life) for u, x in moved.items()
                if u >= t and (delta is None or math.exp(x) <= delta)]  # fmt: skip
        found[t] = min(max(math.exp(math.fsum(adds)), lower), upper)
        if safety is not None and ADVANTAGES[s][t] < 0 and math.exp(moved.get(t, 0.0)) > safety:
            found[t] = min(max(found[t], 0.8), 1.0)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "settings", [{"half_life": 2.0}, {"lower": 0.9, "upper": 1.1, "delta": 1.2}, {"half_life": 2.0, "safety": 1.05}],
    ids=str,
)  # fmt: skip
def test_weights_by_the_future(layout, settings):
    new, old, advantages = (laid(x, layout) for x in (NEW, OLD, ADVANTAGES))
    given = {"lower": 0.0, "upper": INF, "delta": None, "safety": None} | settings
    for x in new if layout == "list" else [new]:
        x.requires_grad_()
    found = rc.future_kl_weights(new, old, batch(layout), advantages=advantages, **given)
    assert not any(x.requires_grad for x in (found if layout == "list" else [found]))
    assert read(found, layout) == [near(fipo(s, **settings)) for s in range(4)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_weights_of_early_tokens(layout, gamma):
    found = rc.early_token_weights(laid(ADVANTAGES, layout), batch(layout), gamma=gamma)
    for row, advantages, mask in zip(read(found, layout), ADVANTAGES, MASK, strict=True):
        sizes = [abs(a) if m and math.isfinite(a) else 0.0 for a, m in zip(advantages, mask, strict=True)]
        wanted = [1 + gamma * (1 - math.fsum(sizes[:t]) / math.fsum(sizes)) if m else 0.0 for t, m in enumerate(mask)]
        assert row == near(wanted)


def test_sums_of_long_sequences_in_any_company():
    """The rounds double; the bits of a sequence do not depend on its neighbors."""
    generator = random.Random(0)
    lengths = [1, 700, 3, 0, 64, 65]
    x = torch.tensor([generator.gauss(0.0, 1.0) for _ in range(sum(lengths))], dtype=torch.float64)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for decay in (1.0, 0.9, 1e-200):
        each = zip(decayed_suffix_sums(x, sequence, decay).split(lengths), x.split(lengths), strict=True)
        for found, own in each:
            row = own.tolist()
            for t in range(0, len(row), 7):
                wanted = math.fsum(decay ** (u - t) * row[u] for u in range(t, len(row)))
                assert found[t].item() == near(wanted)
            assert torch.equal(decayed_suffix_sums(own, torch.zeros(len(row)), decay), found)


# --- by age ---


def between(new, rollout, version, linear):
    """The value at a token and its derivative by `new`, from the formulas of AReaL's documentation."""
    if version < 0 or version >= 6:
        return rollout, 0.0
    alpha = (6 - version) / (7 - version)
    if not linear:
        return rollout + alpha * (new - rollout), alpha
    p = (1 - alpha) * math.exp(rollout) + alpha * math.exp(new)
    return math.log(p), alpha * math.exp(new) / p


@pytest.mark.parametrize("layout", ["packed", "list"])
@pytest.mark.parametrize("interpolation", ["loglinear", "linear"])
def test_proximal_log_probs(layout, interpolation):
    """Nothing of the new policy, NaN neither, is where alpha is 0; the gradient is alpha, or its share."""
    new, versions = laid(NEW, layout), rc.Versions(laid(VERSIONS, layout, torch.int64), 7)
    leaves = [x.requires_grad_() for x in (new if layout == "list" else [new])]
    found = rc.proximal(new, laid(OLD, layout), batch(layout, versions=versions), interpolation=interpolation)
    slopes = list(torch.autograd.grad(sum(x.sum() for x in (found if layout == "list" else [found])), leaves))
    rows = zip(NEW, OLD, VERSIONS, strict=True)
    wanted = [[between(*x, interpolation == "linear") for x in zip(*row, strict=True)] for row in rows]
    for got, which in ((found, 0), (slopes if layout == "list" else slopes[0], 1)):
        for row, other in zip(read(got, layout), wanted, strict=True):
            assert row == near([x[which] for x in other])


def test_proximal_by_versions_of_sequences_and_dtypes():
    """As with the version at each token; bfloat16 gives float32."""
    new, rollout = -torch.rand(2, 3), -torch.rand(2, 3)
    each = rc.proximal(new, rollout, rc.Batch(versions=rc.Versions(torch.tensor([[1, 1, 1], [3, 3, 3]]), 5)))
    of_sequences = rc.Versions(torch.tensor([1, 3], dtype=torch.uint8), 5)
    assert torch.equal(rc.proximal(new, rollout, rc.Batch(versions=of_sequences)), each)
    packed = rc.Batch(cu_seqlens=torch.tensor([0, 3, 6]), versions=of_sequences)
    assert torch.equal(rc.proximal(new.view(-1), rollout.view(-1), packed).view(2, 3), each)
    half = rc.proximal(new.bfloat16(), rollout.bfloat16(), rc.Batch(versions=of_sequences))
    assert half.dtype == torch.float32

"""Sums for the metrics of frameworks on the kernels: those of plain torch, whose metrics tests/metrics judges."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders import judges
from builders.kernel_cases import (
    FEW,
    INTERPRETED,
    MIDDLE,
    NARROW,
    WIDE,
    between_fences,
    given,
    same,
    shaped,
    unchecked,
    watched,
)
from frozen.calls import correct_call
from rollout_corr.kernels.correct.planner import numbers_of, plan_of
from rollout_corr.metrics.schema import layout

pytestmark = INTERPRETED

C, NAN, INF = rc.Criterion, math.nan, math.inf
SCHEMES = ("native", "verl", "xtuner", "skyrl")

# Every role that a criterion can have by its label, on units that fail and units that pass.
VETO = C("ratio", lower=0.5, upper=1.9, drop="sequence", label="veto")
VETO_LOW = C("ratio", "sequence", "min", lower=0.6, label="veto_low", when="negative_advantage")
VETO_MEAN = C("ratio", "sequence", "mean", upper=1.2, label="veto_mean")
LATE = C("ratio", "sequence", "max", upper=1.1, label="veto_late", when="outward", drop="token")
OUTLIER = C("ratio", lower=0.45, upper=1.8, drop="sequence", label="outlier", token_clamp=0.7)
TOKEN_MASK = C("ratio", lower=0.8, upper=1.25, label="token_mask")
GEO_MASK = C("ratio", "sequence", "mean", lower=0.97, upper=1.03, label="geo_sequence_mask")
MASK = C("ratio", "sequence", "sum", lower=0.6, upper=1.6, label="mask")
K1 = C("ratio", lower=0.7, label="token_k1")
K2 = C("k2", upper=0.05, label="token_k2")
MEAN_K1 = C("ratio", "sequence", "mean", lower=0.9, upper=1.05, label="seq_mean_k1")
MAX_K3 = C("k3", "sequence", "max", upper=0.15, label="seq_max_k3")
AT_ONE = (
    replace(K1, lower=1.0), MAX_K3, replace(GEO_MASK, lower=1.0, upper=None), replace(VETO, upper=None),
    replace(TOKEN_MASK, drop="sequence"),
)  # fmt: skip
MIXED = (
    rc.Spec(rc.Weight.token(upper=1.2, token_clamp=0.6), (VETO, OUTLIER, TOKEN_MASK, K1, VETO_LOW, LATE)),
    rc.Spec(
        rc.Weight.product(lower=0.7, upper=1.4, outside="zero"), (VETO_MEAN, OUTLIER, K2, GEO_MASK), sums_over="kept"
    ),
    rc.Spec(rc.Weight.geometric(), (MASK, MEAN_K1, MAX_K3, VETO_MEAN), detail="full"),
    # With bounds of 1, at which lie the tokens and the sequences without any D.
    *(
        rc.Spec(replace(weight, lower=0.5, upper=1.0), AT_ONE, sums_over=sums)
        for weight, sums in (
            (rc.Weight.token(), "kept"),
            (rc.Weight.product(), "valid"),
            (rc.Weight.geometric(), "valid"),
        )
    ),
)


def assert_same_sums(call, device, shapes):
    """Require the statistics of the kernels to equal those of plain torch, and return them by name."""
    reference = call.corrected(call.spec, "torch")
    with shaped(shapes), unchecked(), watched():
        out = between_fences(call, device).corrected(call.spec, "triton")
    assert torch.equal(out.keep.cpu(), reference.keep)
    names = [name for part in layout(call.spec) for name in part]
    found, wanted = (
        dict(zip(names, torch.cat([x.statistics.sums, x.statistics.maxima]).tolist(), strict=True))
        for x in (out, reference)
    )
    wrong = {name: (found[name], x) for name, x in wanted.items() if not same(name, found[name], wanted)}
    assert wrong == {}, call.spec
    assert [list(out.metrics(scheme)) for scheme in SCHEMES] == [list(reference.metrics(scheme)) for scheme in SCHEMES]
    return found


@pytest.mark.parametrize("seed", range(12))
def test_all_schemes_at_once(seed, device):
    """Of random batches, some with broken tokens; log-ratios that float32 adds up to the last digits of their sum."""
    nonfinite = ("reject", "reject", "propagate", "neutral")[seed // 3]
    spec = replace(MIXED[seed % 6], report=SCHEMES, nonfinite=nonfinite)

    def drawn(text):
        while True:
            text += " again"
            call = correct_call(random.Random(text), spec, extras=0.0, kind=(5, 12, 9, 0, 4, 7, 3))
            columns = call.drawn.laid.tokens.columns
            d = [a - b for a, b in zip(columns["train"], columns["rollout"], strict=True)]
            if not any(100.0 < abs(x) < INF for x, valid in zip(d, call.drawn.laid.tokens.valid, strict=True) if valid):
                return call

    call = judges.for_kernels(drawn, f"schemes {seed}")
    assert_same_sums(call, device, (FEW, NARROW, MIDDLE, WIDE)[seed % 4])


# A masked token, where the row has one less.
FAR = (
    # Beyond the clamp; one token alone, one that is broken, one that is an outlier of its row.
    [[30.0, -25.0, 0.5], [-1.0], [0.5, NAN, 0.0], [0.9, 0.3, 0.0], [0.0, 0.0]],
    # Beyond what sums of D hold, and where e^D overflows in float32.
    [[-9999.0, 21.0, 0.0], [86.0, -19.0, 0.25], [-1e10, 1100.0, 100.0], [0.0, 0.0]],
)


@pytest.mark.parametrize("rows", FAR, ids=["clamped", "overflowing"])
@pytest.mark.parametrize("spec", [MIXED[0], *MIXED[3:]], ids=["mixed", "token", "product", "geometric"])
def test_far_apart(spec, rows, device):
    d = torch.tensor([row + [0.0] * (3 - len(row)) for row in rows])
    mask = torch.tensor([[i < len(row) for i in range(3)] for row in rows])
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0][: len(rows)])
    call = given(replace(spec, report=SCHEMES), d - 1.0, torch.full(d.shape, -1.0), advantages, mask=mask)
    assert_same_sums(call, device, MIDDLE)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (3, 4)])
def test_nothing_valid(shape, device):
    x = torch.zeros(shape)
    call = given(replace(MIXED[1], report=SCHEMES), x + NAN, x, mask=x)
    rows = {"skyrl/rows": shape[0], "skyrl/slots": math.prod(shape), "verl/rows": shape[0], "xtuner/rows": shape[0]}
    found = {name: x for name, x in assert_same_sums(call, device, FEW).items() if x and x != -INF}
    assert found == {name: x for name, x in rows.items() if x}


def test_labels_are_no_compile_key():
    """Beyond the role that a label names, kernels know criteria by their index alone."""
    kinds = {"packed": True, "masked": True, "advantages": None}
    kinds |= {"writes_weights": True, "writes_mask": True, "edits_mask": True}
    spec, renamed, other = (
        rc.Spec(criteria=(one, replace(VETO_MEAN, label=label)), report=SCHEMES)
        for one, label in (
            (VETO, "veto_mean"), (replace(VETO, label="veto_a", lower=0.4), "veto_b"),
            (replace(VETO, label="guard"), "veto_mean"),
        )
    )  # fmt: skip
    assert plan_of(spec, **kinds) == plan_of(renamed, **kinds) != plan_of(other, **kinds)


def test_bounds_that_are_compared_with_once_are_equal():
    """Of packed batches, in which kernels leave out the bounds of schemes that repeat those of the Spec."""
    names = ("xtuner.agentic", "skyrl.tldr", "verl.decoupled_seq_is_rs", "verl.decoupled_k3_rs_token_tis")
    kinds = {"packed": True, "masked": True, "advantages": None, "writes_weights": True, "writes_mask": True}
    found = set()
    for name in names:
        spec = replace(rc.spec(name), report=SCHEMES)
        plan, numbers = plan_of(spec, edits_mask=True, **kinds), numbers_of(spec)
        assert all(numbers[one] == numbers[other] for one, other in plan.same_numbers)
        found |= {one for one, _ in plan.same_numbers}
    assert {"xtuner/ratio/upper", "xtuner/log/token/lower", "skyrl/0/token/upper", "verl/log/upper"} <= found

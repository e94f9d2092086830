"""Metrics of the kernels under the peers' schemes, in Triton's interpreter, against the torch backend."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import rollout_corr as rc
from builders.cases import one_in
from builders.peer_metrics_cases import batch, tensors
from builders.weights import weight_of
from rollout_corr.kernels import grid
from rollout_corr.kernels.correct.planner import numbers_of, plan_of
from rollout_corr.metrics.schema import layout

C = rc.Criterion
NAN, INF = math.nan, math.inf
SCHEMES = ("native", "verl", "xtuner", "skyrl")
Row = list[tuple[float, float, bool]]

# What counts something is equal; what adds floats up may add them in another order.
COUNTS = re.compile(
    r"(^|/)(tokens|sequences|units|rows|slots|packs|means|vetoed|catastrophic|outlier|token_mask|clipped|clippable)"
    r"(_[a-z]+)*$|/(row_)?(above|below)$|/(over_high|under_low)$|^histogram"
)
# Of the larger of 1 and the value. Measured here: 2.2e-7.
TOLERANCE = 1e-6


def of_shape(monkeypatch: pytest.MonkeyPatch, rows: int, tile: int, sequences: int) -> None:
    shape = grid.Shape(tile=tile, lanes=2, sequences=sequences, chunk=2, parts=rows)
    monkeypatch.setattr(grid, "SHAPES", ((0, shape),))


def padded(rows: list[Row]) -> dict[str, Tensor]:
    return dict(zip(("train_logp", "rollout_logp", "mask"), tensors(rows, torch.float32), strict=True))


def packed(rows: list[Row]) -> dict[str, Tensor]:
    """The rows cut to different lengths, one of them empty, between tokens that belong to no sequence."""
    lengths = (5, 12, 9, 0, 4, 7, 3)
    stray = [(-1.0, -3.0, True)] * 3
    flat = [*stray, *(token for row, length in zip(rows, lengths, strict=True) for token in row[:length]), *stray]
    offsets = torch.tensor([3, *lengths]).cumsum(0)
    return {name: x[0] for name, x in padded([flat]).items()} | {"cu_seqlens": offsets}


def assert_equal(spec: rc.Spec, given: dict[str, Tensor]) -> rc.Correction:
    """Every statistic of the kernels is that of the torch backend."""
    wanted, got = (rc.correct(**given, spec=spec, backend=name) for name in ("torch", "triton"))
    assert torch.equal(got.keep, wanted.keep)
    names = [name for part in layout(spec) for name in part]
    values = [torch.cat([x.statistics.sums, x.statistics.maxima]).tolist() for x in (got, wanted)]
    found = {name: pair for name, *pair in zip(names, *values, strict=True)}

    def close(name: str, x: float, y: float) -> bool:
        if math.isnan(x) or math.isinf(x) or COUNTS.search(name):
            return x == y or (math.isnan(x) and math.isnan(y))
        return abs(x - y) <= TOLERANCE * max(1.0, abs(y))

    assert {name: pair for name, pair in found.items() if not close(name, *pair)} == {}
    for scheme in spec.report:
        assert list(got.metrics(scheme)) == list(wanted.metrics(scheme))
    return got


# Every role that a criterion can have, on units that fail and units that pass.
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

MIXED = {
    "token": rc.Spec(rc.Weight.token(upper=1.2, token_clamp=0.6), (VETO, OUTLIER, TOKEN_MASK, K1, VETO_LOW, LATE)),
    "product": rc.Spec(
        rc.Weight.product(lower=0.7, upper=1.4, outside="zero"), (VETO_MEAN, OUTLIER, K2, GEO_MASK), sums_over="kept"
    ),
    "geometric": rc.Spec(rc.Weight.geometric(), (MASK, MEAN_K1, MAX_K3, VETO_MEAN), detail="full"),
}


@pytest.mark.parametrize(
    ("name", "nonfinite"),
    one_in(2, [*((name, policy) for policy in ("reject", "propagate") for name in MIXED), ("product", "neutral")]),
)
def test_all_schemes_at_once(name: str, nonfinite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tokens that are NaN and infinite, in float32."""
    of_shape(monkeypatch, 16, 8, 4)
    rows = batch(8)
    rows[5][0], rows[5][2], rows[4][1] = (NAN, -1.0, True), (-1.0, -INF, True), (-INF, -2.0, True)
    spec = replace(MIXED[name], nonfinite=nonfinite, report=SCHEMES)
    given = packed(rows)
    if any(criterion.when != "any" for criterion in spec.criteria):
        given["advantages"] = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    assert_equal(spec, given)


@pytest.mark.parametrize("level", one_in(2, ["token", "product", "geometric"]))
def test_far_apart(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the clamp, beyond what sums of D hold, where e^D overflows in float32, and at a bound of 1."""
    of_shape(monkeypatch, 4, 16, 4)
    gaps = [[30.0, -25.0, 0.5], [-9999.0, 21.0, 0.0], [86.0, -19.0, 0.25], [-1e10, 1100.0, 100.0], [0.0, 0.0], []]
    rows = [[(-1.0 + d, -1.0, True) for d in row] + [(NAN, NAN, False)] * (3 - len(row)) for row in gaps]
    weight = weight_of(level, upper=1.0, lower=0.5)
    criteria = (replace(K1, lower=1.0), MAX_K3, replace(GEO_MASK, lower=1.0, upper=None), replace(VETO, upper=None))
    assert_equal(rc.Spec(weight, criteria, report=SCHEMES), padded(rows))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (3, 4)])
def test_nothing_valid(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    of_shape(monkeypatch, 4, 16, 4)
    nothing = {"train_logp": torch.full(shape, NAN), "rollout_logp": torch.zeros(shape), "mask": torch.zeros(shape)}
    out = assert_equal(replace(MIXED["product"], report=SCHEMES), nothing)
    values = dict(zip(layout(out.statistics.spec)[0], out.statistics.sums.tolist(), strict=True))
    assert {name: x for name, x in values.items() if x} == {
        name: float(x)
        for name, x in (
            ("skyrl/rows", shape[0]),
            ("skyrl/slots", shape[0] * shape[1]),
            ("verl/rows", shape[0]),
            ("xtuner/rows", shape[0]),
        )
        if x
    }


def test_labels_are_no_compile_key() -> None:
    """Beyond the role that a label names, kernels know criteria by their index alone."""
    kinds = {"packed": True, "masked": True, "advantages": None}
    kinds |= {"writes_weights": True, "writes_mask": True, "edits_mask": True}
    spec = rc.Spec(criteria=(VETO, VETO_MEAN), report=SCHEMES)
    renamed = rc.Spec(
        criteria=(replace(VETO, label="veto_a", lower=0.4), replace(VETO_MEAN, label="veto_b")), report=SCHEMES
    )
    other = rc.Spec(criteria=(replace(VETO, label="guard"), VETO_MEAN), report=SCHEMES)
    assert plan_of(spec, **kinds) == plan_of(renamed, **kinds)
    assert plan_of(spec, **kinds) != plan_of(other, **kinds)


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

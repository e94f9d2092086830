"""Peers' metric schemes over any split, layout and backend, and at their edges.

Their formulas are held against the frameworks' own functions: tests/conformance/test_replay.py.
"""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

import rollout_corr as rc
from builders.config_cases import option
from builders.peer_metrics_cases import ALL, CASES, batch, correct, tensors
from rollout_corr.backends import blocks
from rollout_corr.backends.read import Given, read_batch
from rollout_corr.backends.whole import run_whole
from rollout_corr.metrics import peers

INF = math.inf
LOG = math.log


def verl(**config):
    return rc.spec("verl", config)


# What xtuner takes over a whole pack.
PACK_LEVEL = re.compile("mismatch/mismatch_(training|rollout|log|ppl)_")


def assert_equal(found, expected, rtol=1e-9, atol=1e-12):
    """A spread of equal values far from the center is the root of a rounding: 2^-26 of that distance."""
    assert sorted(found) == sorted(expected)
    assert all(type(value) is float for value in found.values())
    wrong = {
        key: (found[key], value)
        for key, value in expected.items()
        if found[key] != value
        and not abs(found[key] - value) <= rtol * abs(value) + atol + (2**-26 if key.endswith("_std") else 0.0)
    }
    assert not wrong


@pytest.mark.parametrize(("scheme", "name"), ALL)
def test_blocks_parts_and_ranks_merge(scheme, name, monkeypatch):
    """Small blocks, and parts merged in any order, give the statistics of the whole; xtuner's packs apart."""
    spec, rows = CASES[scheme][name], batch(3) + batch(4)
    whole = correct(rows, spec).metrics(scheme)
    parts = [correct(rows[a:b], spec).statistics for a, b in ((9, 14), (2, 3), (0, 2), (3, 9))]
    merged = rc.Statistics.sum(parts).metrics(scheme)
    monkeypatch.setattr(blocks, "BLOCK", 30)
    assert_equal(correct(rows, spec).metrics(scheme), whole)
    pooled = {key: value for key, value in whole.items() if not PACK_LEVEL.search(key)}
    assert_equal({key: merged[key] for key in pooled}, pooled)


@pytest.mark.parametrize(("scheme", "name"), ALL)
def test_packed_and_whole(scheme, name):
    """Packed sequences have the metrics of padded ones, but for the slots that SkyRL counts; nor does it matter how."""
    spec = CASES[scheme][name]
    lengths = (5, 1, 9, 0, 4, 12, 3)
    rows = [
        [token if t < n else (math.nan, math.nan, False) for t, token in enumerate(row)]
        for row, n in zip(batch(5), lengths, strict=True)
    ]
    flat = [token for row, length in zip(rows, lengths, strict=True) for token in row[:length]]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    old, rollout, valid = (x[0] for x in tensors([flat]))
    given = rc.Batch(mask=valid, cu_seqlens=offsets)
    packed = rc.correct(old, rollout, given, spec=spec).metrics(scheme)
    of_slots = ("is_ratio_std", "is_ratio_min")
    wanted = correct(rows, spec).metrics(scheme)
    assert_equal(*({key: x for key, x in found.items() if key not in of_slots} for found in (packed, wanted)))
    assert_equal(at_once(read_batch(Given(old, rollout, given, spec)), spec).metrics(scheme), packed)
    old, rollout, valid = tensors(rows)
    padded = read_batch(Given(old, rollout, rc.Batch(mask=valid), spec))
    assert_equal(at_once(padded, spec).metrics(scheme), wanted)


def at_once(opened, spec):
    return rc.Statistics(spec, run_whole(opened, spec).statistics)


def test_xtuner_packs_are_averaged():
    """Over the packs that hold a valid token, whatever their sizes; extrema over the same."""
    spec = CASES["xtuner"]["shipped"]
    packs = [batch(1), batch(2)[:2], [batch(3)[2]], batch(4)[4:]]
    # Every gap below 0, so that the 0 of the empty pack would show as a maximum.
    packs = [[[(old + 0.4, rollout, valid) for old, rollout, valid in row] for row in pack] for pack in packs]
    merged = rc.Statistics.sum([correct(pack, spec).statistics for pack in packs]).metrics("xtuner")
    found = [correct(pack, spec).metrics("xtuner") for pack in packs]
    single = [pack for pack in found if pack["mismatch/valid"]]
    assert len(single) == 3
    for key in ("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "log_ppl_diff", "ppl_ratio"):
        key = f"mismatch/mismatch_{key}"
        assert merged[key] == pytest.approx(sum(pack[key] for pack in single) / 3, rel=1e-12)
    gaps = [pack["mismatch/mismatch_log_ppl_diff"] for pack in single]
    assert merged["mismatch/mismatch_log_ppl_abs_diff"] == pytest.approx(sum(map(abs, gaps)) / 3)
    assert merged["mismatch/mismatch_log_ppl_diff_max"] == pytest.approx(max(gaps))
    assert merged["mismatch/mismatch_log_ppl_diff_min"] == pytest.approx(min(gaps))


@pytest.mark.parametrize(("scheme", "name"), ALL)
@pytest.mark.parametrize("shape", [(0, 4), (3, 4)])
def test_nothing_valid(scheme, name, shape):
    """0 of 0 is 0 for verl and SkyRL; xtuner has values of its own."""
    nothing = torch.full(shape, math.nan)
    mask = torch.zeros(shape, dtype=torch.bool)
    found = rc.correct(nothing, nothing, mask=mask, spec=CASES[scheme][name]).metrics(scheme)
    assert not any(math.isnan(value) for value in found.values())
    assert sorted(found) == sorted(correct(batch(0), CASES[scheme][name]).metrics(scheme))
    if scheme == "verl":
        assert set(found.values()) == {0.0}


def test_verl_effective_sample_size_of_nothing_kept():
    """verl divides by zero where IcePop zeroes every weight."""
    spec = rc.Spec(weight=rc.Weight.token(lower=0.9, upper=1.1, outside="zero"), report=("verl",))
    found = rc.correct(torch.zeros(2, 3), torch.full((2, 3), -1.0), spec=spec).metrics("verl")
    assert found["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    assert found["rollout_corr/rollout_is_oob_ratio"] == 1.0


def test_verl_effective_sample_size_of_tiny_weights():
    """The guard of 1e-8 stands inside the normalization, so weights of e^-20 give more than 1; no batch mean."""
    rows = [[(-30.0, -1.0, True)] * 3, [(-29.0, -1.5, True)] * 3]
    found = correct(rows, verl(rollout_is="sequence", rollout_is_batch_normalize=True)).metrics("verl")
    guarded = (math.exp(-20) / (math.exp(-20) + 1e-8)) ** 2
    assert found["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0 / guarded, rel=1e-6)
    assert found["rollout_corr/rollout_is_batch_norm_factor"] == 1.0


@pytest.mark.parametrize("sigma", [1e-3, 1e-4])
def test_spreads_do_not_cancel(sigma):
    """In float32 verl loses these; ours come from sums around 1. D itself is rounded to 6e-8 here."""
    made = torch.Generator().manual_seed(0)
    d = sigma * torch.randn(20, 500, generator=made)
    spec = verl(rollout_is="token", rollout_rs="token_k2,token_k3", rollout_rs_threshold="1e-12,0.1")
    found = rc.correct(d - 1.0, torch.full_like(d, -1.0), spec=spec).metrics("verl")
    rounded = (d - 1.0).double() + 1.0
    spread = rounded.exp().std(correction=0).item()
    assert found["rollout_corr/rollout_is_std"] == pytest.approx(spread, rel=1e-4)
    assert found["rollout_corr/rollout_rs_token_k3_std"] == pytest.approx(
        (rounded.expm1() - rounded).std(correction=0).item(), rel=1e-3
    )


def test_spread_of_equal_values():
    """In float32: statistics that all lie at their bound, and a single token."""
    equal = torch.full((3, 50), -1.0) + 1e-3 * torch.rand(3, 50, generator=torch.Generator().manual_seed(1))
    spec = verl(rollout_rs="token_k1,token_k2", rollout_rs_threshold="0.9_1.1,0.02")
    found = rc.correct(equal - 1.0, equal + 1e-3, spec=spec).metrics("verl")
    assert max(found[f"rollout_corr/rollout_rs_token_{k}_std"] for k in ("k1", "k2")) < 1e-8
    spec = verl(rollout_is="token", rollout_rs="token_k1,token_k2", rollout_rs_threshold="0.5_2.0,1.0")
    for d in equal[0, :20]:
        single = rc.correct(d.view(1, 1) + 0.7, torch.full((1, 1), -0.4), spec=spec).metrics("verl")
        assert {value for key, value in single.items() if key.endswith("_std")} == {0.0}


def test_no_overflow():
    """The smallest ratio of verl's and xtuner's sequences is not clamped: beyond e^709 it is infinite."""
    spec = rc.Spec(weight=rc.Weight.product(upper=2.0), report=("verl", "xtuner"))
    out = rc.correct(torch.zeros(2, 3), torch.full((2, 3), -300.0), spec=spec)
    assert out.metrics("verl")["rollout_corr/rollout_is_min"] == INF
    assert out.metrics("xtuner")["mismatch/rollout_is_min"] == INF


def test_extrema_of_a_weight_with_a_sum_of_its_own():
    """With a token clamp the weight's sum is not the sum of D."""
    spec = rc.Spec(weight=rc.Weight.product(upper=9.0, token_clamp=0.1), report=("verl", "xtuner"))
    out = rc.correct(torch.tensor([[0.0, 0.0], [-1.0, -1.0]]), torch.tensor([[-1.0, -1.0], [0.0, -1.0]]), spec=spec)
    for scheme, prefix in (("verl", "rollout_corr/"), ("xtuner", "mismatch/")):
        assert out.metrics(scheme)[f"{prefix}rollout_is_max"] == pytest.approx(math.exp(0.2), rel=1e-6)
        assert out.metrics(scheme)[f"{prefix}rollout_is_min"] == pytest.approx(math.exp(-0.1), rel=1e-6)


def test_xtuner_two_sided_veto():
    """With selection by advantage the veto is two criteria; a sequence counts once, tokens on either side."""
    low = rc.Criterion("ratio", over="sequence", reduce="min", lower=0.5, when="negative_advantage", label="veto_low")
    high = rc.Criterion("ratio", over="sequence", reduce="max", upper=2.0, when="negative_advantage", label="veto_high")
    spec = rc.Spec(weight=rc.Weight.token(lower=0.5, upper=2.0), criteria=(low, high), report=("xtuner",))
    d = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, -1.0], [1.0, 1.0]])
    advantages = torch.tensor([-1.0, -1.0, -1.0, 1.0])
    found = rc.correct(d - 2.0, torch.full_like(d, -2.0), advantages=advantages, spec=spec).metrics("xtuner")
    assert found["mismatch/rollout_is_veto_fraction"] == 3 / 4
    assert found["mismatch/rollout_is_catastrophic_token_fraction"] == 6 / 8


@pytest.mark.parametrize("scheme", ["verl", "xtuner"])
def test_sums_beyond_the_clamp(scheme):
    """k3_kl is not clamped and differences do not saturate: a missing log-prob of -9999 shows in full."""
    key = {"verl": "rollout_corr/", "xtuner": "mismatch/mismatch_"}[scheme]
    spec = rc.Spec(report=(scheme,))
    d = torch.tensor([[30.0, -25.0, 0.5], [-9999.0, 21.0, 0.0]], dtype=torch.float64)
    found = rc.correct(d - 1.0, torch.full_like(d, -1.0), spec=spec).metrics(scheme)
    assert found[key + "kl"] == pytest.approx(-d.mean().item(), rel=1e-14)
    assert found[key + "k3_kl"] == pytest.approx((d.expm1() - d).mean().item(), rel=1e-14)
    row = 9978.0 / 3 if scheme == "verl" else -d.mean().item()
    assert found[key + "log_ppl_diff_max"] == pytest.approx(row, rel=1e-14)
    if scheme == "xtuner":
        assert found[key + "logprob_abs_diff"] == pytest.approx(d.abs().mean().item(), rel=1e-14)
    far = rc.correct(torch.zeros(1, 2), torch.full((1, 2), -200.0), spec=spec).metrics(scheme)
    assert far[key + "k3_kl"] == INF


def test_verl_ratio_criterion_is_reported_as_k1():
    """k1_bounds="ratio": k1 is the negated log-ratio, so its bounds are the mirrored ones."""
    ratio = rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.9, upper=1.2, label="seq_mean_k1")
    mirrored = rc.Spec(criteria=(option("seq_mean_k1", -LOG(1.2), -LOG(0.9)),), report=("verl",))
    rows = batch(6)
    found = correct(rows, rc.Spec(criteria=(ratio,), report=("verl",))).metrics("verl")
    assert_equal(found, correct(rows, mirrored).metrics("verl"))
    open_below = rc.Criterion("ratio", lower=0.0, upper=1.2, label="token_k1")
    found = correct(rows, rc.Spec(criteria=(open_below,), report=("verl",))).metrics("verl")
    assert found["rollout_corr/rollout_rs_token_k1_fraction_high"] == 0.0
    assert found["rollout_corr/rollout_rs_token_k1_fraction_low"] > 0.0


def test_other_criteria_have_no_keys_of_their_own():
    """A veto, or a label that is not what it says, counts in what is rejected and is not reported."""
    veto = rc.Criterion("ratio", lower=0.5, drop="sequence", label="veto")
    misnamed = rc.Criterion("tv", over="sequence", reduce="max", upper=1e-6, label="token_k1")
    outlier = rc.Criterion("abs", over="sequence", reduce="max", upper=0.1, label="outlier")
    mask = rc.Criterion("k2", upper=0.1, label="mask")
    spec = rc.Spec(criteria=(veto, misnamed, outlier, mask), report=("verl", "xtuner", "skyrl"))
    out = correct(batch(7), spec)
    keys = [key for key in out.metrics("verl") if "rollout_rs" in key]
    assert keys == ["rollout_corr/rollout_rs_masked_fraction", "rollout_corr/rollout_rs_seq_masked_fraction"]
    assert out.metrics("verl")[keys[0]] == 1.0 - out.metrics()["tokens_kept_fraction"]
    assert len(out.metrics("skyrl")) == 4
    assert len(out.metrics("xtuner")) == 13


@pytest.mark.parametrize(("scheme", "name"), ALL)
def test_reports_change_nothing_else(scheme, name):
    """Weights, mask and native metrics are the same with and without a report."""
    spec = CASES[scheme][name]
    arguments = {field: getattr(spec, field) for field in ("weight", "criteria", "sums_over")}
    plain, reported = correct(batch(8), rc.Spec(**arguments)), correct(batch(8), spec)
    assert reported.metrics() == plain.metrics()
    assert torch.equal(reported.mask, plain.mask)
    names = [name for part in peers.columns(spec, [item.label for item in spec.criteria]) for name in part]
    assert len(set(names)) == len(names)
    assert all(name.startswith(f"{scheme}/") for name in names)


@pytest.mark.parametrize(("scheme", "name"), ALL)
@pytest.mark.parametrize("nonfinite", ["reject", "neutral", "propagate"])
def test_nonfinite_tokens(scheme, name, nonfinite):
    """Rejected they are like invalid ones in what is measured, read as D = 0 they count; nothing raises."""
    plain = CASES[scheme][name]
    spec = dataclasses.replace(plain, nonfinite=nonfinite)
    rows = batch(9)
    at = [i for i, (_, _, valid) in enumerate(rows[5]) if valid]
    left, neutral = [list(row) for row in rows], [list(row) for row in rows]
    for i, bad in zip(at, (math.nan, math.inf, -math.inf), strict=False):
        rows[5][i] = (bad, -1.0, True)
        left[5][i], neutral[5][i] = (0.0, 0.0, False), (0.0, 0.0, True)
    found = correct(rows, spec).metrics(scheme)
    if nonfinite == "propagate":
        assert any(math.isnan(value) or math.isinf(value) for value in found.values())
        return
    assert not any(math.isnan(value) for value in found.values())
    expected = correct(left if nonfinite == "reject" else neutral, plain).metrics(scheme)
    # What is rejected is a share of all valid tokens and sequences, and the sequence itself is rejected.
    shares = ("masked_fraction", "catastrophic_token_fraction") if nonfinite == "reject" else ()
    assert_equal(*({key: x for key, x in metrics.items() if not key.endswith(shares)} for metrics in (found, expected)))


@pytest.mark.parametrize(("scheme", "name"), ALL)
def test_each_key_is_explained(scheme, name):
    out = correct(batch(3), CASES[scheme][name])
    for key, value in out.metrics(scheme).items():
        assert out.explain(key).startswith(f"{key} = {value:.6g}"), key

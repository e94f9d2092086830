"""Batches, bytes, contenders that agree, and the gate that refuses a wrong result."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from benchmarks.cases import batches, gate, operations
from benchmarks.cases import contender as names
from benchmarks.cases import contenders as everybody
from benchmarks.cases.batches import CASES, Case, both_layouts, lengths_of, make
from benchmarks.cases.contender import BY_HAND, EAGER, OURS, VERL, Outcome
from benchmarks.cases.operations import BOTH, METRICS, TOKEN, WORKLOADS, bytes_per_slot
from builders.trl_loss import loss_of_trl


def tiny(name):
    return make(CASES[name].tiny())


def outcomes(batch, operation):
    """Results of all contenders that need no compiler."""
    found = everybody.contenders(batch, operation)
    return {who.name: who.whole() for who in found if who.whole is not None and not who.slow}


# --- batches and bytes ------------------------------------------------------------------------------------------------


def test_both_layouts():
    padded, packed = both_layouts(24, 300).values()
    assert padded.mask.dtype == torch.int64 and padded.old.dtype == torch.float32 and packed.padded is padded
    assert torch.equal(padded.mask.sum(1), padded.lengths)
    assert padded.lengths.min() >= 30 and padded.lengths.max() <= 300
    rows = zip(padded.old, padded.lengths.tolist(), strict=True)
    assert torch.equal(packed.old, torch.cat([row[:n] for row, n in rows]))
    assert packed.cu_seqlens.tolist() == [0, *padded.lengths.cumsum(0).tolist()]
    again = both_layouts(24, 300)["padded"]
    assert torch.equal(again.old, padded.old) and torch.equal(again.rollout, padded.rollout)


def test_a_batch_of_verls_driver_is_a_quarter_full():
    assert (1024, 8192) in batches.SHAPES
    assert both_layouts(1024, 8192)["packed"].slots / (1024 * 8192) == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case):
    for wanted in (case, case.tiny()):
        lengths = lengths_of(wanted, 0)
        assert lengths.shape == (wanted.sequences,) and lengths.min() >= 1
        if wanted.packed:
            assert lengths.sum() == wanted.tokens
        else:
            assert lengths.max() <= wanted.shape[1]
            # Rounded to whole tokens, and cut at the width.
            assert 0.8 * wanted.fill <= lengths.sum() / wanted.tokens <= wanted.fill + 0.01
    batch = make(case.tiny())
    assert batch.old.dtype == batch.new.dtype == case.logp and batch.new.requires_grad
    assert batch.mask.dtype == case.mask and batch.tokens > 0
    again, another = make(case.tiny()), make(case.tiny(), seed=1)
    assert torch.equal(again.old, batch.old) and not torch.equal(another.old, batch.old)


def test_where_the_mask_lies():
    row = tiny("SkyRL's row")
    n = int(row.lengths[0])
    assert row.mask[0].tolist() == [0.0] * (96 - n) + [1.0] * n
    rows = tiny("1024 x 8192 at 25 %")
    assert [int(n) for n in rows.mask.sum(1)] == rows.lengths.tolist() and bool(rows.mask[:, 0].all())
    pack = tiny("xtuner's pack")
    first, last = pack.mask[: pack.cu_seqlens[1]], pack.mask[pack.cu_seqlens[-2] :]
    prompt = int(0.2 * first.numel())
    assert first.tolist() == [False] * prompt + [True] * (first.numel() - prompt)
    assert last.numel() == batches.PAD and not last.any()


def test_scaling_changes_one_thing():
    tokens = batches.by_tokens(1 << 26)
    assert [case.tokens for case in tokens][:2] == [1 << 10, 1 << 12] and tokens[-1].tokens == 1 << 26
    assert {case.tokens // case.sequences for case in tokens} == {512}
    sequences = batches.by_sequences(1 << 22)
    assert {case.tokens for case in sequences} == {1 << 22} and sequences[-1].sequences == 100_000
    skews = batches.by_skew(1 << 20)
    assert len({(case.tokens, case.sequences) for case in skews}) == 1
    longest = [int(lengths_of(case, 0).max()) for case in skews]
    assert longest == sorted(longest) and longest[-1] > 50 * longest[0]


BYTES = {
    ("16M", "METRICS"): 4 + 4 + 1,
    ("16M", "TOKEN"): 4 + 4 + 1 + 4 + 1,
    ("16M", "PRODUCT"): 4 + 4 + 1 + 4,
    ("16M, bf16", "TOKEN"): 2 + 2 + 1 + 4 + 1,
    ("2048 x 8192, int64", "METRICS"): 4 + 4 + 8,
    ("2048 x 8192, int64", "TOKEN"): 4 + 4 + 8 + 4 + 8,
    ("xtuner's pack", "XTUNER"): 4 + 4 + 1 + 4 + 1,
    ("SkyRL's row", "SKYRL"): 4 + 4 + 4 + 4 + 4,
    ("16M", "FORWARD"): 4 + 4 + 4 + 1 + 4 + 1,
    ("16M", "BACKWARD"): 4 + 4,
    ("16M", "BOTH"): 4 + 4 + 4 + 1 + 4 + 1 + 4,
    ("16M, bf16", "BOTH"): 2 + 2 + 4 + 1 + 4 + 1 + 2,
    ("SkyRL's row", "SKYRL_STEP"): 4 + 4 + 4 + 4 + 4 + 4,
    # Without a mask nothing is read, and one of bool is written where tokens can be rejected.
    (None, "METRICS"): 4 + 4,
    (None, "TOKEN"): 4 + 4 + 4 + 1,
    (None, "FORWARD"): 4 + 4 + 4 + 4 + 1,
}


@pytest.mark.parametrize(("case", "operation"), BYTES)
def test_bytes(case, operation):
    batch = make(Case("", 64, 2, mask=None)) if case is None else tiny(case)
    expected, operation = BYTES[case, operation], getattr(operations, operation)
    assert bytes_per_slot(batch, operation) == expected
    assert operations.required_bytes(batch, operation) == expected * batch.slots
    assert case is not None or batch.tokens == 64


# --- contenders compute the same --------------------------------------------------------------------------------------


def test_contenders_of_the_plan_agree():
    seen = set()
    for case, operation in operations.planned(tiny=True):
        batch = make(case)
        found = outcomes(batch, operation)
        if len(found) > 1:
            assert gate.check(batch, operation, found) == {}
            seen |= set(found)
    assert {BY_HAND, names.XTUNER, names.XTUNER_ONCE, names.SKYRL, names.TRL} <= seen


def test_by_hand_agrees_on_the_cpu():
    for batch in both_layouts(24, 300).values():
        for workload in WORKLOADS:
            assert gate.check(batch, workload, outcomes(batch, workload)) == {}


def test_contenders_with_a_compiler():
    wanted = list(operations.planned(True, plan=operations.TRACED))
    parts = [("32k in 256", ""), ("32k in 256", "both"), ("16M", ""), ("16M", "both")]
    assert [(case.name, one.part) for case, one in wanted] == parts
    for case, operation in wanted:
        there = everybody.with_compiler(make(case), operation)
        assert [who.name for who in there] == [OURS, EAGER, names.TRACED]
        assert [who.slow for who in there] == [False, False, True]


def wild(packed):
    """Half of the sequences beyond every bound: of weights, of tokens, of outliers, of the veto, of all clips."""
    mask = torch.bool if packed else torch.float32
    batch = make(Case("", 24 * 64, 24, packed=packed, skew=0.0, fill=0.7, left=True, mask=mask))
    generator = torch.Generator().manual_seed(1)
    shape = (24, 64)
    strength = torch.tensor([0.0] * 12 + [0.3] * 6 + [1.5] * 6)[:, None]
    gap = (strength * torch.randn(shape, generator=generator)).clamp(-4.0, 4.0)
    # Whole rows near 1, some of which pass the geometric mask of SkyRL.
    gap += torch.linspace(-0.02, 0.02, 24)[:, None]
    gap[-1, -3], gap[-2, -3] = 12.0, -12.0
    old = batch.rollout - gap.view(batch.rollout.shape)
    new = old + torch.randn(shape, generator=generator).view(old.shape)
    return replace(batch, old=old, new=new.detach().requires_grad_())


PADDED = ("SKYRL", "SKYRL_STEP", "TRL", "TRL_LOSS")


@pytest.mark.parametrize("name", [*PADDED, "XTUNER", "XTUNER_LOSS", "TOKEN", "BOTH"])
def test_contenders_agree_beyond_all_bounds(name):
    operation = getattr(operations, name)
    batch = wild(packed=name not in PADDED)
    found = outcomes(batch, operation)
    assert len(found) > 1 and gate.check(batch, operation, found) == {}
    metrics, weights = found[OURS].metrics, found[OURS].weights
    some = {
        "XTUNER": ("mismatch/rollout_is_veto_fraction", "mismatch/rollout_is_seq_masked_fraction"),
        "SKYRL": (
            *("outlier_seq_over_high_ratio", "outlier_seq_under_low_ratio", "token_mask_ratio"),
            *("geo_sequence_mask_over_high_ratio", "geo_sequence_mask_under_low_ratio"),
        ),
        "BOTH": ("clip_low_fraction", "clip_high_fraction", "clip_dual_fraction"),
        "XTUNER_LOSS": ("clip_low_fraction", "clip_high_fraction", "clip_dual_fraction"),
        "TRL_LOSS": ("clip_low_fraction", "clip_high_fraction"),
    }
    assert all(0.0 < metrics[key] < 1.0 for key in some.get(name, ())), metrics
    if name == "XTUNER":
        assert metrics["mismatch/rollout_is_ratio_fraction_low"] > 0.0
        assert metrics["mismatch/rollout_is_veto_fraction"] < metrics["mismatch/rollout_is_seq_masked_fraction"]
    if name == "TRL":
        assert 0.0 < float((weights.amax(1) == 0).float().mean()) < 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_our_reference_compiles_whole():
    """Our reference under torch.compile, which is timed, has no graph break.

    A correction on the meta device takes the path of a GPU; on the CPU a compiler gets the operator instead.
    """
    held = tiny("32k in 256")
    how = {"fullgraph": True, "backend": "aot_eager"}
    tensors = {name: getattr(held, name).to("meta") for name in ("old", "rollout", "mask", "cu_seqlens")}
    weights, mask, *_ = everybody.traced_correct(replace(held, **tensors), TOKEN, **how).on_device()
    assert weights.shape == held.old.shape and mask.dtype == torch.bool
    traced = everybody.traced_loss(held, BOTH, **how)
    ours = everybody.contenders(held, BOTH)[0]
    assert gate.check(held, BOTH, {OURS: ours.whole(), names.TRACED: traced.whole()}) == {}


@pytest.mark.peers
def test_verl_agrees():
    """verl's own correction and its own loss pass the gate that lets them be timed."""
    for case, wanted in (
        ("1024 x 8192 at 25 %", (METRICS, TOKEN)),
        ("2048 x 8192, int64", (operations.FORWARD, operations.BACKWARD, BOTH)),
    ):
        batch = tiny(case)
        for operation in wanted:
            found = outcomes(batch, operation)
            assert VERL in found and gate.check(batch, operation, found) == {}


@pytest.mark.peers
def test_the_restated_loss_is_trls():
    operation = operations.TRL_LOSS
    for batch in (tiny("TRL's batch"), wild(packed=False)):
        theirs, mine = (
            loss_of_trl(batch, everybody.corrected(batch, operation.spec)),
            outcomes(batch, operation)[names.TRL],
        )
        assert theirs.value.item() == pytest.approx(mine.value.item())
        torch.testing.assert_close(theirs.gradient, mine.gradient)
        assert theirs.metrics.pop("entropy") == 0.0 and theirs.metrics == pytest.approx(mine.metrics)


# --- the gate ---------------------------------------------------------------------------------------------------------


def metric(key, value):
    return lambda out: out._replace(metrics={**out.metrics, key: value(out.metrics.get(key))})


OF_CORRECT = {
    "a wrong weight": lambda out: out._replace(weights=out.weights * 1.001),
    "half weights": lambda out: out._replace(weights=out.weights.half()),
    "no weights": lambda out: out._replace(weights=None),
    "weights at invalid tokens": lambda out: out._replace(weights=out.weights + 1e-3 * (out.weights == 0)),
    "a wrong mask": lambda out: out._replace(mask=torch.zeros_like(out.mask)),
    "no mask": lambda out: out._replace(mask=None),
    "a mask at invalid tokens": lambda out: out._replace(mask=out.mask | (out.weights == 0)),
    "a wrong metric": metric("logratio_std", lambda x: 1.01 * x),
    "a metric that is NaN": metric("logratio_mean", lambda x: math.nan),
    "a metric too many": metric("mine", lambda x: 1.0),
    "a metric too few": lambda out: out._replace(
        metrics={k: v for k, v in out.metrics.items() if k != "sequence_ppl_ratio_mean"}
    ),
}
OF_LOSS = {
    "a wrong value": lambda out: out._replace(value=out.value * 1.01),
    "no gradient": lambda out: out._replace(gradient=None),
    "a wrong gradient": lambda out: out._replace(gradient=out.gradient * 1.001),
    "a gradient that is NaN": lambda out: out._replace(gradient=out.gradient / 0.0),
    "no metric of ours": lambda out: out._replace(metrics={"mine": 1.0}),
}


@pytest.mark.parametrize("wrong", [*OF_CORRECT, *OF_LOSS])
def test_gate(wrong):
    """A peer that is wrong is named; a reference that is wrong stops everything; so does ours."""
    operation, spoil = (TOKEN, OF_CORRECT[wrong]) if wrong in OF_CORRECT else (BOTH, OF_LOSS[wrong])
    batch = tiny("1M")
    found = outcomes(batch, operation)
    del found[EAGER]
    spoiled = spoil(found[BY_HAND])
    refused = gate.check(batch, operation, {**found, "a third": found[OURS], BY_HAND: spoiled})
    assert list(refused) == [BY_HAND] and BY_HAND in refused[BY_HAND]
    for changed, words in (
        ({BY_HAND: spoiled}, "nobody agrees"),
        ({EAGER: spoiled}, None),
        ({OURS: spoil(found[OURS])}, None),
    ):
        with pytest.raises(gate.WrongResult, match=words):
            gate.check(batch, operation, {**found, **changed})
    with pytest.raises(gate.WrongResult, match="nobody agrees"):
        gate.check(batch, operation, {OURS: found[OURS]})


@pytest.mark.parametrize(("distance", "accepted"), [(0.0, True), (1e-3, False)])
def test_at_a_clip_either_gradient_is_right(distance, accepted):
    batch = tiny("1M")
    at = tuple(batch.valid.nonzero()[0].tolist())
    new = batch.new.detach().clone()
    new[at] = batch.old[at] + math.log(1.0 + BOTH.surrogate.high) + distance
    batch = replace(batch, new=new.requires_grad_())
    found = outcomes(batch, BOTH)
    gradient = found[BY_HAND].gradient.clone()
    gradient[at] += gradient.abs().max()
    found[BY_HAND] = found[BY_HAND]._replace(gradient=gradient)
    assert (gate.check(batch, BOTH, found) == {}) == accepted


@pytest.mark.parametrize(("distance", "accepted"), [(1e-8, True), (1e-5, False)])
@pytest.mark.parametrize("layout", batches.LAYOUTS)
def test_near_a_bound_either_mask_is_right(layout, distance, accepted):
    """The mean of D of the first sequence lies so near a bound that fp32 decides; our own definition must agree."""
    batch = both_layouts(24, 300)[layout]
    found = {name: out._replace(metrics=None) for name, out in outcomes(batch, TOKEN).items() if name != EAGER}
    n = int(batch.lengths[0])
    first = (0, slice(n)) if layout == "padded" else slice(n)
    old, rollout = batch.old.double(), batch.rollout.double()
    old[first] += operations.log_bounds(operations.GEOMETRIC)[1] - distance - (old[first] - rollout[first]).mean()
    # float64, so that the mean stays where it is put.
    moved = replace(batch, old=old, rollout=rollout)
    mask = found[OURS].mask.clone()
    mask[first] = 0 if mask[first].any() else 1
    assert gate.check(moved, TOKEN, found) == {}
    other = found[OURS]._replace(mask=mask)
    wrong = gate.check(moved, TOKEN, {**found, "a third": found[OURS], BY_HAND: other})
    assert (BY_HAND not in wrong) if accepted else ("the mask differs" in wrong[BY_HAND])
    with pytest.raises(gate.WrongResult, match="the mask differs"):
        gate.check(moved, TOKEN, {**found, EAGER: other})


def test_one_token_of_other_criteria():
    """One token of the mask is nothing where a peer decides in fp32, and everything in our own definition."""
    batch, operation = make(Case("", 8192, 16)), operations.XTUNER
    found = outcomes(batch, operation)
    mask = found[OURS].mask.clone()
    mask[int(mask.int().argmax())] = False
    other = found[OURS]._replace(mask=mask)
    assert gate.check(batch, operation, {**found, names.XTUNER: other}) == {}
    with pytest.raises(gate.WrongResult, match="differs from ours at 1 of"):
        gate.check(batch, operation, {**found, EAGER: other})


def test_verls_metrics_are_compared_with_verls():
    batch = both_layouts(4, 32)["padded"]
    keys = {f"rollout_corr/{key}": native for key, native in gate.VERL_KEYS.items()}
    found = {
        who.name: who.whole() for who in everybody.on_cpu(batch, METRICS) if who.name in (OURS, names.VERL_METRICS)
    }
    verl = Outcome(mask=batch.mask, metrics={key: found[OURS].metrics[native] for key, native in keys.items()})
    found[names.VERL_METRICS] = found[names.VERL_METRICS]._replace(metrics=dict(verl.metrics))
    assert gate.check(batch, METRICS, {**found, VERL: verl}) == {}
    off = {**verl.metrics, "rollout_corr/kl": 1.0}
    wrong = found[names.VERL_METRICS]._replace(metrics=off)
    assert list(gate.check(batch, METRICS, {**found, VERL: verl, names.VERL_METRICS: wrong})) == [names.VERL_METRICS]
    assert rc.spec(operations.IN_VERL[METRICS.spec][1]).weight is None

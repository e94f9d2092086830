"""Batches, bytes, contenders that agree, and the gate that refuses a wrong result."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.cases import batches, gate, operations
from benchmarks.cases import contenders as everybody
from benchmarks.cases.batches import CASES, Case, both_layouts, lengths_of, make
from benchmarks.cases.contender import BY_HAND, EAGER, OURS, VERL, VERL_METRICS, Outcome
from benchmarks.cases.operations import BOTH, METRICS, TOKEN, WORKLOADS, bytes_per_slot
from benchmarks.peers import by_hand


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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case):
    lengths, batch = lengths_of(case, 0), make(case.tiny())
    assert lengths.shape == (case.sequences,) and lengths.min() >= 1
    assert lengths.sum() == case.tokens or (not case.packed and lengths.max() <= case.shape[1])
    # Rounded to whole tokens, and cut at the width.
    assert case.packed or 0.8 * case.fill <= lengths.sum() / case.tokens <= case.fill + 0.01
    assert batch.old.dtype == case.logp and batch.mask.dtype == case.mask and batch.tokens > 0


def test_where_the_mask_lies():
    row = tiny("SkyRL's row")
    n = int(row.lengths[0])
    assert row.mask[0].tolist() == [0.0] * (96 - n) + [1.0] * n
    pack = tiny("xtuner's pack")
    first, last = pack.mask[: pack.cu_seqlens[1]], pack.mask[pack.cu_seqlens[-2] :]
    prompt = int(0.2 * first.numel())
    assert first.tolist() == [False] * prompt + [True] * (first.numel() - prompt)
    assert last.numel() == batches.PAD and not last.any()


@pytest.mark.parametrize("seed", [0, 18])
def test_a_batch_of_one_sequence_is_not_rejected_whole(seed):
    """At full size, where the mean D of 1,024 tokens would be beyond a bound: the gate refuses a gradient of zeros."""
    row = make(CASES["SkyRL's row"], seed=seed)
    assert gate.check(row, BOTH, outcomes(row, BOTH)) == {}


BYTES = {
    ("16M", "METRICS"): 4 + 4 + 1,
    ("16M", "TOKEN"): 4 + 4 + 1 + 4 + 1,
    ("16M, bf16", "TOKEN"): 2 + 2 + 1 + 4 + 1,
    ("2048 x 8192, int64", "TOKEN"): 4 + 4 + 8 + 4 + 8,
    ("16M, bf16", "BOTH"): 2 + 2 + 4 + 1 + 4 + 1 + 2,
    # Without a mask nothing is read, and one of bool is written where tokens can be rejected.
    (None, "TOKEN"): 4 + 4 + 4 + 1,
    (None, "BOTH"): 4 + 4 + 4 + 4 + 1 + 4,
}


@pytest.mark.parametrize(("case", "operation"), BYTES)
def test_bytes(case, operation):
    batch = make(Case("", 64, 2, mask=None)) if case is None else tiny(case)
    assert bytes_per_slot(batch, getattr(operations, operation)) == BYTES[case, operation]


# --- contenders compute the same --------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", [METRICS, TOKEN, BOTH], ids=lambda x: x.name)
@pytest.mark.parametrize("case", ["32k in 256", "SkyRL's row"])
def test_contenders_agree(case, operation):
    found = outcomes(tiny(case), operation)
    assert {OURS, EAGER, BY_HAND} <= set(found) and gate.check(tiny(case), operation, found) == {}


def test_by_hand_agrees_on_the_cpu():
    for batch in both_layouts(24, 300).values():
        for workload in WORKLOADS:
            assert gate.check(batch, workload, outcomes(batch, workload)) == {}


def test_by_hand_in_short_is_the_same_with_fewer_metrics():
    batch = both_layouts(24, 300)["padded"]
    mask, clip = batch.mask.bool(), (0.2, 0.2, 3.0)
    *wanted, metrics = by_hand.correct(batch.old, batch.rollout, mask, None, TOKEN.spec)
    *found, few = by_hand.correct_in_short(batch.old, batch.rollout, mask, None, TOKEN.spec)
    torch.testing.assert_close(found[0], wanted[0])
    assert found[1].equal(wanted[1].bool())
    assert by_hand.on_host(few) == pytest.approx({name: float(metrics[name]) for name in few}, rel=1e-4)
    given = batch.new, batch.old, batch.advantages, mask, wanted[0], clip
    (value, metrics), (short, few) = by_hand.policy_loss(*given), by_hand.policy_loss_in_short(*given)
    torch.testing.assert_close(short, value)
    assert by_hand.on_host(few) == pytest.approx({name: float(metrics[name]) for name in few}, rel=1e-4, abs=1e-6)


@pytest.mark.peers
def test_verl_agrees():
    """verl's own correction and its own loss pass the gate that lets them be timed."""
    for case, wanted in (("1024 x 8192 at 25 %", (METRICS, TOKEN)), ("2048 x 8192, int64", (BOTH,))):
        batch = tiny(case)
        for operation in wanted:
            found = outcomes(batch, operation)
            assert VERL in found and gate.check(batch, operation, found) == {}


# --- the gate ---------------------------------------------------------------------------------------------------------


def metric(key, value):
    return lambda out: out._replace(metrics={**out.metrics, key: value(out.metrics.get(key))})


OF_CORRECT = {
    "a wrong weight": lambda out: out._replace(weights=out.weights * 1.001),
    "half weights": lambda out: out._replace(weights=out.weights.half()),
    "no weights": lambda out: out._replace(weights=None),
    "a wrong mask": lambda out: out._replace(mask=torch.zeros_like(out.mask)),
    "a mask at invalid tokens": lambda out: out._replace(mask=out.mask | (out.weights == 0)),
    "a wrong metric": metric("logratio_std", lambda x: 1.01 * x),
    "a metric that is NaN": metric("logratio_mean", lambda x: math.nan),
    "a metric too many": metric("mine", lambda x: 1.0),
}
OF_LOSS = {
    "a wrong value": lambda out: out._replace(value=out.value * 1.01),
    "no gradient": lambda out: out._replace(gradient=None),
    "a wrong gradient": lambda out: out._replace(gradient=out.gradient * 1.001),
    "a gradient that is NaN": lambda out: out._replace(gradient=out.gradient / 0.0),
}


@pytest.mark.parametrize("wrong", [*OF_CORRECT, *OF_LOSS])
def test_gate(wrong):
    """A peer that is wrong is named; a reference that is wrong stops everything; so does ours."""
    operation, spoil = (TOKEN, OF_CORRECT[wrong]) if wrong in OF_CORRECT else (BOTH, OF_LOSS[wrong])
    batch = tiny("32k in 256")
    found = outcomes(batch, operation)
    del found[EAGER]
    spoiled = spoil(found[BY_HAND])
    refused = gate.check(batch, operation, {**found, "a third": found[OURS], BY_HAND: spoiled})
    assert list(refused) == [BY_HAND] and BY_HAND in refused[BY_HAND]
    for changed in ({BY_HAND: spoiled}, {EAGER: spoiled}, {OURS: spoil(found[OURS])}):
        with pytest.raises(gate.WrongResult):
            gate.check(batch, operation, {**found, **changed})


@pytest.mark.parametrize(("distance", "accepted"), [(0.0, True), (1e-3, False)])
def test_at_a_clip_either_gradient_is_right(distance, accepted):
    batch = tiny("32k in 256")
    at = tuple(batch.valid.nonzero()[0].tolist())
    new = batch.new.detach().clone()
    new[at] = batch.old[at] + math.log(1.0 + BOTH.surrogate.high) + distance
    batch = replace(batch, new=new.requires_grad_())
    found = outcomes(batch, BOTH)
    gradient = found[BY_HAND].gradient.clone()
    gradient[at] += gradient.abs().max()
    found[BY_HAND] = found[BY_HAND]._replace(gradient=gradient)
    assert (gate.check(batch, BOTH, found) == {}) == accepted


def test_verls_metrics_are_compared_with_verls():
    batch = both_layouts(4, 32)["padded"]
    found = {who.name: who.whole() for who in everybody.on_cpu(batch, METRICS) if who.name in (OURS, VERL_METRICS)}
    verl = Outcome(mask=batch.mask, metrics=dict(found[VERL_METRICS].metrics))
    assert gate.check(batch, METRICS, {**found, VERL: verl}) == {}
    wrong = found[VERL_METRICS]._replace(metrics={**verl.metrics, "rollout_corr/kl": 1.0})
    assert list(gate.check(batch, METRICS, {**found, VERL: verl, VERL_METRICS: wrong})) == [VERL_METRICS]

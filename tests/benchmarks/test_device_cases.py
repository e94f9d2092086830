"""What the device benchmark measures: batches, bytes, and the gate that lets no wrong result through."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.benchmark_folder import compiled_ones_left_out, load, tiny

pytestmark = pytest.mark.usefixtures("benchmarks")


# --- batches and bytes ---


def test_batches():
    batches = load("batches")
    for case in batches.CASES:
        for wanted in (case, case.tiny()):
            lengths = batches.lengths_of(wanted, 0)
            assert lengths.shape == (wanted.sequences,) and lengths.min() >= 1
            if wanted.packed:
                assert lengths.sum() == wanted.tokens
            else:
                assert lengths.max() <= wanted.shape[1]
                # Rounded to whole tokens, and cut at the width.
                assert 0.8 * wanted.fill <= lengths.sum() / wanted.tokens <= wanted.fill + 0.01
        batch = batches.make(case.tiny())
        assert batch.old.dtype == batch.new.dtype == case.logp and batch.new.requires_grad
        assert batch.mask.dtype == case.mask and batch.valid_tokens == int(batch.valid.sum()) > 0
        again, another = batches.make(case.tiny()), batches.make(case.tiny(), seed=1)
        assert torch.equal(again.old, batch.old) and not torch.equal(another.old, batch.old)


def test_where_the_mask_lies():
    batches = load("batches")
    row = batches.make(tiny("SkyRL's row"))
    n = int(row.lengths[0])
    assert row.mask[0].tolist() == [0.0] * (96 - n) + [1.0] * n
    rows = batches.make(tiny("1024 x 8192 at 25 %"))
    assert [int(n) for n in rows.mask.sum(1)] == rows.lengths.tolist() and bool(rows.mask[:, 0].all())
    pack = batches.make(tiny("xtuner's pack"))
    first, last = pack.mask[: pack.cu_seqlens[1]], pack.mask[pack.cu_seqlens[-2] :]
    prompt = int(0.2 * first.numel())
    assert first.tolist() == [False] * prompt + [True] * (first.numel() - prompt)
    assert last.numel() == batches.PAD and not last.any()


def test_scaling_changes_one_thing():
    batches = load("batches")
    tokens = batches.by_tokens(1 << 26)
    assert [case.tokens for case in tokens][:2] == [1 << 10, 1 << 12] and tokens[-1].tokens == 1 << 26
    assert {case.tokens // case.sequences for case in tokens} == {512}
    sequences = batches.by_sequences(1 << 22)
    assert {case.tokens for case in sequences} == {1 << 22} and sequences[-1].sequences == 100_000
    skews = batches.by_skew(1 << 20)
    assert len({(case.tokens, case.sequences) for case in skews}) == 1
    longest = [int(batches.lengths_of(case, 0).max()) for case in skews]
    assert longest == sorted(longest) and longest[-1] > 50 * longest[0]


BYTES = {
    ("16M", "METRICS"): 4 + 4 + 1,
    ("16M", "TOKEN"): 4 + 4 + 1 + 4 + 1,
    ("16M", "PRODUCT"): 4 + 4 + 1 + 4,
    ("16M, bf16", "TOKEN"): 2 + 2 + 1 + 4 + 1,
    ("2048 x 8192, int64", "TOKEN"): 4 + 4 + 8 + 4 + 8,
    ("xtuner's pack", "XTUNER"): 4 + 4 + 1 + 4 + 1,
    ("SkyRL's row", "SKYRL"): 4 + 4 + 4 + 4 + 4,
    ("16M", "FORWARD"): 4 + 4 + 4 + 1 + 4 + 1,
    ("16M", "BACKWARD"): 4 + 4,
    ("16M", "BOTH"): 4 + 4 + 4 + 1 + 4 + 1 + 4,
    ("16M, bf16", "BOTH"): 2 + 2 + 4 + 1 + 4 + 1 + 2,
    ("SkyRL's row", "SKYRL_STEP"): 4 + 4 + 4 + 4 + 4 + 4,
}


@pytest.mark.parametrize(("case", "operation"), BYTES)
def test_bytes(case, operation):
    operations = load("operations")
    batch = load("batches").make(tiny(case))
    expected = BYTES[case, operation]
    assert operations.bytes_per_slot(batch, getattr(operations, operation)) == expected
    assert operations.required_bytes(batch, getattr(operations, operation)) == expected * batch.slots


def test_bytes_without_a_mask():
    """Nothing is read, and one of bool is written where tokens can be rejected."""
    operations = load("operations")
    batch = load("batches").make(load("batches").Case("", "", 64, 2, mask=None))
    assert batch.mask is None and batch.valid_tokens == 64
    assert operations.bytes_per_slot(batch, operations.METRICS) == 4 + 4
    assert operations.bytes_per_slot(batch, operations.TOKEN) == 4 + 4 + 4 + 1
    assert operations.bytes_per_slot(batch, operations.FORWARD) == 4 + 4 + 4 + 4 + 1


# --- who computes the same ---


def test_everybody_in_the_plan_computes_the_same():
    """By hand, and the restated operations of xtuner and SkyRL, against ours: weights, masks, losses, metrics."""
    batches, gate, names = load("batches"), load("device_gate"), load("device_contenders")
    seen = set()
    for name, wanted in load("operations").PLAN:
        batch = batches.make(tiny(name))
        for operation in wanted:
            found = {who.name: who.whole() for who in compiled_ones_left_out(batch, operation) if who.whole is not None}
            if len(found) > 1:
                assert gate.check(batch, operation, found) == {}
                seen |= set(found)
    assert {names.BY_HAND, names.XTUNER, names.XTUNER_ONCE, names.SKYRL, names.TRL_RESTATED} <= seen


def test_baselines_of_losses():
    """xtuner's, SkyRL's and TRL's own loss are each beside one of ours."""
    batches, operations, names = load("batches"), load("operations"), load("device_contender")
    for case, operation, name in (
        ("xtuner's pack", operations.XTUNER_LOSS, names.XTUNER),
        ("SkyRL's row", operations.SKYRL_STEP, names.SKYRL),
        ("TRL's batch", operations.TRL_LOSS, names.TRL_RESTATED),
        ("TRL's batch", operations.TRL_LOSS, names.TRL),
    ):
        assert (case, operation) in [(wanted, one) for wanted, some in operations.PLAN for one in some]
        there = load("device_contenders").contenders(batches.make(tiny(case)), operation)
        assert name in [who.name for who in there]


def test_everybody_who_compiles():
    """Ours, and our reference with and without torch.compile, for what is planned."""
    batches, gpu, names = load("batches"), load("gpu"), load("device_contender")
    wanted = list(gpu.plan(True, None, load("operations").TRACED))
    assert [(case.name, one.part) for case, one in wanted] == [
        ("32k in 256", ""), ("32k in 256", "both"), ("16M", ""), ("16M", "both")
    ]  # fmt: skip
    for case, operation in wanted:
        there = load("device_contenders").with_compiler(batches.make(case), operation)
        assert [who.name for who in there] == [names.OURS, names.EAGER, names.TRACED]
        assert [who.slow for who in there] == [False, False, True]


def wild(packed):
    """Half of the sequences beyond every bound: of weights, of tokens, of outliers, of the veto, of all clips."""
    batches = load("batches")
    mask = torch.bool if packed else torch.float32
    batch = batches.make(batches.Case("", "", 24 * 64, 24, packed=packed, skew=0.0, fill=0.7, left=True, mask=mask))
    generator = torch.Generator().manual_seed(1)
    shape = (24, 64)
    strength = torch.tensor([0.0] * 12 + [0.3] * 6 + [1.5] * 6)[:, None]
    gap = (strength * torch.randn(shape, generator=generator)).clamp(-4.0, 4.0)
    # Whole rows near 1, at most: these the geometric mask of SkyRL lets through.
    gap += torch.linspace(-0.02, 0.02, 24)[:, None]
    gap[-1, -3], gap[-2, -3] = 12.0, -12.0
    old = batch.rollout - gap.view(batch.rollout.shape)
    new = old + torch.randn(shape, generator=generator).view(old.shape)
    return replace(batch, old=old, new=new.detach().requires_grad_())


OPERATIONS = ("XTUNER", "XTUNER_LOSS", "SKYRL", "SKYRL_STEP", "TRL", "TRL_LOSS", "TOKEN", "BOTH")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_everybody_agrees_beyond_all_bounds(operation):
    operation = getattr(load("operations"), operation)
    padded = [load("operations").TRL, load("operations").TRL_LOSS]
    batch = wild(packed=operation.scheme in ("native", "xtuner") and operation not in padded)
    found = {who.name: who.whole() for who in compiled_ones_left_out(batch, operation) if who.whole is not None}
    assert len(found) > 1 and load("device_gate").check(batch, operation, found) == {}
    metrics = found[load("contenders").OURS].metrics
    if operation.scheme == "xtuner":
        assert (
            0.0
            < metrics["mismatch/rollout_is_veto_fraction"]
            < metrics["mismatch/rollout_is_seq_masked_fraction"]
            < 1.0
        )
        assert metrics["mismatch/rollout_is_ratio_fraction_low"] > 0.0
    if operation.scheme == "skyrl":
        hit = ("outlier_seq_over_high_ratio", "outlier_seq_under_low_ratio", "token_mask_ratio")
        hit += ("geo_sequence_mask_over_high_ratio", "geo_sequence_mask_under_low_ratio")
        assert all(0.0 < metrics[name] < 1.0 for name in hit), metrics
    if operation.name.startswith("TRL"):
        weights = found[load("contenders").OURS].weights
        # Whole sequences above the bound.
        assert weights is None or 0.0 < float((weights.amax(1) == 0).float().mean()) < 1.0
    if operation in (load("operations").BOTH, load("operations").XTUNER_LOSS, load("operations").TRL_LOSS):
        clips = ("clip_fraction_low", "clip_fraction_high")
        clips += ("clip_fraction_dual",) if operation.surrogate.dual else ()
        assert all(metrics[name] > 0.0 for name in clips), metrics


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_own_reference_compiles_whole():
    """What is timed as torch.compile of our reference has no graph break.

    A correction on the meta device takes the path of a GPU; on the CPU a compiler gets the operator instead.
    """
    names, losses, operations, gate = (
        load(name) for name in ("device_contenders", "device_losses", "operations", "device_gate")
    )
    held = load("batches").make(tiny("32k in 256"))
    how = {"fullgraph": True, "backend": "aot_eager"}
    tensors = {name: getattr(held, name).to("meta") for name in ("old", "rollout", "mask", "cu_seqlens")}
    weights, mask, *_ = names._traced_correct(replace(held, **tensors), operations.TOKEN, **how).on_device()
    assert weights.shape == held.old.shape and mask.dtype == torch.bool
    correction = rc.correct(held.old, held.rollout, held.mask, cu_seqlens=held.cu_seqlens, spec=operations.TOKEN_SPEC)
    traced = losses._traced_loss(held, operations.BOTH, correction, **how)
    ours = losses._loss(names.OURS, held, operations.BOTH, correction, "auto")
    assert gate.check(held, operations.BOTH, {names.OURS: ours.whole(), names.TRACED: traced.whole()}) == {}


def wrong_weights(out):
    return out._replace(weights=out.weights * 1.001)


def no_weights(out):
    return out._replace(weights=None)


def weights_at_prompts(out):
    return out._replace(weights=out.weights + 1e-3 * (out.weights == 0))


def wrong_mask(out):
    return out._replace(mask=torch.zeros_like(out.mask))


def mask_at_prompts(out):
    return out._replace(mask=out.mask | (out.weights == 0))


def wrong_metric(out):
    return out._replace(metrics={**out.metrics, "d_std": out.metrics["d_std"] * 1.01})


def nan_metric(out):
    return out._replace(metrics={**out.metrics, "d_mean": math.nan})


def other_metrics(out):
    return out._replace(metrics={"mine": 1.0})


def wrong_value(out):
    return out._replace(value=out.value * 1.01)


def no_gradient(out):
    return out._replace(gradient=None)


def wrong_gradient(out):
    return out._replace(gradient=out.gradient * 1.001)


def nan_gradient(out):
    return out._replace(gradient=out.gradient / 0.0)


OF_CORRECT = (
    wrong_weights,
    no_weights,
    weights_at_prompts,
    wrong_mask,
    mask_at_prompts,
    wrong_metric,
    nan_metric,
    other_metrics,
)
OF_LOSS = (wrong_value, no_gradient, wrong_gradient, nan_gradient)


@pytest.mark.parametrize("spoil", OF_CORRECT + OF_LOSS, ids=lambda spoil: spoil.__name__)
def test_gate(spoil):
    """A peer that is wrong is named; a reference that is wrong stops everything; so does ours."""
    gate, operations, names = load("device_gate"), load("operations"), load("device_contenders")
    operation = operations.TOKEN if spoil in OF_CORRECT else operations.BOTH
    batch = load("batches").make(tiny("1M"))
    found = {who.name: who.whole() for who in compiled_ones_left_out(batch, operation) if who.whole is not None}
    del found[names.EAGER]
    spoiled = spoil(found[names.BY_HAND])
    wrong = gate.check(batch, operation, {**found, "a third": found[names.OURS], names.BY_HAND: spoiled})
    assert list(wrong) == [names.BY_HAND] and names.BY_HAND in wrong[names.BY_HAND]
    with pytest.raises(gate.WrongResult, match="nobody agrees"):
        gate.check(batch, operation, {**found, names.BY_HAND: spoiled})
    with pytest.raises(gate.WrongResult):
        gate.check(batch, operation, {**found, names.EAGER: spoiled})
    with pytest.raises(gate.WrongResult):
        gate.check(batch, operation, {**found, names.OURS: spoil(found[names.OURS])})
    with pytest.raises(gate.WrongResult, match="nobody agrees"):
        gate.check(batch, operation, {names.OURS: found[names.OURS]})


def test_reference_agrees_to_the_bit():
    """One token of the mask is nothing to a peer, and everything to our own definition."""
    gate, operations, names = load("device_gate"), load("operations"), load("device_contenders")
    case = load("batches").named("1M")
    batch = load("batches").make(case.__class__("", "", 8192, 16))
    found = {who.name: who.whole() for who in compiled_ones_left_out(batch, operations.TOKEN) if who.whole is not None}
    mask = found[names.OURS].mask.clone()
    mask[int(mask.int().argmax())] = False
    other = found[names.OURS]._replace(mask=mask)
    assert gate.check(batch, operations.TOKEN, {**found, names.BY_HAND: other}) == {}
    with pytest.raises(gate.WrongResult, match="differs from ours at 1 of"):
        gate.check(batch, operations.TOKEN, {**found, names.EAGER: other})


@pytest.mark.peers
def test_verl_computes_the_same():
    """verl's own correction and its own loss, through the gate that lets them be timed."""
    batches, gate, names, operations = (
        load(name) for name in ("batches", "device_gate", "device_contenders", "operations")
    )
    for case, wanted in (
        ("1024 x 8192 at 25 %", (operations.METRICS, operations.TOKEN)),
        ("2048 x 8192, int64", (operations.FORWARD, operations.BACKWARD, operations.BOTH)),
    ):
        batch = batches.make(tiny(case))
        for operation in wanted:
            found = {who.name: who.whole() for who in compiled_ones_left_out(batch, operation) if who.whole is not None}
            assert names.VERL in found and gate.check(batch, operation, found) == {}


@pytest.mark.peers
def test_trl_computes_the_same():
    """TRL's own loss, called as the benchmark calls it, through the gate that lets it be timed."""
    gate, names, operation = load("device_gate"), load("device_contender"), load("operations").TRL_LOSS
    for batch in (load("batches").make(tiny("TRL's batch")), wild(packed=False)):
        found = {who.name: who.whole() for who in compiled_ones_left_out(batch, operation) if who.whole is not None}
        assert names.TRL in found and gate.check(batch, operation, found) == {}
        mine, theirs = found[names.TRL_RESTATED].metrics, dict(found[names.TRL].metrics)
        assert theirs.pop("entropy") == 0.0 and theirs == pytest.approx(mine)

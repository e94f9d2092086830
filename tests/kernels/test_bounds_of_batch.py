"""The kernels with bounds that the batch decides: as plain torch, to the bit where that is promised."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rollout_corr as rc
from builders.batches import lay_out, random_sequences, spoil
from builders.kernel_cases import (
    INTERPRETED,
    WIDE,
    assert_like_reference,
    between_fences,
    bits,
    shaped,
    watched,
)
from builders.labels import assert_same_labels
from rollout_corr.api import thresholds
from rollout_corr.backends import bounds_of_batch, count_tokens, operators
from rollout_corr.backends.whole import run_whole
from rollout_corr.kernels.correct import launch

pytestmark = INTERPRETED

C, W = rc.Criterion, rc.Weight
LENGTHS = (5, 1, 9, 0, 7, 16)
# Every rule, of every unit and side; statistics that compare themselves, D, its square, and what the caller brings.
CASES = {
    "token weights": ("packed_gaps", torch.float32, rc.Spec(W("token", rc.TopK(9), rc.Quantile(0.8), outside="zero"))),
    "sample size": (
        "padded_left",
        torch.bfloat16,
        rc.Spec(W("token", upper=rc.KeepESS(0.95)), (C("k2", upper=rc.MeanBelow(0.02)),)),
    ),
    "survivors": (
        "packed",
        torch.float32,
        rc.Spec(
            W("product", rc.TopK(3), rc.Quantile(0.7)),
            (C("abs", upper=rc.Quantile(0.7)), C("ratio", "sequence", "mean", lower=0.5, upper=rc.Quantile(0.6))),
            rejected="both",
            sums_over="kept",
        ),
    ),
    "extrema": (
        "padded_right",
        torch.float64,
        rc.Spec(
            W("geometric", upper=rc.Quantile(0.6)),
            (
                C("k2", "sequence", "max", upper=rc.Quantile(0.6)),
                C("k1", "sequence", "min", lower=rc.TopK(share=0.7), upper=5.0),
                C("k2", "sequence", "mean", upper=rc.MeanBelow(0.05), when="negative_advantage", drop="token"),
            ),
            rejected="zero",
        ),
    ),
    "given": (
        "list",
        torch.float32,
        rc.Spec(
            criteria=(C("external", upper=rc.Quantile(0.6), name="entropy"), C("k1", lower=-0.3, upper=rc.Bottom(20)))
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_as_plain_torch(name, device):
    """Bounds, masks and verdicts to the bit; NaN, infinity, ties at the bound and empty sequences among them."""
    layout, dtype, spec = CASES[name]
    number = list(CASES).index(name)
    sequences = spoil(random_sequences(number, LENGTHS, scale=0.3, advantages="token"), number)
    # Equal tokens, some of them at a bound.
    sequences[4].train[:5], sequences[4].rollout[:5] = [-0.5] * 5, [-0.75] * 5
    laid = lay_out(sequences, layout, dtype)
    reference = laid.correct(spec)
    with shaped(WIDE), watched():
        out = between_fences(laid, device).correct(spec, backend="triton")
    assert_like_reference(out, reference, name)
    places = len(bounds_of_batch.places_of(spec))
    # In float64 sums over sequences are plain, in another order; those of float32 have the same bits.
    within = 1e-14 if dtype == torch.float64 else 0.0
    found, wanted = (x.statistics.maxima[-2 * places :].cpu() for x in (out, reference))
    torch.testing.assert_close(found, wanted, rtol=within, atol=0.0)


TOKENS = {
    "both sides": rc.Spec(W("token", rc.TopK(share=0.7), rc.Quantile(0.8), token_clamp=0.25), clamp=0.5),
    "when": rc.Spec(
        criteria=(
            C("abs", upper=rc.Quantile(0.7), when="outward"),
            C("ratio", lower=rc.Quantile(0.2), when="negative_advantage", token_clamp=0.25),
        )
    ),
    "means": rc.Spec(
        criteria=(
            C("k2", upper=rc.MeanBelow(0.03)),
            C("k1", upper=rc.MeanBelow(0.05)),
            C("external", lower=rc.TopK(9), upper=rc.MeanBelow(0.01), name="entropy"),
        )
    ),
    "not finite": rc.Spec(
        criteria=(C("k1", upper=rc.Quantile(0.9)), C("k2", upper=rc.MeanBelow(0.03))), nonfinite="propagate"
    ),
    "sample size": rc.Spec(W("token", 0.9, rc.KeepESS(0.99)), (C("k2", upper=rc.MeanBelow(0.03)),)),
    "neutral": rc.Spec(W("token", upper=rc.Quantile(0.6)), nonfinite="neutral"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["packed_gaps", "padded_left"])
@pytest.mark.parametrize("name", TOKENS)
def test_the_kernel_counts_what_torch_counts(name, layout, dtype, device):
    """The table of every round, whole parts and fractions of amounts too."""
    spec = TOKENS[name]
    sequences = spoil(
        random_sequences(11, LENGTHS, scale=0.3, advantages="sequence" if layout == "packed_gaps" else "token"), 11
    )
    for one in sequences:
        one.external["entropy"][::4] = [math.nan] * len(one.external["entropy"][::4])
    laid = lay_out(sequences, layout, dtype)
    with mock.patch.object(bounds_of_batch, "find_bounds", wraps=bounds_of_batch.find_bounds) as asked:
        laid.correct(spec)
    batch = asked.call_args.args[0]
    progress = bounds_of_batch.Progress({}, {})
    rounds = 0
    with shaped(WIDE), watched():
        counters = count_tokens.counters_of(batch, spec, "triton")
        while bounds_of_batch.wanted(spec, progress):
            with mock.patch.object(bounds_of_batch, "decided") as decided:
                counted = bounds_of_batch.record(batch, spec, progress, counters).tables()
            assert not decided.called
            wanted = bounds_of_batch.record(batch, spec, progress)
            tables = wanted.tables()
            assert counted.keys() == tables.keys() and all(counted[place].equal(tables[place]) for place in tables)
            assert rounds or all(table[0].sum() > 2 for table in tables.values())
            progress, rounds = progress.after(wanted.searches, tables), rounds + 1
    assert rounds == (6 if dtype == torch.float64 else 3)


SEQUENCE_RULES = {
    "kept": rc.Spec(
        W("geometric", upper=rc.Quantile(0.6), token_clamp=0.25),
        (
            C("abs", upper=rc.Quantile(0.9)),
            C("k1", upper=rc.Quantile(0.9), drop="sequence"),
            C("k2", "sequence", "mean", upper=rc.MeanBelow(0.002)),
            C("ratio", "sequence", "sum", lower=rc.TopK(1), upper=rc.Quantile(0.8)),
        ),
        sums_over="kept",
    ),
    "when": rc.Spec(
        criteria=(
            C("k2", "sequence", "max", upper=rc.Quantile(0.6), when="outward"),
            C("k1", "sequence", "min", lower=rc.TopK(share=0.7), when="positive_advantage"),
            C(
                "external",
                "sequence",
                "mean",
                upper=rc.Bottom(2),
                name="entropy",
                drop="token",
                when="positive_advantage",
            ),
            C("abs", "sequence", "sum", upper=rc.Quantile(0.5), drop="token"),
        )
    ),
    "not finite": rc.Spec(
        W("product", upper=rc.Quantile(0.6)),
        (C("external", "sequence", "max", upper=rc.Quantile(0.6), name="entropy"),),
        nonfinite="propagate",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["packed_gaps", "padded_left"])
@pytest.mark.parametrize("name", SEQUENCE_RULES)
def test_the_kernels_have_the_values_of_sequences(name, layout, dtype, device):
    """With the bits of plain torch, and nothing else is asked of that; in float64, where sums are plain, nearly."""
    spec, number = SEQUENCE_RULES[name], list(SEQUENCE_RULES).index(name)
    advantages = "sequence" if layout == "packed_gaps" else "token"
    laid = lay_out(spoil(random_sequences(number, LENGTHS, scale=0.3, advantages=advantages), number), layout, dtype)
    with mock.patch.object(bounds_of_batch, "find_bounds", wraps=bounds_of_batch.find_bounds) as asked:
        laid.correct(spec)
    batch = asked.call_args.args[0]
    wanted = bounds_of_batch.find_bounds(batch, spec, lambda x: x).bounds
    with shaped(WIDE), watched(), mock.patch.object(bounds_of_batch, "decided") as decided:
        counters = count_tokens.counters_of(batch, spec, "triton")
        found = bounds_of_batch.find_bounds(batch, spec, lambda x: x, counters).bounds
    assert not decided.called
    assert found.keys() == wanted.keys() and len(found) >= 2
    within = 1e-14 if dtype == torch.float64 else 0.0
    for place, bound in wanted.items():
        torch.testing.assert_close(found[place], bound, rtol=within, atol=0.0)
        assert bound.isfinite(), place


def test_kernels_count_micro_batches():
    """Tables of kernels and of torch merge: they are the same."""
    laid = lay_out(random_sequences(4, LENGTHS, scale=0.3), "packed", torch.float32)
    other = lay_out(random_sequences(5, LENGTHS, scale=0.3), "padded_right", torch.float32)
    mean = C("abs", "sequence", "mean", upper=rc.Quantile(0.5))
    of_tokens, found = (W("token", upper=rc.Quantile(0.8)), C("k2", upper=rc.MeanBelow(0.03))), []
    spec = rc.Spec(of_tokens[0], (of_tokens[1], mean), sums_over="kept")
    for chosen in ("triton", "torch"):
        known = None
        while known is None or not known.complete:
            with mock.patch.object(thresholds, "chosen_backend", return_value=chosen), shaped(WIDE):
                one = laid.correct(spec, call=rc.threshold_statistics, known=known)
            two = other.correct(spec, call=rc.threshold_statistics, known=known)
            known = (one + two).thresholds()
        found.append(known.bounds)
    assert len(found[0]) == 3 and found[0] == found[1]


def test_a_bound_of_a_turn_and_labels_of_sequences(device):
    laid = lay_out(random_sequences(7, (5, 1, 9, 4), scale=0.3), "packed", torch.float32)
    turns = {"turns": torch.tensor([0, 2, 5, 6, 9, 15, 19])}
    labels = {"labels": {"task": torch.tensor([0, 1, 0, 1])}, "label_names": {"task": 2}}
    spec = rc.Spec(W("product", upper=rc.Quantile(0.6), over="turn"), (C("k1", "turn", "mean", upper=rc.Bottom(3)),))
    reference = laid.correct(spec, **turns, **labels)
    with shaped(WIDE):
        out = between_fences(laid, device).correct(spec, backend="triton", **turns, **labels)
    assert_same_labels(out, reference, "turns and labels")
    for name in ("weights", "mask", "keep"):
        got, wanted = getattr(out, name).cpu(), getattr(reference, name)
        torch.testing.assert_close(got, wanted, rtol=3e-7 * (name == "weights"), atol=0)
    assert out.keep_turns.cpu().equal(reference.keep_turns) and not out.keep_turns.all()


@pytest.mark.parametrize("labelled", [False, True])
def test_no_sequence_of_one_turn_is_beyond_the_bound_that_its_turn_has_decided(labelled, device):
    """Its weight is a mean of one, which goes through e^D - 1 and back."""
    laid = lay_out(random_sequences(77, (5, 9, 16, 4, 7, 3), scale=0.3, invalid=0.0), "packed", torch.float32)
    given = {"turns": laid.cu_seqlens}
    if labelled:
        given |= {"labels": {"task": torch.tensor([0, 1, 0, 1, 0, 1])}, "label_names": {"task": 2}}
    for q in (0.3, 0.5, 0.7, 0.9):
        spec = rc.Spec(W("geometric", rc.TopK(share=q), rc.Quantile(q), over="turn"))
        with shaped(WIDE):
            out = between_fences(laid, device).correct(spec, backend="triton", **given)
        reference = laid.correct(spec, **given)
        for side in ("above", "below"):
            key = f"sequence_weight_{side}_fraction"
            assert out.metrics()[key] == reference.metrics()[key] == out.metrics()[f"turn_weight_{side}_fraction"]
        if labelled:
            assert_same_labels(out, reference, f"{q}")


def test_calls_with_other_bounds_share_plans_and_launches():
    """Neither the values nor that the batch decides is part of a key: a bound that is a number has the same plan."""

    def sites(spec, seed):
        laid = lay_out(random_sequences(seed, (5, 7), scale=0.3), "packed", torch.float32)
        with mock.patch.object(launch, "prepare", wraps=launch.prepare) as prepared, shaped(WIDE):
            laid.correct(spec, backend="triton")
            given = prepared.call_args.args[0]
            launches = launch.prepare(given, spec)[1]
        return [one.site for one in launches], launches[0].arguments["numbers"], launches[0].arguments["PLAN"]

    decided = rc.Spec(W("product", upper=rc.Quantile(0.7)), (C("abs", upper=rc.Quantile(0.9), label="abs"),))
    one, first, plan = sites(decided, 0)
    other, second, _ = sites(decided, 1)
    assert all(x is y for x, y in zip(one, other, strict=True)) and not first.equal(second)
    known = rc.Spec(W("product", upper=2.0), (C("abs", upper=0.3, label="abs"),))
    assert sites(known, 0)[2] == plan


class NothingRead(TorchDispatchMode):
    """No operation that makes the host wait for a device, or whose result has a size that depends on values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "equal", "bincount"), function
        result = function(*args, **(kwargs or {}))
        moved = function.overloadpacket.__name__ == "_to_copy" and "device" in (kwargs or {})
        assert not moved or kwargs["device"] in (None, args[0].device), function
        return result


@pytest.mark.parametrize("name", CASES)
def test_the_search_reads_nothing_of_a_device(name):
    """From the batch to the numbers that kernels read, as it runs where values may not be read."""
    _, _, spec = CASES[name]
    sequences = random_sequences(3, LENGTHS, scale=0.3, advantages="token")
    laid = lay_out(sequences, "padded_right", torch.float32)
    with mock.patch.object(bounds_of_batch, "find_bounds", wraps=bounds_of_batch.find_bounds) as asked:
        laid.correct(spec)
    batch = asked.call_args.args[0]
    with mock.patch.object(bounds_of_batch, "in_blocks", return_value=False), NothingRead():
        batch.bounds = bounds_of_batch.find_bounds(batch, spec, lambda x: x)
        given = operators.given_of(operators.operands_of(batch, spec))
        launch.prepare(given, spec)


def test_the_operator_takes_the_bounds(device):
    """The operator that a compiler calls gives what the reference gives for the same bounds."""
    laid = lay_out(random_sequences(2, (5, 1, 7, 0, 4, 12)), "packed", torch.float32).to(device)
    given = laid.train, laid.rollout, laid.mask, laid.cu_seqlens, None, False, [], None, None, False, None
    spec = rc.Spec(W("token", upper=rc.Quantile(0.7)), (C("abs", upper=rc.Quantile(0.9)),), rejected="both")
    bounds = torch.tensor([0.05, 0.125], dtype=torch.float64, device=device)
    operands = operators.CorrectOperands(*given, bounds)
    found, wanted = operators._kernels(operands, spec), operators._plain(operands, spec, run_whole)
    assert bits(found.mask.cpu()).equal(bits(wanted.mask.cpu())) and found.keep.equal(wanted.keep)
    assert torch.allclose(found.weights, wanted.weights, rtol=3e-7, atol=0)
    assert found.weights.max().item() == pytest.approx(math.exp(0.05), rel=1e-6)


def test_an_open_side_is_open(device):
    """Where a rule goes on to the end, the number that the kernels read is infinite."""
    laid = lay_out(random_sequences(5, (5, 7), scale=0.3), "packed", torch.float32)
    spec = rc.Spec(W("token", upper=rc.KeepESS(0.01)), (C("abs", upper=rc.Bottom(1000)),))
    with shaped(WIDE):
        out = between_fences(laid, device).correct(spec, backend="triton")
    assert out.metrics()["weight/upper_max"] == math.inf
    assert torch.equal(out.mask.cpu(), laid.mask) and torch.equal(
        out.weights.cpu() > 1, (laid.train > laid.rollout) & laid.mask
    )


@pytest.mark.gpu
def test_a_captured_search_replays():
    """A graph holds the rounds of the search, and finds the bounds of another batch."""
    spec = rc.Spec(
        W("token", upper=rc.KeepESS(0.9)), (C("abs", upper=rc.Quantile(0.8)), C("k2", upper=rc.MeanBelow(0.03)))
    )
    held, other = (torch.randn(2, 3000, device="cuda") * 0.3 - 1.0 for _ in range(2))
    rc.correct(*held.unbind(), spec=spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rc.correct(*held.unbind(), spec=spec)
    held.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    wanted = rc.correct(*other.unbind(), spec=spec)
    assert found.mask.equal(wanted.mask) and found.weights.equal(wanted.weights) and not found.mask.all()
    assert found.metrics() == wanted.metrics()

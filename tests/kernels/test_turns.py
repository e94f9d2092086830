"""The kernels on turns, compared with plain torch: offsets of all kinds, tiles, losses.

Loops judge them in test_random_calls.py.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, lay_out, random_sequences, spoil
from builders.kernel_cases import (
    FEW,
    INTERPRETED,
    MIDDLE,
    NARROW,
    WIDE,
    assert_like_reference,
    between_fences,
    bits,
    flat,
    shaped,
    unchecked,
    watched,
)
from builders.loss_cases import COUNTED, MEANS
from builders.rounding import all_near, assert_near, is_near
from builders.turns import loss_of, offsets_of, random_turns, specs_over
from rollout_corr.backends import operators
from rollout_corr.backends import turns as reading

pytestmark = INTERPRETED

SHAPES = (NARROW, MIDDLE, WIDE)


# Offsets of turns on the CPU go to the kernels as those on a device do: as they are.
UNREAD = mock.patch.object(reading, "read_offsets_of_turns", lambda turns, *_: turns)


def by_kernels(laid, spec, device, shapes=FEW, seed=0, **given):
    """A correction by the kernels, between fences, programs in an order that the seed decides."""
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with shaped(shapes), watched(seed=seed):
        return between_fences(laid, device).correct(spec, backend="triton", **given)


def assert_like(out, reference, case=""):
    """Require the reference's decisions about turns too."""
    assert_like_reference(out, reference, case)
    assert out.keep_turns.cpu().equal(reference.keep_turns), case


@pytest.mark.parametrize("number", [3, 4])
def test_one_turn_a_sequence_gives_the_bits_of_the_sequence(number, device):
    of_turns, of_sequences = specs_over("turn")[number], specs_over("sequence")[number]
    batch = spoil(random_sequences(number, (5, 1, 7, 0, 4, 30)), number)
    layout = LAYOUTS[number % len(LAYOUTS)]
    laid = lay_out(batch, layout, torch.bfloat16 if number % 2 else torch.float32)
    offsets = offsets_of(laid, [[len(sequence)] for sequence in batch])
    one = by_kernels(laid, of_turns, device, SHAPES[number % 3], turns=offsets)
    other = by_kernels(laid, of_sequences, device, SHAPES[number % 3])
    for got, wanted in ((one.weights, other.weights), (one.mask, other.mask)):
        pairs = zip(flat(got), flat(wanted), strict=True)
        assert all(torch.equal(bits(a), bits(b)) for a, b in pairs)
    assert one.keep_turns.tolist() == other.keep.tolist()


def test_turns_are_measured_beside_whatever_else_a_spec_does(device):
    """Weights of tokens, a framework's metrics, the full detail: with turns the same, and their metrics more."""
    batch = random_sequences(3, (5, 1, 7, 0, 4, 12))
    laid = lay_out(batch, "padded_left", torch.float32)
    offsets = offsets_of(laid, random_turns(batch, 3))
    spec = rc.Spec(
        rc.Weight.token(lower=0.8, upper=1.25),
        (rc.Criterion("ratio", "sequence", "min", lower=0.5), rc.Criterion("k3", upper=0.2)),
        rejected="both",
        detail="full",
        report=("native", "verl"),
    )
    for one in (spec, rc.Spec(spec.weight, spec.criteria, apply=False)):
        out = by_kernels(laid, one, device, turns=offsets)
        assert_like(out, laid.correct(one, turns=offsets))
        without, found = by_kernels(laid, one, device).metrics(), out.metrics()
        assert found.keys() > without.keys()
        assert {key: x for key, x in without.items() if not is_near(found[key], x, torch.float32)} == {}


@pytest.mark.parametrize(("layout", "lengths"), [("packed_gaps", ()), ("padded_right", (0, 0, 3, 0))])
def test_nothing_to_train_on(layout, lengths, device):
    laid = lay_out(random_sequences(3, lengths, invalid=1.0), layout, torch.float32)
    offsets, spec = offsets_of(laid, [[n] for n in lengths]), specs_over("turn")[3]
    out = by_kernels(laid, spec, device, turns=offsets)
    assert_like(out, laid.correct(spec, turns=offsets))
    assert all(out.keep_turns.tolist())


def test_many_turns_and_few(device):
    """Sequences of one turn and one of 30, many empty; tiles that hold many and turns over many tiles."""
    lengths = [[7], [0] * 9 + [1, 0, 2] * 5 + [33] + [0] * 5, [], [40, 1], [0, 5]]
    batch = random_sequences(5, [sum(one) for one in lengths])
    laid = lay_out(batch, "packed", torch.float32)
    offsets = offsets_of(laid, [one or [0] for one in lengths])
    for spec, shapes in zip(specs_over("turn"), (NARROW, WIDE), strict=False):
        assert_like(by_kernels(laid, spec, device, shapes, turns=offsets), laid.correct(spec, turns=offsets))


def test_ids_runs_and_int32_offsets(device):
    batch, spec = random_sequences(2, (5, 1, 7, 0, 4, 12)), specs_over("turn")[1]
    laid = lay_out(batch, "packed", torch.float32)
    offsets = offsets_of(laid, random_turns(batch, 2)).to(torch.int32)
    assert_like(by_kernels(laid, spec, device, turns=offsets), laid.correct(spec, turns=offsets))
    for more in ({}, {"max_turns": 40}):
        assert_like(by_kernels(laid, spec, device, turns="runs", **more), laid.correct(spec, turns="runs", **more))


@pytest.mark.parametrize("offsets", [[0, 9, 3, 20, 4, 29], [-4, 3, 60], [3]])
def test_wrong_offsets_stay_within_the_batch(offsets, device):
    """Nobody reads offsets of a device: what falls, overlaps or lies outside gives wrong numbers and nothing else."""
    batch = random_sequences(2, (5, 1, 7, 0, 4, 12))
    laid, given = lay_out(batch, "packed", torch.float32), torch.tensor(offsets)
    falling = torch.tensor([0, 20, 3, 29], dtype=laid.cu_seqlens.dtype)
    for spec, cu_seqlens in ((specs_over("turn")[0], falling), (specs_over("turn")[7], laid.cu_seqlens)):
        wrong = between_fences(replace(laid, cu_seqlens=cu_seqlens), device)
        with shaped(WIDE), unchecked(), UNREAD, watched():
            out = wrong.correct(spec, backend="triton", turns=given.to(device))
        assert out.keep_turns.shape == (len(offsets) - 1,)
        assert set(bits(out.keep_turns.cpu()).tolist()) <= {0, 1}


def test_the_operator_runs_them(device):
    """The operator that a compiler calls with tensors of a GPU gives what the reference gives."""
    batch, spec = random_sequences(2, (5, 1, 7, 0, 4, 12)), specs_over("turn")[1]
    on_host = lay_out(batch, "packed", torch.float32)
    offsets, results = offsets_of(on_host, random_turns(batch, 2)), []
    for run, where in ((operators._kernels, device), (operators._reference, "cpu")):
        laid = on_host.to(where)
        given = laid.train, laid.rollout, laid.mask, laid.cu_seqlens.to(where), laid.advantages
        operands = operators.CorrectOperands(*given, False, [], None, None, False, offsets.to(where))
        results.append([x.cpu() for x in run(operands, spec)])
    (weights, *found, statistics, keep_turns), (near_weights, *wanted, near_statistics, near_turns) = results
    assert keep_turns.equal(near_turns) and all(map(torch.equal, found, wanted))
    assert all_near(weights, near_weights, torch.float32, size=0.0)
    assert all_near(statistics, near_statistics, torch.float32)


# --- losses ---


OF_NEW = (
    rc.Criterion("ratio", "turn", "mean", lower=0.9, upper=1.15, of="new/old"),
    rc.Criterion("k3", "turn", "max", upper=0.3, of="new/rollout", drop="sequence", when="negative_advantage"),
)


@pytest.mark.parametrize(("layout", "criteria"), [("packed_gaps", OF_NEW), ("padded_right", ())])
def test_a_loss_corrects_by_turns(layout, criteria):
    batch = random_sequences(4, (5, 1, 7, 0, 4, 12), advantages="token")
    laid = lay_out(batch, layout, torch.float32)
    offsets = offsets_of(laid, random_turns(batch, 4))
    spec = specs_over("turn")[3]
    spec = replace(spec, criteria=(*spec.criteria, *criteria)) if criteria else spec
    with shaped(FEW):
        found, slope = loss_of(laid, "triton", spec, turns=offsets)
    wanted, wanted_slope = loss_of(laid, "torch", spec, turns=offsets)
    assert found.keep_turns.equal(wanted.keep_turns) and found.mask.equal(wanted.mask)
    assert False in found.keep_turns.tolist() and True in found.keep_turns.tolist()
    assert_near(found.weights, wanted.weights, torch.float32, size=0.0)
    assert_near(found.value, wanted.value, torch.float32)
    assert_near(slope, wanted_slope, torch.float32)
    one, other = found.metrics(), wanted.metrics()
    assert {key: (one[key], x) for key, x in other.items() if not is_near(one[key], x, torch.float32)} == {}


@pytest.mark.parametrize("mean", MEANS)
def test_gspo_over_turns(mean, device):
    """The ratio is a turn's, and what a mean counts is sequences."""
    number = MEANS.index(mean)
    through, layout = ("sequence", "token")[number % 2], ("packed_gaps", "padded_left")[number > 2]
    batch = random_sequences(number, (5, 1, 7, 0, 4, 12), advantages=("token", "sequence")[number % 2])
    laid = lay_out(batch, layout, torch.float32)
    offsets = offsets_of(laid, random_turns(batch, number))
    given = {"surrogate": rc.GSPO(0.05, 0.1, through=through, over="turn"), "turns": offsets}
    given["mean"] = mean if mean.of == "sum" else replace(mean, over=COUNTED[number % 2])
    with shaped(SHAPES[number % 3]), watched(seed=number):
        found, slope = loss_of(laid.to(device), "triton", **given | {"turns": offsets.to(device)})
    wanted, wanted_slope = loss_of(laid, "torch", **given)
    assert_near(found.value.cpu(), wanted.value, torch.float32)
    assert_near(slope.cpu(), wanted_slope, torch.float32)
    one, other = found.metrics(), wanted.metrics()
    assert {key: (one[key], x) for key, x in other.items() if not is_near(one[key], x, torch.float32)} == {}

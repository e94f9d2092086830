"""Turns against the oracle in loops, in every layout and both ways to run, and what must not change a bit."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, error, lay_out, random_sequences, spoil
from builders.same_bits import in_hex
from builders.turns import ids_of, made, offsets_of, places_begin, random_turns, specs_over
from builders.weights import weight_of
from oracles import turns as oracle
from rollout_corr.backends import blocks
from rollout_corr.backends.run import CORRECTIONS
from rollout_corr.backends.whole import run_whole

pytestmark = pytest.mark.usefixtures("one_thread")


def compare(laid, out, expected, turns, case):
    assert out.keep.tolist() == expected.keep, case
    assert out.keep_turns.tolist() == [x for row in expected.keep_turns for x in row], case
    for name, within in (("weights", 1e-12), ("mask", 0.0)):
        got, wanted = getattr(out, name), getattr(expected, name)
        assert (got is None) == (wanted is None), case
        if got is not None:
            pairs = zip(laid.read(got), wanted, strict=True)
            off = [error(float(a), float(b)) for one, other in pairs for a, b in zip(one, other, strict=True)]
            assert max(off, default=0.0) <= within, f"{name}: {off}: {case}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("whole", [False, True])
def test_every_layout_against_loops(layout, whole):
    for seed in range(12):
        batch, turns, spec = made(100 * LAYOUTS.index(layout) + seed)
        laid = lay_out(batch, layout)
        with mock.patch.dict(CORRECTIONS, blocks=run_whole if whole else blocks.run_blocks):
            out = laid.correct(spec, turns=offsets_of(laid, turns))
        expected, case = oracle.correct(batch, turns, spec), f"{seed} {layout} {spec!r}"
        compare(laid, out, expected, turns, case)
        found = out.metrics()
        for key, value in oracle.metrics(batch, turns, expected, spec).items():
            assert error(found[key], value) <= (0.0 if isinstance(value, int) else 1e-11), f"{key}: {case}"
        for label, values in expected.values.items():
            assert f"{label}/mean" in found
            if values and math.isfinite(max(values)):
                top = max(values)
                if next(c for c in spec.criteria if c.label == label).statistic.log_space:
                    top = math.exp(min(max(top, -spec.clamp), spec.clamp))
                assert error(found[f"{label}/max"], top) <= 1e-11, f"{label}: {case}"


def results(laid, out):
    weights = None if out.weights is None else in_hex(laid.read(out.weights))
    return weights, laid.read(out.mask), out.keep.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_turn_a_sequence_gives_the_bits_of_the_sequence(dtype):
    for seed, layout in enumerate(LAYOUTS):
        batch = spoil(random_sequences(seed, (5, 1, 7, 0, 4, 30)), seed)
        laid = lay_out(batch, layout, dtype)
        offsets = offsets_of(laid, [[len(sequence)] for sequence in batch])
        for of_turns, of_sequences in zip(specs_over("turn"), specs_over("sequence"), strict=True):
            one, other = laid.correct(of_turns, turns=offsets), laid.correct(of_sequences)
            assert results(laid, one)[:2] == results(laid, other)[:2]
            # A sequence without slots has no turn of its own.
            assert one.keep_turns.tolist() == other.keep.tolist()


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 0.0), (torch.float32, 2e-7)])
def test_turns_of_one_token_decide_as_tokens_and_weigh_as_they_do(dtype, within):
    """In float64 to the bit. Of other log-probs D comes to a turn on its grid, 2^-28, and exp is that of float64."""
    for seed in range(4):
        batch = random_sequences(seed, (5, 1, 7, 0, 4, 30), invalid=0.0)
        laid = lay_out(batch, "packed", dtype)
        offsets = torch.arange(int(laid.cu_seqlens[-1]) + 1)
        bounds = {"lower": 0.8, "upper": 1.2}
        for level in ("product", "geometric"):
            turn = rc.Spec(weight_of(level, 0.9, 1.3, among="turn"), [rc.Criterion("ratio", "turn", "mean", **bounds)])
            token = rc.Spec(rc.Weight.token(lower=0.9, upper=1.3), [rc.Criterion("ratio", **bounds)])
            one, other = laid.correct(turn, turns=torch.cat([offsets, offsets[-1:]])), laid.correct(token)
            assert torch.allclose(one.weights, other.weights, rtol=within, atol=0)
            assert laid.read(one.mask) == laid.read(other.mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_padding_and_blocks_change_no_bit(dtype):
    for seed in range(6):
        batch, turns, spec = made(seed)
        spec = rc.Spec(spec.weight and rc.Weight("turn", spec.weight.reduce), spec.criteria, spec.rejected)
        wanted = None
        for layout in LAYOUTS:
            laid = lay_out(batch, layout, dtype)
            offsets = offsets_of(laid, turns)
            out = laid.correct(spec, turns=offsets)
            with mock.patch.object(blocks, "BLOCK", 8):
                cut = laid.correct(spec, turns=offsets)
            found = results(laid, out)
            wanted = wanted or (found, out.keep_turns.tolist())
            assert found == wanted[0] == results(laid, cut), layout
            assert out.keep_turns.tolist() == wanted[1] == cut.keep_turns.tolist()


def test_parts_merge_to_the_whole():
    batch = random_sequences(3, (5, 9, 7, 4, 12, 3))
    turns = random_turns(batch, 3)
    spec = rc.Spec(rc.Weight.product(over="turn"), [rc.Criterion("k3", "turn", "mean", upper=0.1)])

    def run(first, last):
        laid = lay_out(batch[first:last], "packed")
        return laid.correct(spec, turns=offsets_of(laid, turns[first:last]))

    parts, whole = [run(0, 2), run(2, 5), run(5, 6)], run(0, 6)
    assert torch.cat([part.keep_turns for part in parts]).equal(whole.keep_turns)
    merged = rc.Statistics.sum([part.statistics for part in parts]).metrics()
    for key, value in whole.metrics().items():
        assert error(merged[key], value) <= 1e-12, key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_and_runs_are_the_offsets_that_they_stand_for(layout):
    spec = rc.Spec(rc.Weight.product(over="turn"), [rc.Criterion("k3", "turn", "mean", upper=0.05)])
    for seed in range(4):
        batch = random_sequences(seed, (5, 1, 7, 0, 4, 12))
        laid = lay_out(batch, layout)
        turns = [[n for n in lengths if n] or [0] for lengths in random_turns(batch, seed)]
        given = laid.correct(spec, turns=offsets_of(laid, turns))
        for more in ({}, {"max_turns": given.turns.shape[0] + 3}):
            found = laid.correct(spec, turns=ids_of(laid, turns), **more)
            assert found.turns.unique().equal(given.turns.unique())
            assert results(laid, found) == results(laid, given)
            same_metrics(found, given)
        found = laid.correct(spec, turns="runs")
        runs = [runs_of(laid, s) for s in range(len(batch))]
        assert found.turns.unique().tolist() == sorted({x for row in runs for x in row} | {int(found.turns[-1])})
        same_metrics(laid.correct(spec, turns="runs", max_turns=200), found)


def same_metrics(one, other):
    """Sums over turns, of which some are empty, may be added up in another order."""
    wanted = other.metrics()
    assert all(error(value, wanted[key]) <= 1e-12 for key, value in one.metrics().items())


def runs_of(laid, s):
    """Where turns begin in a sequence's slots: at its beginning, and at each run of valid slots but the first."""
    begin, end = places_begin(laid, s), places_begin(laid, s + 1)
    if isinstance(laid.mask, list):
        mask = torch.cat(laid.mask)
    else:
        mask = (laid.mask.values() if laid.mask.is_nested else laid.mask).reshape(-1)
    valid = [bool(x) for x in mask[begin:end]]
    starts = [begin + i for i in range(len(valid)) if valid[i] and (i == 0 or not valid[i - 1])]
    return [begin, *starts[1:]] if end > begin else [begin]


def test_runs_of_a_mask_of_none_are_the_sequences():
    logp = torch.randn(6)
    out = rc.correct(logp, logp, rc.Batch(cu_seqlens=torch.tensor([0, 2, 2, 6]), turns="runs"))
    assert out.turns.tolist() == [0, 2, 6] and out.keep_turns.tolist() == [True, True]


@pytest.mark.parametrize("layout", ["jagged", "list"])
def test_offsets_that_are_as_many_as_the_tokens_are_no_ids_where_ids_have_rows(layout):
    laid = lay_out(random_sequences(0, (3, 2)), layout)
    out = laid.correct(rc.Spec(), turns=torch.tensor([0, 1, 3, 4, 5]))
    assert out.turns.tolist() == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", ["padded_right", "packed_row", "jagged", "list"])
def test_ids_in_rows_are_no_offsets_whatever_they_are(layout, dtype):
    """Ids that begin and end where offsets would, in a tensor that has not the shape of offsets."""
    laid = lay_out(random_sequences(0, (3, 3) if layout != "padded_right" else (1, 1)), layout)
    rows = [torch.tensor(row, dtype=dtype) for row in ([0, 1, 2], [3, 4, 6])]
    ids = {
        "padded_right": torch.stack(rows),
        "packed_row": torch.cat(rows)[None],
        "jagged": torch.nested.nested_tensor_from_jagged(torch.cat(rows), torch.tensor([0, 3, 6])),
        "list": rows,
    }[layout]
    assert laid.correct(rc.Spec(), turns=ids).turns.tolist() == [0, 1, 2, 3, 4, 5, 6]

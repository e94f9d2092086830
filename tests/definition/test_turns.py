"""Layouts and forms of turns that change no bit. Their values are judged by loops in test_random_calls.py."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, lay_out, random_sequences, spoil
from builders.rounding import FORMULA, assert_near, near
from builders.same_bits import in_hex
from builders.turns import ids_of, offsets_of, random_turns, specs_over
from builders.weights import weight_of

pytestmark = pytest.mark.usefixtures("one_thread")


def results(laid, out):
    weights = None if out.weights is None else in_hex(laid.read(out.weights))
    return weights, laid.read(out.mask), out.keep.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_turn_a_sequence_gives_the_bits_of_the_sequence(dtype):
    for seed, layout in enumerate(LAYOUTS):
        batch = spoil(random_sequences(seed, (5, 1, 7, 0, 4, 30)), seed)
        laid = lay_out(batch, layout, dtype)
        offsets = offsets_of(laid, [[len(sequence)] for sequence in batch])
        for of_turns, of_sequences in list(zip(specs_over("turn"), specs_over("sequence"), strict=True))[seed % 3 :: 3]:
            one, other = laid.correct(of_turns, turns=offsets), laid.correct(of_sequences)
            assert results(laid, one)[:2] == results(laid, other)[:2]
            # A sequence without slots has no turn of its own.
            assert one.keep_turns.tolist() == other.keep.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_turns_of_one_token_decide_as_tokens_and_weigh_as_they_do(dtype):
    """In float64 to a rounding. Of other log-probs D comes to a turn on its grid, 2^-28, and exp is float64's."""
    for seed in range(4):
        batch = random_sequences(seed, (5, 1, 7, 0, 4, 30), invalid=0.0)
        laid = lay_out(batch, "packed", dtype)
        offsets = torch.arange(int(laid.cu_seqlens[-1]) + 1)
        bounds = {"lower": 0.8, "upper": 1.2}
        for level in ("product", "geometric"):
            turn = rc.Spec(weight_of(level, 0.9, 1.3, among="turn"), [rc.Criterion("ratio", "turn", "mean", **bounds)])
            token = rc.Spec(rc.Weight.token(lower=0.9, upper=1.3), [rc.Criterion("ratio", **bounds)])
            one, other = laid.correct(turn, turns=torch.cat([offsets, offsets[-1:]])), laid.correct(token)
            assert_near(one.weights, other.weights, terms=FORMULA, size=0.0)
            assert laid.read(one.mask) == laid.read(other.mask)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_and_runs_are_the_offsets_that_they_stand_for(layout):
    spec = rc.Spec(rc.Weight.product(over="turn"), [rc.Criterion("k3", "turn", "mean", upper=0.05)])
    for seed in range(2):
        batch = random_sequences(seed, (5, 1, 7, 0, 4, 12))
        laid = lay_out(batch, layout)
        turns = [[n for n in lengths if n] or [0] for lengths in random_turns(batch, seed)]
        given = laid.correct(spec, turns=offsets_of(laid, turns))
        for more in ({}, {"max_turns": given.turns.shape[0] + 3}):
            found = laid.correct(spec, turns=ids_of(laid, turns), **more)
            assert found.turns.unique().equal(given.turns.unique())
            assert results(laid, found) == results(laid, given)
            assert found.metrics() == near(given.metrics())
        found = laid.correct(spec, turns="runs")
        runs = [runs_of(laid, s) for s in range(len(batch))]
        assert found.turns.unique().tolist() == sorted({x for row in runs for x in row} | {int(found.turns[-1])})
        assert laid.correct(spec, turns="runs", max_turns=200).metrics() == near(found.metrics())


def runs_of(laid, s):
    """Where turns begin in a sequence's slots: at its beginning, and at each run of valid slots but the first."""
    begin, end = laid.out.begins[s : s + 2]
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

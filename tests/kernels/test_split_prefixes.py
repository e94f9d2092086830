"""The kernels on prefixes of sequences that are split over ranks: to the bit those of whole sequences."""

from __future__ import annotations

import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out, random_sequences, rounded
from builders.kernel_cases import INTERPRETED, MIDDLE, NARROW, WIDE, between_fences, shaped, watched
from builders.prefixes import made
from builders.same_bits import assert_same_results, assert_same_statistics, outcome
from builders.split_cases import Rank, joined, picked, tokens_of, turns_of
from builders.threaded_ranks import Ranks
from builders.turns import offsets_of, random_turns
from rollout_corr.backends import operators, split
from rollout_corr.backends.split_prefixes import without_rests
from rollout_corr.metrics import collectives

pytestmark = INTERPRETED

SHAPES = (NARROW, MIDDLE, WIDE)
C, W = rc.Criterion, rc.Weight
WAYS = ("contiguous", "zigzag")
FAKE = SimpleNamespace(ProcessGroup=Rank, is_available=lambda: True, get_rank=lambda group: group.rank)


def on_one(sequences, spec, dtype, shapes, seed=0, turns=None):
    """The outcome of the kernels on one rank; with the lengths of turns, whether each is kept."""
    laid = lay_out(sequences, "packed", dtype)
    given = {} if turns is None else {"turns": offsets_of(laid, turns)}
    with shaped(shapes), watched(seed=seed):
        out = between_fences(laid, "cpu").correct(spec, backend="triton", **given)
    return outcome(laid, out) if turns is None else (outcome(laid, out), out.keep_turns.tolist())


def on_ranks(sequences, spec, way, ranks, dtype, layout, shapes, seed=0, turns=None):
    """The outcome of the kernels on ranks, as one, and the all-reduces that it took."""
    group, kept = Ranks(ranks), []

    def of_rank(rank):
        laid = lay_out(picked(sequences, tokens_of(sequences, way, ranks, rank)), layout, dtype, seed=rank)
        if laid.advantages is not None and laid.advantages.dim() == 1 and not isinstance(sequences[0].advantages, list):
            laid.advantages = laid.advantages[:, None] if layout.startswith("packed") else laid.advantages
        given = {"sequence_group": Rank(rank=rank, ranks=ranks), "sequence_order": way, "backend": "triton"}
        if turns is not None:
            given["turns"] = offsets_of(laid, turns_of(turns, tokens_of(sequences, way, ranks, rank)))
        out = between_fences(laid, "cpu").correct(spec, **given)
        kept.append(None if turns is None else out.keep_turns.tolist())
        return outcome(laid, out)

    with shaped(shapes), watched(seed=seed):
        parts = group.run(of_rank)
    assert kept == kept[:1] * ranks
    found = joined(parts, sequences, way, ranks)
    return (found, group.rounds) if turns is None else (found, kept[0])


def lengths_of(way, ranks):
    """Lengths that a way may cut; a zigzag has stretches of equal lengths."""
    return (0, 1, 9, 20) if way == "contiguous" else (0, 2 * ranks, 6 * ranks, 8 * ranks)


# Every kind of column that runs along a sequence, and every way in which a failure takes tokens.
SPECS = (
    rc.Spec(W("prefix", 0.8, 1.25, growth="sqrt"), rejected="zero"),
    rc.Spec(
        W("prefix", 0.9, 1.1, outside="zero", reduce="min"),
        (C("abs", "prefix", "max", upper=0.6, drop="rest"), C("tv", "prefix", "mean", upper=0.05, label="budget")),
        rejected="both",
    ),
    rc.Spec(
        W("token", upper=2.0),
        (
            C("k3", "prefix", "sum", upper=0.2, drop="rest", when="negative_advantage", label="k3"),
            C("abs", "prefix", "max", upper=0.7, drop="rest", label="abs"),
            C("k1", upper=0.5, label="token"),
            C("k2", "sequence", "sum", upper=0.9, drop="token", when="outward", label="late"),
        ),
        rejected="both",
        sums_over="kept",
    ),
    rc.Spec(
        W("product", upper=2.0),
        (C("ratio", "prefix", "min", lower=0.6, drop="sequence"), C("k1", "prefix", "mean", upper=0.2, drop="rest")),
        rejected="both",
    ),
    rc.Spec(criteria=(C("k2", "prefix", "sum", upper=0.2, drop="rest"),), detail="full"),
    # A token rejects its sequence, on other ranks too.
    rc.Spec(
        W("prefix", 0.9, 1.1, growth="sqrt"),
        (C("abs", upper=0.45, drop="sequence"), C("ratio", "prefix", "mean", upper=1.1, drop="rest")),
        sums_over="kept",
    ),
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", range(len(SPECS)))
def test_a_split_equals_the_whole(number, way):
    spec, ranks = SPECS[number], 2 + number % 2
    layout = "padded_right" if number % 2 and way == "contiguous" else "packed"
    dtype = (torch.float32, torch.bfloat16)[number % 2]
    rng = random.Random(number)
    sequences = random_sequences(number, [rng.choice(lengths_of(way, ranks)) for _ in range(4)], scale=0.2)
    sequences = rounded(sequences, dtype)
    whole = on_one(sequences, spec, dtype, SHAPES[number % 3])
    found, took = on_ranks(sequences, spec, way, ranks, dtype, layout, SHAPES[(number + 1) % 3], number)
    assert took == 2
    assert_same_results(found, whole)
    assert_same_statistics(found[3], whole[3], rounds_means=True)


# Along turns, along sequences past their turns, and along both; rests that end with their turn, and that do not.
OF_TURNS = (
    rc.Spec(
        W("prefix", 0.8, 1.25, over="turn", growth="sqrt"),
        (C("ratio", "prefix", "mean", lower=0.9, upper=1.15, label="mean"),),
        rejected="both",
    ),
    rc.Spec(
        W("prefix", 0.9, 1.1, outside="zero", reduce="min"),
        (
            C("abs", "prefix", "max", upper=0.5, within="turn", drop="rest", label="turn"),
            C("k1", "prefix", "sum", upper=0.6, drop="rest", when="negative_advantage", label="sequence"),
            C("k3", "turn", "max", upper=0.3, label="k3"),
        ),
        rejected="both",
    ),
    rc.Spec(
        W("geometric", over="turn"),
        (C("abs", "prefix", "max", upper=0.5, drop="rest", when="outward", label="rest"), C("k1", upper=0.6)),
        rejected="both",
        sums_over="kept",
    ),
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", range(len(OF_TURNS)))
def test_turns(number, way):
    """Turns lie on one rank, on several, and in both stretches of one."""
    spec, ranks = OF_TURNS[number], 2 + number % 2
    sequences = random_sequences(number, [12 * ranks // (number + 1), 0, 4 * ranks, 2 * ranks], scale=0.2)
    rng = random.Random(number)
    turns = [[0, 0, *row, 0] for row in random_turns(sequences, rng.randrange(99))]
    whole, kept = on_one(sequences, spec, torch.float32, SHAPES[number], turns=turns)
    layout = "padded_right" if number == 1 and way == "contiguous" else "packed"
    found, found_kept = on_ranks(sequences, spec, way, ranks, torch.float32, layout, SHAPES[number - 1], number, turns)
    assert found_kept == kept
    assert_same_results(found, whole)
    assert_same_statistics(found[3], whole[3], rounds_means=True)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 24))])
def test_random_specs(seed):
    """NaN, infinity and outliers; every dtype that promises bits."""
    way, ranks, dtype = WAYS[seed % 2], 1 + seed % 3, (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    sequences, spec = made(200 + seed, lengths_of(way, ranks))
    if operators.beyond_kernels(spec) is not None:
        return
    sequences = rounded(sequences, dtype)
    whole = on_one(sequences, spec, dtype, SHAPES[seed % 3])
    layout = "packed" if way == "zigzag" else "packed_gaps"
    found, _ = on_ranks(sequences, spec, way, ranks, dtype, layout, SHAPES[(seed + 1) % 3], seed)
    assert_same_results(found, whole)


def test_labels_beside_them_run_on_plain_torch():
    """Labels read statistics of sequences that the kernels do not keep; by "auto" they are those of whole sequences."""
    spec = SPECS[1]
    sequences, group, labels = random_sequences(0, (8, 4, 6), scale=0.3), Ranks(2), torch.tensor([[0], [1], [0]])

    def of_rank(rank, backend="auto"):
        laid = lay_out(picked(sequences, tokens_of(sequences, "contiguous", 2, rank)), "packed", torch.float32)
        given = {"labels": {"task": labels}, "label_names": {"task": 2}, "sequence_order": "contiguous"}
        return laid.correct(spec, backend=backend, sequence_group=Rank(rank=rank, ranks=2), **given).statistics

    laid = lay_out(sequences, "packed", torch.float32)
    whole = laid.correct(spec, labels={"task": labels}, label_names={"task": 2}).metrics(by="task")
    found = rc.Statistics.sum(group.run(of_rank)).metrics(by="task")
    assert whole == {name: pytest.approx(value, abs=2e-6, nan_ok=True) for name, value in found.items()}
    with (
        mock.patch.object(split, "dist", FAKE),
        mock.patch.object(collectives, "dist", FAKE),
        pytest.raises(ValueError, match="beside prefixes, labels and a sequence_group, got 'triton'"),
    ):
        of_rank(0, "triton")


def test_rows_in_a_zigzag():
    """Megatron pads every row to a multiple of 2 R tokens."""
    rollout = -torch.rand(3, 16, generator=torch.Generator().manual_seed(0))
    train = rollout + 0.3 * torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(16) < torch.tensor([[16], [11], [3]])
    advantages = torch.tensor([-1.0, 0.5, -0.5])
    rest = C("abs", "prefix", "sum", upper=2.5, drop="rest", when="negative_advantage")
    spec, group = rc.Spec(W("prefix", reduce="min"), (rest,)), Ranks(2)
    held = [[*range(rank * 4, rank * 4 + 4), *range(12 - rank * 4, 16 - rank * 4)] for rank in range(2)]

    def of_rank(rank):
        mine = [x[:, held[rank]] for x in (train, rollout, mask)]
        options = {"sequence_group": Rank(rank=rank, ranks=2), "sequence_order": "zigzag", "backend": "triton"}
        return rc.correct(*mine[:2], mask=mine[2], spec=spec, advantages=advantages, **options)

    with shaped(NARROW):
        whole = rc.correct(train, rollout, mask=mask, spec=spec, advantages=advantages, backend="triton")
        parts = group.run(of_rank)
    for rank, found in enumerate(parts):
        assert torch.equal(found.weights, whole.weights[:, held[rank]])
        assert torch.equal(found.mask, whole.mask[:, held[rank]])
    assert 0 < whole.mask.sum() < mask.sum()


def test_a_rest_takes_what_lies_behind_on_other_stretches():
    plan = SimpleNamespace(
        counts=("valid", "0/lost", "1/lost", "alive"),
        tests=(SimpleNamespace(drop="rest", index=0, within="sequence"), SimpleNamespace(drop="unit", index=1)),
    )
    every = torch.tensor(
        [[[5, 4], [0, 1], [2, 0], [5, 3]], [[6, 7], [2, 0], [1, 1], [4, 7]], [[1, 0], [0, 0], [1, 0], [1, 0]]]
    )
    totals, behind = without_rests(every, plan)
    assert totals.tolist() == [[12, 11], [3, 8], [4, 1], [9, 3]]
    assert behind.tolist() == [[False, False], [False, True], [True, True]]
    # The two are turns of one sequence: the first fails on the second stretch, behind which lies all of the second.
    totals, behind = without_rests(every, plan, torch.tensor([0, 2]))
    assert totals.tolist() == [[12, 11], [3, 11], [4, 1], [9, 0]]
    assert behind.tolist() == [[False, True], [False, True], [True, True]]

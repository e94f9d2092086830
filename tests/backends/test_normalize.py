"""Self-normalized weights by the kernels, and over ranks that threads play: the bits of the whole batch."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out, random_sequences, rounded, spoil
from builders.kernel_cases import INTERPRETED
from builders.rounding import near
from builders.same_bits import assert_same_results, assert_same_statistics, outcome
from builders.split_cases import Rank, joined, picked, tokens_of, turns_of
from builders.threaded_ranks import Ranks
from builders.turns import offsets_of, random_turns
from rollout_corr.definition import normalize

pytestmark = [*INTERPRETED, pytest.mark.usefixtures("one_thread")]

LENGTHS = (9, 1, 7, 0, 4, 6)
INDEX = [2, 0, 0, 1, 2, 0]
CRITERIA = (rc.Criterion("ratio", lower=0.6), rc.Criterion("k1", over="sequence", reduce="sum", upper=0.8))
SPECS = {
    "tokens of a group": rc.Spec(rc.Weight.token(upper=1.5, normalize="group"), CRITERIA, "both"),
    "tokens of a sequence": rc.Spec(rc.Weight.token(upper=1.5, normalize="sequence"), CRITERIA, "zero"),
    "products": rc.Spec(rc.Weight.product(normalize="group"), CRITERIA[1:], "zero"),
    "geometric means": rc.Spec(
        rc.Weight.geometric(lower=0.9, upper=1.1, outside="zero", normalize="group"), nonfinite="neutral"
    ),
    "prefixes": rc.Spec(rc.Weight("prefix", lower=0.8, upper=1.3, normalize="group", growth="sqrt")),
}
TURNS = {
    "group": rc.Spec(rc.Weight.product(upper=3.0, over="turn", normalize="group"), CRITERIA[1:], "both"),
    "sequence": rc.Spec(rc.Weight.geometric(over="turn", normalize="sequence")),
}


def batch_of(seed):
    return rounded(spoil(random_sequences(seed, LENGTHS), seed), torch.float32)


@pytest.mark.parametrize(
    ("name", "layout"), list(zip(list(SPECS)[:4], ("packed", "padded_right", "list", "packed"), strict=True))
)
def test_the_kernels_and_the_division(name, layout, device):
    laid = lay_out(batch_of(1), layout, torch.float32).to(device)
    index = {"group_index": torch.tensor(INDEX, device=device)}
    found = outcome(laid, laid.correct(SPECS[name], backend="triton", **index))
    wanted = outcome(laid, laid.correct(SPECS[name], backend="torch", **index))
    assert found[1:3] == wanted[1:3]
    for ours, theirs in zip(*([w for row in rows for w in row] for rows in (found[0], wanted[0])), strict=True):
        assert float.fromhex(ours) == near(float.fromhex(theirs), torch.float32)


@pytest.mark.parametrize("way", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", [name for name in SPECS if name != "prefixes"])
def test_sequences_on_several_ranks(name, way):
    for seed, ranks in ((0, 2), (1, 3)):
        sequences, group = batch_of(seed), Ranks(ranks)
        index = torch.tensor(INDEX)

        def of_rank(rank, sequences=sequences, group=group, ranks=ranks, index=index):
            laid = lay_out(picked(sequences, tokens_of(sequences, way, ranks, rank)), "packed", torch.float32)
            options = {"sequence_group": Rank(rank=rank, ranks=ranks), "group_index": index}
            return outcome(laid, laid.correct(SPECS[name], backend="torch", **options))

        laid = lay_out(sequences, "packed", torch.float32)
        whole = outcome(laid, laid.correct(SPECS[name], group_index=index))
        found = joined(group.run(of_rank), sequences, way, ranks)
        assert_same_results(found, whole)
        assert_same_statistics(found[3], whole[3], rounds_means=True)
        assert group.rounds == 2


@pytest.mark.parametrize("name", TURNS)
def test_turns_on_several_ranks(name):
    sequences, ranks, group = batch_of(2), 2, Ranks(2)
    turns, index = random_turns(sequences, 2), torch.tensor(INDEX)
    laid = lay_out(sequences, "packed", torch.float32)
    whole = outcome(laid, laid.correct(TURNS[name], turns=offsets_of(laid, turns), group_index=index))

    def of_rank(rank):
        held = tokens_of(sequences, "zigzag", ranks, rank)
        laid = lay_out(picked(sequences, held), "packed", torch.float32)
        options = {"sequence_group": Rank(rank=rank, ranks=ranks), "group_index": index}
        return outcome(laid, laid.correct(TURNS[name], turns=offsets_of(laid, turns_of(turns, held)), **options))

    assert_same_results(joined(group.run(of_rank), sequences, "zigzag", ranks), whole)


@pytest.mark.parametrize("name", SPECS)
def test_groups_on_several_ranks(name):
    """Each rank has every third sequence, one of them none of some groups, and all divide by the means of all."""
    sequences, group = batch_of(4), Ranks(3)
    laid = lay_out(sequences, "packed", torch.float32)
    whole = outcome(laid, laid.correct(SPECS[name], group_index=torch.tensor(INDEX), group_count=3))

    def of_rank(rank):
        laid = lay_out(sequences[rank::3], "packed", torch.float32)
        index = torch.tensor(INDEX[rank::3])
        options = {"batch_group": Rank(rank=rank, ranks=3), "group_index": index, "group_count": 3}
        return outcome(laid, laid.correct(SPECS[name], **options))

    parts = group.run(of_rank)
    for rank, part in enumerate(parts):
        assert_same_results(part, whole, range(rank, len(sequences), 3))
    assert_same_statistics(rc.Statistics.sum(part[3] for part in parts), whole[3], rounds_means=True)
    assert group.rounds == (0 if name == "tokens of a sequence" else 1)


def test_groups_by_size_stay_on_their_rank():
    sequences, group = batch_of(5), Ranks(3)
    spec = SPECS["products"]
    laid = lay_out(sequences, "packed", torch.float32)
    whole = outcome(laid, laid.correct(spec, group_size=2))

    def of_rank(rank):
        laid = lay_out(sequences[2 * rank : 2 * rank + 2], "packed", torch.float32)
        return outcome(laid, laid.correct(spec, batch_group=Rank(rank=rank, ranks=3), group_size=2))

    for rank, part in enumerate(group.run(of_rank)):
        assert_same_results(part, whole, (2 * rank, 2 * rank + 1))
    assert group.rounds == 0


def test_an_index_outside_names_no_group():
    """An error where values are read; on a device these sequences lie in a column of their own."""
    index = torch.tensor([0, 5, -1, 1])
    totals = torch.arange(24).view(6, 4)
    found = normalize.totals_of_groups(totals, normalize.placed(index, 2), 2)
    assert found[:, :2].tolist() == [[row[0], row[3]] for row in totals.tolist()]
    assert normalize.placed(index, 2).tolist() == [0, 2, 2, 1]

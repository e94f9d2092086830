"""Prefixes of sequences that are split over ranks: to the bit those of whole sequences. Here threads play the ranks."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out, random_sequences, rounded, spoil
from builders.same_bits import assert_same_results, assert_same_statistics, outcome
from builders.split_cases import Rank, joined, picked, tokens_of
from builders.threaded_ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def together(sequences, spec, way, ranks, dtype, layout):
    """The outcome of `correct` on the ranks, as one, and the all-reduces that it took."""
    group = Ranks(ranks)

    def of_rank(rank):
        laid = lay_out(picked(sequences, tokens_of(sequences, way, ranks, rank)), layout, dtype, seed=rank)
        return outcome(laid, laid.correct(spec, sequence_group=Rank(rank=rank, ranks=ranks), sequence_order=way))

    return joined(group.run(of_rank), sequences, way, ranks), group.rounds


SPECS = {
    "sum": (rc.Spec(rc.Weight("prefix", lower=0.8, upper=1.3, growth="sqrt")), 2),
    "mean": (rc.Spec(rc.Weight("prefix", upper=1.2, reduce="mean", normalize=None), detail="full"), 2),
    "min": (rc.Spec(rc.Weight("prefix", reduce="min"), nonfinite="neutral"), 2),
    "criteria": (
        rc.Spec(
            rc.Weight.token(),
            (
                rc.Criterion("ratio", "prefix", "sum", 0.7, 1.5, label="product"),
                rc.Criterion("abs", "prefix", "max", upper=0.7, drop="rest", when="outward", label="divergence"),
                rc.Criterion("tv", "prefix", "mean", upper=0.2, drop="rest", growth="sqrt", label="budget"),
                rc.Criterion("k1", "sequence", "sum", upper=1.0),
                rc.Criterion("external", name="entropy", upper=1.6),
            ),
            "both",
            sums_over="kept",
        ),
        3,
    ),
    "propagate": (
        rc.Spec(
            rc.Weight("prefix"), (rc.Criterion("k1", "prefix", "min", lower=-0.9, drop="sequence"),),
            nonfinite="propagate",
        ),
        2,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("way", "layout"), [("contiguous", "padded_right"), ("zigzag", "packed")])
@pytest.mark.parametrize("name", SPECS)
def test_a_split_equals_the_whole(name, way, layout):
    spec, rounds = SPECS[name]
    for ranks, dtype in ((2, torch.bfloat16), (3, torch.float32)):
        # A zigzag has stretches of equal lengths.
        lengths = (12, 0, 24, 36, 12) if layout == "packed" else (24, 5, 1)
        sequences = random_sequences(ranks, lengths, scale=0.3, invalid=0.3)
        sequences = rounded(spoil(sequences, 1, share=0.3) if name == "propagate" else sequences, dtype)
        laid = lay_out(sequences, "packed", dtype)
        whole = outcome(laid, laid.correct(spec))
        found, took = together(sequences, spec, way, ranks, dtype, layout)
        assert took == rounds
        assert_same_results(found, whole)
        if name != "propagate":
            assert_same_statistics(found[3], whole[3], rounds_means=True)


def test_rows_in_a_zigzag():
    """Megatron pads every row to a multiple of 2 R tokens."""
    rollout = -torch.rand(3, 16, generator=torch.Generator().manual_seed(0))
    train = rollout + 0.3 * torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(16) < torch.tensor([[16], [11], [3]])
    spec = rc.Spec(rc.Weight("prefix", reduce="min"), (rc.Criterion("abs", "prefix", "sum", upper=2.5, drop="rest"),))
    whole, group = rc.correct(train, rollout, mask=mask, spec=spec), Ranks(2)
    held = [[*range(rank * 4, rank * 4 + 4), *range(12 - rank * 4, 16 - rank * 4)] for rank in range(2)]

    def of_rank(rank):
        mine = [x[:, held[rank]] for x in (train, rollout, mask)]
        ranks = rc.Ranks(sequence=Rank(rank=rank, ranks=2), order="zigzag")
        return rc.correct(*mine[:2], rc.Batch(mask=mine[2], ranks=ranks), spec=spec)

    for rank, found in enumerate(group.run(of_rank)):
        assert torch.equal(found.weights, whole.weights[:, held[rank]])
        assert torch.equal(found.mask, whole.mask[:, held[rank]])
    assert 0 < whole.mask.sum() < mask.sum()

"""All units in one Spec over ranks: the bits of whole sequences, and the metrics of labels."""

from __future__ import annotations

import random

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out, random_sequences, spoil
from builders.calls import bundled_loss
from builders.rounding import near
from builders.same_bits import assert_same_results, assert_same_statistics, outcome
from builders.split_cases import Rank, joined, picked, tokens_of, turns_of
from builders.threaded_ranks import Ranks
from builders.turns import offsets_of, random_turns
from builders.unit_cases import random_spec

pytestmark = pytest.mark.usefixtures("one_thread")


def check(seed):
    rng = random.Random(seed)
    ranks, way = rng.choice((1, 2, 3)), rng.choice(("contiguous", "zigzag"))
    lengths = [rng.choice((0, 1, 2, 5, 9, 17)) for _ in range(rng.randint(1, 5))]
    layout = rng.choice(("packed", "padded_right", "packed_row"))
    if len(lengths) == 1 and layout == "packed_row":
        layout = "packed"  # there [1, 1] is refused as the labels of sequences
    batch = random_sequences(seed, lengths, invalid=rng.choice((0.0, 0.3)))
    batch = spoil(batch, seed) if rng.random() < 0.4 else batch
    turns, dtype = random_turns(batch, seed), rng.choice((torch.float32, torch.bfloat16))
    spec = next(spec for spec in iter(lambda: random_spec(rng), None) if not spec.has_prefixes)
    ids = torch.tensor([rng.choice((0, 1, 2, -1, 9)) for _ in batch])

    def correct(laid, lengths_of_turns, **more):
        offsets = offsets_of(laid, lengths_of_turns)
        places = ids if laid.cu_seqlens is None else ids[:, None]
        given = {"labels": {"place": places}, "label_names": {"place": 3, "age": 4}, "turns": offsets}
        versions = {"versions": laid.versions, "current_version": laid.current_version}
        return laid.correct(spec, **given, **versions, **more)

    kept = [None] * ranks

    def of_rank(rank):
        held = tokens_of(batch, way, ranks, rank)
        laid = lay_out(picked(batch, held), layout, dtype, seed=rank)
        out = correct(laid, turns_of(turns, held), sequence_group=Rank(rank=rank, ranks=ranks))
        kept[rank] = out.keep_turns.tolist()
        return outcome(laid, out)

    laid, case = lay_out(batch, "packed", dtype), f"{seed} {way} {ranks} {layout} {spec}"
    if len(offsets_of(laid, turns)) == laid.train.numel():
        turns[-1].append(0)  # else the offsets could be ids
    out = correct(laid, turns)
    whole = outcome(laid, out)
    parts = Ranks(ranks).run(of_rank)
    assert None not in parts, case
    found = joined(parts, batch, way, ranks)
    if found[0] is not None and spec.weight is not None and spec.weight.normalize == "batch":
        # The mean of the batch is a float sum, and may be rounded otherwise where ranks add up theirs.
        for mine, wanted in zip(found[0], whole[0], strict=True):
            assert [float.fromhex(x) for x in mine] == near([float.fromhex(x) for x in wanted], torch.float32), case
        found, whole = (None, *found[1:]), (None, *whole[1:])
    assert_same_results(found, whole)
    assert kept == [out.keep_turns.tolist()] * ranks, case
    assert_same_statistics(found[3], whole[3], rounds_means=True)
    for by in ("place", "age"):
        mine, wanted = (one[3].metrics(by=by) for one in (found, whole))
        # A standard deviation near 0 is the root of a rounding.
        assert {key: x for key, x in mine.items() if "std" not in key} == near(
            {key: x for key, x in wanted.items() if "std" not in key}, torch.float32
        ), (by, case)


def test_units_together_over_ranks():
    for seed in range(8):
        check(seed)


def test_offsets_beside_a_sequence_group_may_be_as_many_as_the_tokens_of_a_rank():
    """Ids are refused there, so nothing is ambiguous: a rank that raised would leave the others waiting."""

    def of_rank(rank):
        logp, ranks = torch.zeros(3), rc.Ranks(sequence=Rank(rank=rank, ranks=2))
        batch = rc.Batch(cu_seqlens=torch.tensor([0, 3]), turns=torch.tensor([0, 1, 3]), ranks=ranks)
        return rc.correct(logp, logp, batch, spec=rc.Spec(turns=True))

    assert [out.keep_turns.tolist() for out in Ranks(2).run(of_rank)] == [[True, True]] * 2


@pytest.mark.parametrize("through", ["sequence", "token"])
def test_gspo_over_turns_over_ranks(through):
    """Values add up, and the gradient of each token is that of whole sequences."""
    batch = random_sequences(2, (9, 4, 7, 0, 5), invalid=0.2)
    turns, surrogate = random_turns(batch, 2), rc.GSPO(0.05, 0.1, through=through, over="turn")

    def loss(laid, lengths, **group):
        new = (laid.train + 0.05 * torch.sin(7 * laid.train.nan_to_num(0, 0, 0))).requires_grad_()
        given = {"mask": laid.mask, "cu_seqlens": laid.cu_seqlens, "old_logp": laid.rollout, **group}
        out = rc.policy_loss(
            new, laid.advantages, **bundled_loss(surrogate=surrogate, turns=offsets_of(laid, lengths), **given)
        )
        out.value.backward()
        return out.value.item(), laid.read(new.grad)

    value, gradient = loss(lay_out(batch, "packed"), turns)
    for way in ("contiguous", "zigzag", "last"):

        def of_rank(rank, way=way):
            held = tokens_of(batch, way, 3, rank)
            group = {"sequence_group": Rank(rank=rank, ranks=3)}
            return loss(lay_out(picked(batch, held), "packed", seed=rank), turns_of(turns, held), **group)

        parts = Ranks(3).run(of_rank)
        assert sum(mine for mine, _ in parts) == near(value)
        for rank, (_, slopes) in enumerate(parts):
            held = tokens_of(batch, way, 3, rank)
            for row, places, whole in zip(slopes, held, gradient, strict=True):
                assert row == near([whole[t] for t in places])

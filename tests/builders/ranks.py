"""The work of a rank of test_distributed, in a module that another process can import."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch.distributed as dist

import rollout_corr as rc
from builders.batches import lay_out, random_sequences
from builders.calls import bundled
from builders.loss_cases import LaidLoss
from builders.same_bits import outcome
from builders.split_cases import SPECS, cases, loss_cases, picked, tokens_of
from rollout_corr.testing import ExampleBatch, example_batch

NORMALIZED = rc.Spec(
    weight=rc.Weight.product(upper=3.0, normalize="batch"),
    criteria=(rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.995, upper=1.005),),
    detail="full",
)


@contextlib.contextmanager
def counted():
    """Record the operation of every all-reduce."""
    calls = []
    original = dist.all_reduce

    def counting(*args, **kwargs):
        calls.append(kwargs.get("op", dist.ReduceOp.SUM))
        return original(*args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counting):
        yield calls


def part(batch: ExampleBatch, first: int, last: int, **groups: object) -> rc.Correction:
    """The correction of some of the sequences."""
    cu = batch.cu_seqlens[first : last + 1]
    tokens = slice(int(cu[0]), int(cu[-1]))
    return rc.correct(
        batch.train_logp[tokens],
        batch.rollout_logp[tokens],
        **bundled(mask=batch.mask[tokens], cu_seqlens=cu - cu[0], spec=NORMALIZED, **groups),
    )


def example() -> ExampleBatch:
    return example_batch(sequences=30, median_length=40)


# Some of the cases of test_split.py, with every way of splitting.
CASES = list(cases(every=5))
LOSS_CASES = list(loss_cases(every=4))


# --- what is looked at ---


def split_batches(rank, ranks):
    """Every case on this rank: what it gave, and how many collectives it took."""
    found = []
    for _, batch, spec, way, layout, dtype in CASES:
        laid = lay_out(picked(batch, tokens_of(batch, way, ranks, rank)), layout, dtype, seed=rank)
        with counted() as calls:
            out = laid.correct(spec, sequence_group=dist.group.WORLD)
        found.append((outcome(laid, out), len(calls)))
    return found


def outcome_of_loss(laid, out):
    """Value, gradient and mask per sequence, and the statistics."""
    return out.value.item(), laid.gradient(out.value)[0], laid.laid.read(out.mask), out.statistics


def split_losses(rank, ranks):
    """Every case on this rank: what it gave, and how many collectives it took."""
    found = []
    for _, batch, options, way, layout, dtype in LOSS_CASES:
        laid = LaidLoss(picked(batch, tokens_of(batch, way, ranks, rank)), layout, dtype, seed=rank)
        with counted() as calls:
            out = laid(**options, sequence_group=dist.group.WORLD)
        found.append((outcome_of_loss(laid, out), len(calls)))
    return found


def uneven_shares(rank, ranks):
    """Data parallel: uneven shares of the sequences, none on the last rank, a mean over all of them."""
    edges = [0, 7, *[30] * (ranks - 1)]
    with counted() as of_mean:
        out = part(example(), edges[rank], edges[rank + 1], batch_group=dist.group.WORLD)
    with counted() as of_statistics:
        merged = out.statistics.all_reduce()
    return {"weights": out.weights, "metrics": merged.metrics(), "calls": (len(of_mean), len(of_statistics))}


def micro_batches(rank, ranks):
    """As many micro-batches as the rank's number says, none on rank 0."""
    edges = torch.linspace(0, 30, ranks * (ranks - 1) // 2 + 1).long().tolist()
    first = rank * (rank - 1) // 2
    parts = [part(example(), edges[i], edges[i + 1]).statistics for i in range(first, first + rank)]
    statistics = rc.Statistics.sum([rc.Statistics.nothing(NORMALIZED), *parts])
    return statistics.all_reduce().metrics()


def asynchronous(rank, ranks):
    """Compare `correct_async` with `correct`, and count the all-reduces before the result was asked for."""
    batch = random_sequences(5, (9, 4))
    laid = lay_out(picked(batch, tokens_of(batch, "zigzag", ranks, rank)), "packed", torch.float32)
    spec = SPECS["geometric and veto"]
    with counted() as calls:
        pending = laid.correct(spec, sequence_group=dist.group.WORLD, call=rc.correct_async)
        before = len(calls)
        out = pending.result()
    done = pending.done() and pending.result() is out
    at_once = laid.correct(spec, sequence_group=dist.group.WORLD)
    return before, len(calls), done, torch.equal(out.weights, at_once.weights)


def both_groups(rank, ranks):
    """Each rank has half of the sequences, in a sequence group of its own, and a mean over all of them."""
    alone = [dist.new_group([one]) for one in range(ranks)]
    laid = lay_out(random_sequences(9, (9, 4, 6, 5))[2 * rank : 2 * rank + 2], "packed", torch.float32)
    out = laid.correct(SPECS["token"], sequence_group=alone[rank], batch_group=dist.group.WORLD)
    return laid.read(out.weights), out.statistics.all_reduce()


def work(rank: int, ranks: int) -> dict[str, object]:
    """One rank, everything that is looked at."""
    looks = split_batches, split_losses, uneven_shares, micro_batches, asynchronous, both_groups
    return {look.__name__: look(rank, ranks) for look in looks}

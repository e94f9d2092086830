"""The work of a rank of test_distributed, in a module that another process can import."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch.distributed as dist

import rollout_corr as rc
from builders import parts
from builders.calls import bundled
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


RANKS = 2
CORRECTIONS = [parts.correction(f"processes {i}", ("sequence", "batch")[i % 3 == 2], count=RANKS) for i in range(9)]
LOSSES = [parts.loss(f"processes {name}", name, RANKS) for name in ("PPO", "GSPO", "GMPO", "AveragePPO", "SAPO")]


# --- what is looked at ---


def made(together, rank):
    """The call of a rank in the group of all."""
    return together.call(rank, dist.group.WORLD)


def corrections(rank, ranks):
    return [parts.corrected(made(together, rank)) for together in CORRECTIONS]


def losses(rank, ranks):
    return [parts.lost(made(together, rank)) for together in LOSSES]


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
    logp, batch = (
        -torch.rand(8),
        rc.Batch(cu_seqlens=torch.tensor([0, 5, 8]), ranks=rc.Ranks(sequence=dist.group.WORLD)),
    )
    given = logp, logp.flip(0), batch
    with counted() as calls:
        pending = rc.correct_async(*given, spec=rc.Spec(rc.Weight.geometric(upper=2.0)))
        before = len(calls)
        out = pending.result()
    done = pending.done() and pending.result() is out
    at_once = rc.correct(*given, spec=rc.Spec(rc.Weight.geometric(upper=2.0)))
    return before, len(calls), done, torch.equal(out.weights, at_once.weights)


def both_groups(rank, ranks):
    """Each rank has half of the sequences, in a sequence group of its own, and a mean over all of them."""
    alone = [dist.new_group([one]) for one in range(ranks)]
    logp = torch.linspace(-2.0, -0.1, 24).view(4, 6)[2 * rank : 2 * rank + 2]
    batch = rc.Batch(ranks=rc.Ranks(sequence=alone[rank], batch=dist.group.WORLD))
    out = rc.correct(logp, logp.flip(1), batch, spec=NORMALIZED)
    return out.weights, out.statistics.all_reduce().metrics()


def work(rank: int, ranks: int) -> dict[str, object]:
    """One rank, everything that is looked at."""
    looks = corrections, losses, uneven_shares, micro_batches, asynchronous, both_groups
    return {look.__name__: look(rank, ranks) for look in looks}

"""What a rank of test_distributed does, in a module that a spawned process can import."""

from __future__ import annotations

import torch
import torch.distributed as dist

import rollout_corr as rc
from rollout_corr.testing import ExampleBatch, example_batch

RANKS = 2
SPEC = rc.Spec(
    weight=rc.Weight("product", upper=3.0, normalize="batch"),
    criteria=(rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.995, upper=1.005),),
    detail="full",
)


def part(batch: ExampleBatch, first: int, last: int) -> rc.Correction:
    """The correction of some of the sequences, as one rank sees them."""
    cu = batch.cu_seqlens[first : last + 1]
    tokens = slice(int(cu[0]), int(cu[-1]))
    group = dist.group.WORLD if dist.is_initialized() else None
    return rc.correct(
        batch.train_logp[tokens],
        batch.rollout_logp[tokens],
        batch.mask[tokens],
        cu_seqlens=cu - cu[0],
        spec=SPEC,
        batch_group=group,
    )


def work(rank: int, folder: str) -> None:
    """One rank: uneven shares, collectives counted."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    out = part(example_batch(sequences=30, median_length=40), *((0, 7) if rank == 0 else (7, 30)))
    calls = 0
    original = dist.all_reduce

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    dist.all_reduce = counting
    merged = out.statistics.all_reduce()
    torch.save({"weights": out.weights, "metrics": merged.metrics(), "calls": calls}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()

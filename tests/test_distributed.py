"""What crosses ranks today: merged statistics, and the mean of batch normalisation. Real processes, gloo."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

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


def test_ranks_agree_with_one_process() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder,), nprocs=RANKS)
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]
    whole = part(example_batch(sequences=30, median_length=40), 0, 30)
    weights = torch.cat([rank["weights"] for rank in found])
    # The mean is a float64 sum of two parts instead of one: its last bit may differ, and so may the weights'.
    assert torch.allclose(weights, whole.weights, rtol=2e-7, atol=0.0)
    assert not torch.allclose(weights, part_alone(whole), rtol=1e-3)
    expected = whole.metrics()
    for rank in found:
        assert rank["calls"] == 2
        assert set(rank["metrics"]) == set(expected)
        for key, value in expected.items():
            assert abs(rank["metrics"][key] - value) <= 1e-6 * max(1.0, abs(value)), key


def part_alone(whole: rc.Correction) -> torch.Tensor:
    """The weights that ranks would get without a group, each divided by its own mean."""
    batch = example_batch(sequences=30, median_length=40)
    alone = torch.cat([part(batch, 0, 7).weights, part(batch, 7, 30).weights])
    assert alone.shape == whole.weights.shape
    return alone

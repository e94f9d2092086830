"""Context parallelism: every rank holds a part of every sequence and gets what the whole ones give.

    pip install /path/to/rollout-corr
    torchrun --nproc-per-node 4 context_parallel.py

Runs anywhere, on the CPU with gloo. Each rank takes two stretches of every sequence, one from the front and one from
the back, as Megatron cuts them; corrects; computes a GSPO loss with its gradient; and compares with a single process
that has all tokens.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

import rollout_corr as rc
from rollout_corr.testing import example_batch

SPEC = rc.Spec(
    weight=rc.Weight.geometric(upper=2.0),
    criteria=(
        rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.95, upper=1.05),
        rc.Criterion("ratio", over="sequence", reduce="min", lower=1e-4, label="veto"),
    ),
)
LOSS = rc.Loss(rc.GSPO(), rc.Mean("sequence"))


def share(cu_seqlens: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Which tokens of a pack a rank holds, [n] int64, and its own offsets, [S + 1] int64."""
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    position = torch.arange(int(cu_seqlens[-1])) - starts.repeat_interleave(lengths)
    stretch = position * 2 * ranks // lengths.repeat_interleave(lengths)
    mine = (stretch == rank) | (stretch == 2 * ranks - 1 - rank)
    held = torch.cat([torch.zeros(1, dtype=torch.int64), mine.cumsum(0)])[cu_seqlens]
    return mine.nonzero().squeeze(1), held


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("start one process a rank: torchrun --nproc-per-node 4 context_parallel.py")
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    torch.set_num_threads(1)

    # A trainer has only its own part of these.
    batch = example_batch(sequences=64, median_length=300)
    advantages = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)[:, None]
    new_logp = batch.train_logp + 0.01 * torch.sin(torch.arange(batch.train_logp.numel()))

    tokens, cu_seqlens = share(batch.cu_seqlens, rank, ranks)
    train_logp, rollout_logp, mask = batch.train_logp[tokens], batch.rollout_logp[tokens], batch.mask[tokens]
    mine = new_logp[tokens].requires_grad_()

    held = rc.Batch(mask=mask, cu_seqlens=cu_seqlens, ranks=rc.Ranks(sequence=group))
    out = rc.correct(train_logp, rollout_logp, held, spec=SPEC)
    loss = rc.policy_loss(mine, advantages, held, LOSS, old_logp=train_logp, correction=out)
    loss.value.backward()
    metrics = out.statistics.all_reduce(group).metrics()
    value = loss.value.detach().clone()
    dist.all_reduce(value)

    # The same in one process.
    everything = new_logp.clone().requires_grad_()
    given = rc.Batch(mask=batch.mask, cu_seqlens=batch.cu_seqlens)
    whole = rc.correct(batch.train_logp, batch.rollout_logp, given, spec=SPEC)
    reference = rc.policy_loss(everything, advantages, given, LOSS, old_logp=batch.train_logp, correction=whole)
    reference.value.backward()
    assert mine.grad is not None and everything.grad is not None

    expected = whole.metrics()
    # The slope of a sequence is a float32 sum over its tokens, in whatever order, and its own error is 1.3e-5.
    close = torch.allclose(mine.grad, everything.grad[tokens], rtol=5e-5, atol=1e-12)
    checks = {
        "weights, to the bit": torch.equal(out.weights, whole.weights[tokens]),
        "mask": torch.equal(out.mask, whole.mask[tokens]),
        "keep": torch.equal(out.keep, whole.keep),
        "loss": torch.allclose(value, reference.value),
        "gradient": close,
        "metrics": all(abs(metrics[key] - x) <= 1e-6 * max(1.0, abs(x)) for key, x in expected.items()),
    }
    agreeing = torch.tensor([float(x) for x in checks.values()])
    dist.all_reduce(agreeing)
    if rank == 0:
        for name, count in zip(checks, agreeing.tolist(), strict=True):
            print(f"{name}: {count:.0f} of {ranks} ranks agree with the single process")
        kept = f"{metrics['sequences_kept']:.0f} of {metrics['sequences']:.0f} sequences kept"
        print(f"{kept}, {int((~out.keep).sum())} rejected; loss {value.item():.6f}")
    dist.destroy_process_group()
    if not all(checks.values()):
        raise SystemExit(f"rank {rank} disagrees: {checks}")


if __name__ == "__main__":
    main()

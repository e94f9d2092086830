"""Calls that ranks make of each other's work, some of them with something that differs, as they run on one rank.

Test modules cannot be imported by the processes that ranks are forked from; this one can.
"""

from __future__ import annotations

import os
from unittest import mock

import torch
import torch.distributed as dist

import rollout_corr as rc
from builders.calls import bundled, bundled_loss
from builders.fresh import printed_by
from builders.ranks import counted

LOSS = {"surrogate": rc.PPO(0.2, 0.28), "mean": rc.Mean()}
OTHER_LOSSES = {
    "Objective.surrogate.high": {"surrogate": rc.PPO(0.2, 0.3)},
    "Objective.surrogate ": {"surrogate": rc.GSPO()},
    "Objective.mean.of": {"mean": rc.Mean("sequence")},
    "Objective.kl": {"kl": rc.KL("k3", 0.1), "ref_logp": torch.zeros(2, 3)},
    "total 7.0 on": {"total": 7.0},
    "mode": {"old_logp": None, "rollout_logp": torch.zeros(2, 3)},
    "Spec Spec on": {"spec": rc.Spec(), "rollout_logp": torch.zeros(2, 3)},
    "weights float32 on": {"weights": torch.ones(2, 3)},
    "wants a gradient": {"new_logp": torch.zeros(2, 3, requires_grad=True)},
}


def losing(rank, ranks, options, name):
    """Run a loss, on the last rank with other options, over a group of all ranks."""
    zeros = torch.zeros(2, 3)
    given = {"new_logp": zeros, "advantages": torch.zeros(2), "old_logp": zeros, **LOSS}
    if name == "total 7.0 on":
        given["total"] = 6.0
    if rank == ranks - 1:
        given |= options
    rc.policy_loss(**bundled_loss(**given, validate=True, sequence_group=dist.group.WORLD))


def both_groups(rank, ranks):
    """Ranks 0, 1 and 2, 3 share sequences; rank 3's Spec is another one. All of them take one batch mean."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    spec = rc.Spec(rc.Weight.token(upper=3.0 if rank == 3 else 2.0, normalize="batch"))
    groups = {"sequence_group": halves[rank // 2], "batch_group": dist.group.WORLD}
    rc.correct(torch.zeros(2, 3), torch.zeros(2, 3), **bundled(spec=spec, validate=True, **groups))


def data_parallel(rank, ranks):
    """Ranks with other numbers of sequences, in other layouts, which agree on everything else."""
    n, spec = 1 + rank, rc.Spec(rc.Weight.token(normalize="batch"))
    layout = {} if rank else {"cu_seqlens": torch.tensor([0, n])}
    zeros = torch.zeros(n, 3) if rank else torch.zeros(n)
    return rc.correct(
        zeros, zeros, **bundled(spec=spec, validate=True, batch_group=dist.group.WORLD, **layout)
    ).keep.tolist()


def collectives_of(rank, ranks, validate):
    group = dist.new_group([0, 2] if rank == 0 else [2, 0])
    if rank == 1:
        return "outside"
    with counted() as calls:
        zeros = torch.zeros(2, 3)
        rc.correct(zeros, zeros, rc.Batch(ranks=rc.Ranks(batch=group, sequence=group), validate=validate))
    return len(calls)


def groups_gone(rank, ranks):
    """The errors of groups that cannot be used, from a call and from statistics."""
    zeros, destroyed, others = torch.zeros(2, 3), dist.new_group([0, 1]), dist.new_group([0])
    dist.destroy_process_group(destroyed)
    statistics, found = rc.correct(zeros, zeros).statistics, []
    for call in (lambda g: rc.correct(zeros, zeros, rc.Batch(ranks=rc.Ranks(sequence=g))), statistics.all_reduce):
        for group in (destroyed, others):
            try:
                found.append(call(group) and "no error")
            except (TypeError, ValueError) as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def elsewhere(rank, ranks):
    """Split tensors of the CPU over a group for those of a GPU."""
    zeros = torch.zeros(2, 3)
    rc.correct(zeros, zeros, rc.Batch(ranks=rc.Ranks(sequence=dist.new_group(backend="cuda:gloo"))))


def example(rank, ranks, file, folder):
    """Run an example that is started once a rank, within the group that is there; give what it prints."""
    os.environ["RANK"] = str(rank)
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        return printed_by(file, folder, [])

"""Calls over ranks, for test_groups: some differ on one rank, some that rank leaves out, and some are right.

Test modules cannot be imported by the processes that ranks are forked from; this one can.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from dataclasses import replace

import torch
import torch.distributed as dist

import rollout_corr as rc
from builders.calls import bundled, bundled_loss
from builders.ranks import counted
from rollout_corr.metrics import collectives

# A rank that is awaited in vain costs so many seconds.
TIMEOUT = 3.0
# The timeout, the second in which ranks listen for each other, and what a busy machine takes.
BOUND = TIMEOUT + 12.0


# --- one that differs ---

SPEC = rc.Spec(
    rc.Weight.product(upper=2.0), (rc.Criterion("k3", over="sequence", reduce="mean", upper=0.1, label="drift"),)
)


WRONG_MASK = "raised ValueError: mask: expected"
# What differs on one rank, by the words that name it.
PLANTED = {
    "Spec.weight.upper": {"spec": replace(SPEC, weight=replace(SPEC.weight, upper=math.nextafter(2.0, 3.0)))},
    "Spec.criteria": {"spec": replace(SPEC, criteria=())},
    "Spec.criteria[0].upper": {"spec": replace(SPEC, criteria=(replace(SPEC.criteria[0], upper=0.2),))},
    "Spec.weight": {"spec": replace(SPEC, weight=None)},
    "rollout_logp": {"rollout_logp": torch.zeros(2, 4, dtype=torch.bfloat16), "train_logp": torch.zeros(2, 4)},
    "sequences": dict.fromkeys(("train_logp", "rollout_logp"), torch.zeros(3, 4)) | {"advantages": torch.zeros(3)},
    "advantages[1]": {"advantages": torch.tensor([0.5, 0.25])},
    "layout": dict.fromkeys(("train_logp", "rollout_logp"), torch.zeros(6))
    | {"cu_seqlens": torch.tensor([0, 4, 6]), "advantages": torch.tensor([[0.5], [-0.5]])},
    "rollout_corr": {},
    WRONG_MASK: {"mask": torch.ones(5)},
}


def arguments(rank, what, bad):
    """The arguments of `correct` on a rank, which holds some tokens of two sequences; on the bad one some differ."""
    given = {"train_logp": -torch.rand(2, 3 + rank), "rollout_logp": -torch.rand(2, 3 + rank), "spec": SPEC}
    given |= {"advantages": torch.tensor([0.5, -0.5])} | (PLANTED[what] if rank == bad else {})
    if rank == bad and what == "rollout_corr":
        collectives.__version__ = "0.0.9"
    return given


def differing(rank, ranks, what, bad):
    return rc.correct(**bundled(sequence_group=dist.group.WORLD, validate=True, **arguments(rank, what, bad)))


def merging(rank, ranks, what, bad):
    """Reduce statistics of a call on this rank alone."""
    return rc.correct(**bundled(**arguments(rank, what, bad))).statistics.all_reduce()


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


def names(error, rank, ranks, what):
    """Tell whether an error says that this rank has something else. Of two ranks, either may be the other one."""
    places = rf"rank {rank}\b" if what.startswith("raised") else rf"on rank {rank} against"
    if ranks == 2 and not what.startswith("raised"):
        places = r"on rank 1 against .* on rank 0"
    return what in error and re.search(places, error) is not None


# --- one that stays away ---


def stays(rank):
    """Be there, and never call."""
    time.sleep(60 * TIMEOUT)


def leaves(rank):
    """End the process as an error does."""
    os._exit(1)


def dies(rank):
    """End the process as the kernel does."""
    os.kill(os.getpid(), signal.SIGKILL)


def stops(rank):
    """Be stopped, as a debugger or a full cgroup does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def raises(rank):
    """Fail on an argument, and stay alive."""
    rc.correct(
        torch.zeros(2, 3), torch.zeros(2, 3), rc.Batch(mask=torch.zeros(5), ranks=rc.Ranks(sequence=dist.group.WORLD))
    )


AWAY = (stays, leaves, dies, raises, stops)
STEPS = ("correct: ", "policy_loss: ", "Statistics.all_reduce: ", "batch_group: ")


def step(rank, ranks, away, bad, at):
    """Correct, train, reduce and count; the bad rank stays away at one of the four."""
    group, zeros = dist.group.WORLD, torch.zeros(2, 3)
    for number, name in enumerate(STEPS):
        if rank == bad and number == at:
            away(rank)
        if name == "correct: ":
            out = rc.correct(zeros, zeros, rc.Batch(ranks=rc.Ranks(sequence=group)), spec=SPEC)
        elif name == "policy_loss: ":
            rc.policy_loss(
                zeros, torch.zeros(2), rc.Batch(ranks=rc.Ranks(sequence=group)), old_logp=zeros, correction=out
            )
        elif name == "Statistics.all_reduce: ":
            out.statistics.all_reduce(group)
        else:
            rc.policy_loss(zeros, torch.zeros(2), rc.Batch(ranks=rc.Ranks(batch=group)), old_logp=zeros)


def misses(error, name, rank, bad):
    """Tell whether the error of a call on a rank says that it waited, and did not hear of the bad one.

    Others that still wait may be named too: not all ranks hear of a process that ended before their timeout.
    """
    found = re.match(rf"RuntimeError: {name}.*rank {rank} timed out waiting .* no report from ranks? ([\d, ]+):", error)
    return found is not None and str(bad) in found[1].split(", ")


# --- all there, and equal ---


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

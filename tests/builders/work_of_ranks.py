"""The work of ranks in processes, in a module that another process can import; see forked_ranks.py."""

from __future__ import annotations

import os
import re
import signal
import time

import torch
import torch.distributed as dist

import rollout_corr as rc
from builders import parts

# A rank that is awaited in vain costs so many seconds.
TIMEOUT = 3.0
# The timeout, the second in which ranks listen for each other, and what a busy machine takes.
BOUND = TIMEOUT + 12.0

# --- random calls, which threads make too ---

RANKS = 2
CORRECTIONS = [parts.correction(f"processes {i}", ("sequence", "batch")[i % 3 == 2], count=RANKS) for i in range(6)]
LOSSES = [parts.loss(f"processes {name}", name, RANKS) for name in ("PPO", "GSPO")]


def random_calls(rank, ranks):
    """The results of corrections and of losses, and the metrics of the corrections reduced over the ranks."""
    group = dist.group.WORLD
    corrections = [parts.corrected(together.call(rank, group)) for together in CORRECTIONS]
    losses = [parts.lost(together.call(rank, group)) for together in LOSSES]
    return corrections, losses, [statistics.all_reduce(group).metrics() for *_, statistics in corrections]


# --- groups ---


def both_groups(rank, ranks):
    """Ranks 0, 1 and 2, 3 share sequences; rank 3's Spec is another one. All of them take one batch mean."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    spec = rc.Spec(rc.Weight.token(upper=3.0 if rank == 3 else 2.0, normalize="batch"))
    groups = rc.Ranks(sequence=halves[rank // 2], batch=dist.group.WORLD)
    rc.correct(torch.zeros(2, 3), torch.zeros(2, 3), rc.Batch(ranks=groups, validate=True), spec=spec)


def a_mean_of_both_groups(rank, ranks):
    """Weights where each rank has half of the sequences, in a sequence group of its own, and a mean over all."""
    alone = [dist.new_group([one]) for one in range(ranks)]
    logp = torch.linspace(-2.0, -0.1, 24).view(4, 6)[2 * rank : 2 * rank + 2]
    batch = rc.Batch(ranks=rc.Ranks(sequence=alone[rank], batch=dist.group.WORLD))
    return rc.correct(logp, logp.flip(1), batch, spec=rc.Spec(rc.Weight.product(normalize="batch"))).weights


def loss_of_one_group(rank, ranks):
    """The share of a loss whose sequences lie on all ranks, which are the batch too: each sequence counts once."""
    old, new = torch.linspace(-2.0, -0.1, 48).view(2, 4, 6)[:, :, 3 * rank : 3 * rank + 3]
    batch = rc.Batch(ranks=rc.Ranks(sequence=dist.group.WORLD, batch=dist.group.WORLD))
    return rc.policy_loss(new, torch.ones(4), batch, old_logp=old).value.item()


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
    batch = rc.Batch(mask=torch.zeros(5), ranks=rc.Ranks(sequence=dist.group.WORLD))
    rc.correct(torch.zeros(2, 3), torch.zeros(2, 3), batch)


AWAY = (stays, leaves, dies, raises, stops)
STEPS = ("correct: ", "policy_loss: ", "Statistics.all_reduce: ", "ranks.batch: ")


def step(rank, ranks, away, bad, at):
    """Correct, train, reduce and count; the bad rank stays away at one of the four."""
    group, zeros = dist.group.WORLD, torch.zeros(2, 3)
    of_sequences, of_batch = rc.Batch(ranks=rc.Ranks(sequence=group)), rc.Batch(ranks=rc.Ranks(batch=group))
    for number, name in enumerate(STEPS):
        if rank == bad and number == at:
            away(rank)
        if name == "correct: ":
            out = rc.correct(zeros, zeros, of_sequences, spec=rc.Spec(rc.Weight.product(upper=2.0)))
        elif name == "policy_loss: ":
            rc.policy_loss(zeros, torch.zeros(2), of_sequences, old_logp=zeros, correction=out)
        elif name == "Statistics.all_reduce: ":
            out.statistics.all_reduce(group)
        else:
            rc.policy_loss(zeros, torch.zeros(2), of_batch, old_logp=zeros)


def misses(error, name, rank, bad):
    """Tell whether the error of a call on a rank says that it waited, and did not hear of the bad one.

    Others that still wait may be named too: not all ranks hear of a process that ended before their timeout.
    """
    found = re.match(rf"RuntimeError: {name}.*rank {rank} timed out waiting .* no report from ranks? ([\d, ]+):", error)
    return found is not None and str(bad) in found[1].split(", ")

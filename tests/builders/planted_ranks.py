"""Calls that differ on one rank or that one rank leaves out, each run on its ranks; whether an error names the rank."""

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
from builders.calls import bundled
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

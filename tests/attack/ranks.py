"""Random runs of 2 to 4 ranks: equal ones, one that differs, and one that raises, leaves, stalls or is killed.

Equal ranks have to give what one process gives, to the bit. A difference has to be named with its rank on every rank.
When a rank stays away, all others have to say within the timeout that they waited, and for which.
"""

from __future__ import annotations

import math
import os
import random
import re
import signal
import time
from dataclasses import replace

import torch
import torch.distributed as dist

import rollout_corr as rc
from attack.campaign import Area, Outcome
from builders.batches import lay_out, random_sequences, wild
from builders.calls import bundled
from builders.forked_ranks import run
from builders.loss_cases import LaidLoss, only, random_batch
from builders.rounding import is_near
from builders.same_bits import assert_same_results, assert_same_statistics, outcome
from builders.split_cases import SPECS, WAYS, joined, picked, together, tokens_of
from rollout_corr.metrics import collectives

# A rank that is awaited in vain costs so many seconds.
TIMEOUT = 3.0
# The timeout, the second in which ranks listen for each other, and what a busy machine takes.
BOUND = TIMEOUT + 12.0

# SkyRL counts padding, and NaN that is let through is no number to compare.
NAMES = [name for name in SPECS if name not in ("skyrl", "poisoned")]
SURROGATES = (rc.PPO(0.2, 0.3), rc.GSPO(0.1, 0.2), rc.GMPO(0.2, 0.2), rc.Reinforce())


def random_lengths(rng):
    return [rng.choice((0, 1, 2, 5, 9, 17)) for _ in range(rng.randint(0, 7))]


def random_spec(rng):
    """Draw a Spec and give it other numbers."""
    spec = SPECS[rng.choice(NAMES)]
    if spec.weight is not None:
        spec = replace(spec, weight=replace(spec.weight, upper=rng.uniform(1.1, 4.0), normalize=None))
    return replace(spec, clamp=rng.uniform(5.0, 20.0), detail=rng.choice(("basic", "full")))


# --- equal ranks ---


def equal(rank, ranks, seed):
    """Correct, reduce and train on this rank's tokens; the first rank alone gives the whole batch's results too."""
    rng = random.Random(seed)
    lengths, spec, way = random_lengths(rng), random_spec(rng), rng.choice(sorted(WAYS))
    dtype, layout = rng.choice((torch.float32, torch.bfloat16, torch.float16)), rng.choice(("packed", "padded_right"))
    validate, asynchronous, group = rng.random() < 0.5, rng.random() < 0.3, dist.group.WORLD
    batch = wild(random_sequences(seed, lengths))
    laid = lay_out(picked(batch, tokens_of(batch, way, ranks, rank)), layout, dtype, seed=rank)
    call = rc.correct_async if asynchronous else rc.correct
    out = laid.correct(spec, sequence_group=group, validate=validate, call=call)
    out = out.result() if asynchronous else out
    reduced = out.statistics.all_reduce(group)

    losses = only(random_batch(seed, lengths, broken=rng.random() < 0.3), "old", "weights", "train_mask")
    options = {"surrogate": rng.choice(SURROGATES), "mean": rc.Mean(over=rng.choice(("original", "kept")))}
    part = LaidLoss(picked(losses, tokens_of(losses, way, ranks, rank)), "packed", torch.float64, seed=rank)
    loss = part(**options, sequence_group=group, validate=validate)
    found = [outcome(laid, out), reduced, (loss.value.item(), part.gradient(loss.value)[0])]
    if rank == 0:
        whole, whole_loss = lay_out(batch, "packed", dtype), LaidLoss(losses, "packed", torch.float64)
        value = whole_loss(**options)
        found += [outcome(whole, whole.correct(spec)), (value.value.item(), whole_loss.gradient(value.value)[0])]
        found += [batch, losses, way]
    return found


def judge_equal(seed, ranks):
    ended = run(equal, ranks, seed)
    for rank, one in enumerate(ended):
        if not one.answered or one.error:
            return Outcome("wrong", f"rank {rank} of equal ones: {one.error or 'no answer'}")
    parts = [one.value for one in ended]
    whole, (value, gradient), batch, losses, way = parts[0][3:]
    split = joined([part[0] for part in parts], batch, way, ranks)
    assert_same_results(split, whole)
    assert_same_statistics(split[3], whole[3], rounds_means=True, most=1e15)
    for part in parts:
        if not torch.equal(part[1].sums, parts[0][1].sums) or not torch.equal(part[1].maxima, parts[0][1].maxima):
            return Outcome("wrong", "reduced statistics differ among ranks")
    values, gradients = zip(*(part[2] for part in parts), strict=True)
    if not is_near(sum(values), value):
        return Outcome("wrong", f"the loss is {sum(values)!r} on {ranks} ranks and {value!r} on one")
    for row, expected in zip(together(gradients, losses, way, ranks), gradient, strict=True):
        for a, b in zip(row, expected, strict=True):
            if not is_near(a, b):
                return Outcome("wrong", f"a gradient is {a!r} on {ranks} ranks and {b!r} on one")
    return Outcome("right")


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


def judge_planted(rng, ranks):
    what, bad = rng.choice(list(PLANTED)), rng.randrange(ranks)
    reduces = what.startswith("Spec") and rng.random() < 0.4
    ended = run(merging if reduces else differing, ranks, what, bad)
    for rank, one in enumerate(ended):
        if what == WRONG_MASK and rank == bad:
            good = one.error.startswith("ValueError: mask: expected")
        else:
            good = one.error.startswith("ValueError: ") and names(one.error, bad, ranks, what)
        if not good:
            return Outcome("wrong", f"{what} on rank {bad} of {ranks}, seen by rank {rank}: {one}")
    return Outcome("refused", ended[0].error)


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


def judge_away(rng, ranks):
    away, bad, at = rng.choice(AWAY), rng.randrange(ranks), rng.randrange(len(STEPS))
    awaited = [rank for rank in range(ranks) if rank != bad]
    ended = run(step, ranks, away, bad, at, timeout=TIMEOUT, limit=BOUND + 20.0, awaited=awaited)
    for rank in awaited:
        one = ended[rank]
        if one.seconds > BOUND or not misses(one.error, STEPS[at], rank, bad):
            where = f"{away.__name__} on rank {bad} of {ranks} before {STEPS[at]!r}, seen by rank {rank}"
            return Outcome("wrong", f"{where}: {one}")
    return Outcome("refused", ended[awaited[0]].error)


def attempt(seed: int) -> Outcome:
    """Run some ranks."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    ranks = rng.randint(2, 4)
    kind = seed % 10
    if kind < 5:
        return judge_equal(seed, ranks)
    return judge_planted(rng, ranks) if kind < 8 else judge_away(rng, ranks)


AREA = Area("ranks", "runs", attempt, count=200, few=3)

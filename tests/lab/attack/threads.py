"""Calls of several threads at once, on one batch and on their own: each answers as one thread alone does."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from frozen.calls import Call, Record, answer, correct_call, loss_call
from frozen.generator import random_loss, random_spec
from lab.attack.campaign import Area, Outcome

THREADS = 6


def drawn(rng: random.Random) -> Call:
    """Any correction or loss, on tensors of its own."""
    spec = random_spec(rng)
    call = correct_call(rng, spec) if rng.random() < 0.7 else loss_call(rng, random_loss(rng), None)
    call.into = False
    return call


def attempt(seed: int) -> Outcome:
    """Some calls of a seed, each by every thread, which begin at one moment."""
    rng = random.Random(seed)
    torch.set_num_threads(1)
    calls = [drawn(rng) for _ in range(rng.randint(1, 4))]
    wanted = [answer(call, "torch") for call in calls]
    start = threading.Barrier(THREADS)

    def run(first: int) -> list[Record]:
        start.wait(30)
        order = [(first + i) % len(calls) for i in range(len(calls))]
        found = {i: answer(calls[i], "torch") for i in order}
        return [found[i] for i in range(len(calls))]

    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(run, range(THREADS)))
    for thread, found in enumerate(answers):
        for call, one, expected in zip(calls, found, wanted, strict=True):
            if one != expected:
                names = [name for name in expected if one.get(name) != expected[name]]
                return Outcome("wrong", f"thread {thread}, {call.spec!r} {call.loss!r}: {names}")
    return Outcome("right")


AREA = Area("threads", "calls of six threads", attempt, count=1_000, few=3)

"""Calls of several threads at once, on one batch and on their own: each answers as one thread alone does."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from attack.campaign import Area, Outcome
from builders.batches import lay_out, rounded
from builders.mode_cases import CALLS
from builders.random_calls import random_batch, random_layout, random_spec

THREADS = 6
# Dumps of many threads are in tests/api/test_dump_thread.py.
NAMES = ("correct", "metrics", "policy_loss", "filter_groups")


def attempt(seed: int) -> Outcome:
    """Some calls of a seed, each by every thread, which begin at one moment."""
    rng = random.Random(seed)
    torch.set_num_threads(1)
    jobs = []
    for _ in range(rng.randint(1, 4)):
        dtype = rng.choice((torch.float32, torch.bfloat16, torch.float64))
        sequences = rounded(random_batch(rng), dtype)
        spec = random_spec(rng, sequences)
        layout, mask_dtype = random_layout(rng)
        jobs.append((rng.choice(NAMES), lay_out(sequences, layout, dtype, mask_dtype), spec))
    wanted = [CALLS[name](laid, spec, True) for name, laid, spec in jobs]
    start = threading.Barrier(THREADS)

    def run(first: int) -> list[object]:
        start.wait(30)
        order = [(first + i) % len(jobs) for i in range(len(jobs))]
        found = {i: CALLS[jobs[i][0]](*jobs[i][1:], True) for i in order}
        return [found[i] for i in range(len(jobs))]

    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(run, range(THREADS)))
    for thread, answer in enumerate(answers):
        for (name, _, spec), found, expected in zip(jobs, answer, wanted, strict=True):
            if found != expected:
                return Outcome("wrong", f"thread {thread}, {name}, {spec!r}: {found!r:.200} for {expected!r:.200}")
    return Outcome("right")


AREA = Area("threads", "calls of six threads", attempt, count=1_000, few=3)

"""Surrogates that look at the whole batch, on the kernels. Loops judge their numbers in test_random_calls.py."""

from __future__ import annotations

import itertools
import threading
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.loss_cases import OF_BATCH, LaidLoss, only, random_batch
from builders.threaded_ranks import Rank, Ranks
from rollout_corr.backends.loss_task import beyond_kernels
from rollout_corr.kernels.launches import Launch

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (9, 1, 14, 0, 5, 12, 30, 3)


def drawn(layout, part=slice(None)):
    """Some sequences of a batch, laid out, and how many they are."""
    batch = only(random_batch(3, LENGTHS), "old", "weights", "train_mask")[part]
    return LaidLoss(batch, layout, torch.float32), len(batch)


def one_at_a_time(run):
    """Launches of several threads one after the other, because Triton's interpreter has one state."""
    lock = threading.Lock()

    def alone(launch):
        with lock:
            run(launch)

    return alone


def test_ranks_decide_together():
    """Two ranks have the gradients of one, to the bit: they choose among all tokens."""
    options = {"mean": rc.Mean("sum"), "backend": "triton", "surrogate": OF_BATCH["clip cov dual"]}
    laid, count = drawn("packed")
    whole, _ = laid.gradient(laid(**options, sequence_ids=torch.arange(count)).value)

    def of_rank(rank):
        part = slice(0, 4) if rank == 0 else slice(4, None)
        laid, _ = drawn("padded_right", part)
        mine = {"sequence_ids": torch.arange(count)[part], "batch_group": Rank(rank=rank, ranks=2)}
        return laid.gradient(laid(**options, **mine).value)[0]

    with mock.patch.object(Launch, "run", one_at_a_time(Launch.run)):
        found = Ranks(2).run(of_rank)
    assert list(itertools.chain(*found)) == whole


@pytest.mark.parametrize("surrogate", [*OF_BATCH.values(), rc.REAL(), rc.AveragePPO()])
def test_what_is_left_to_plain_torch(surrogate):
    """A loss that compares groups, or that takes an average of two ratios."""
    assert (beyond_kernels(surrogate, False) is None) == (surrogate.traits.sees == "batch")


def test_a_surrogate_of_the_user_is_left_to_plain_torch():
    """The kernels know the formulas of this package alone; a class derived from one of them may have another."""

    class Doubled(rc.PPO):
        def loss(self, tokens):
            found = super().loss(tokens)
            return found._replace(value=2.0 * found.value)

    assert beyond_kernels(Doubled(), False) == "Doubled() has a formula of its own, which runs on plain torch"
    assert beyond_kernels(rc.PPO(), False) is None

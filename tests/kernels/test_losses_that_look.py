"""Surrogates that look at the whole batch, on the kernels: against loops, and against plain torch."""

from __future__ import annotations

import itertools
import threading
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import FEW, shaped
from builders.loss_cases import OF_BATCH, LaidLoss, only, random_batch
from builders.loss_kernel_cases import assert_as_plain_torch, fenced_loss
from builders.rounding import is_near, near
from builders.threaded_ranks import Rank, Ranks
from oracles import batch_losses as oracle
from rollout_corr.backends.loss_task import beyond_kernels
from rollout_corr.kernels.launches import Launch

pytestmark = pytest.mark.usefixtures("one_thread")

# Some that choose tokens; what bounds ratios runs on plain torch.
LOOKING = {name: OF_BATCH[name] for name in ("clip cov dual", "clip cov none", "kl cov")}
LENGTHS = (9, 1, 14, 0, 5, 12, 30, 3)
PER_TOKEN = ("old", "weights", "train_mask")
# Metrics that come from counts, and from sums of the look, which is one code.
EXACT = ("tokens_trained", "sequences_trained", "clip_", "cov_")


def drawn(name, seed, layout, dtype, broken=False, part=slice(None)):
    """A batch laid out, its further arguments, and its sequences."""
    batch = only(random_batch(seed, LENGTHS, broken=broken), *PER_TOKEN)[part]
    return LaidLoss(batch, layout, dtype), {"surrogate": LOOKING[name]}, batch


@pytest.mark.parametrize(("name", "layout"), list(zip(LOOKING, itertools.cycle(("packed_gaps", "padded_left")))))
def test_value_and_gradient(name, layout, device):
    """In float64 as the loops have them."""
    laid, options, batch = drawn(name, 11, layout, torch.float64)
    losses = {(s, t): pair for s, row in enumerate(oracle.look(options["surrogate"], batch)) for t, pair in row.items()}
    n = sum(m != 0 for q in batch for m in q.mask)
    with shaped(FEW):
        out, (rows, elsewhere) = fenced_loss(laid, device, **options)
    coef = options["surrogate"].coef
    wanted = sum(coef * batch[s].weights[t] * value for (s, t), (value, _) in losses.items()) / n
    assert is_near(out.value.item(), wanted) and not any(elsewhere)
    for s, row in enumerate(rows):
        for t, slope in enumerate(row):
            here = losses.get((s, t), (0.0, 0.0))[1]
            here = coef * batch[s].weights[t] * here / n if here else 0.0
            assert is_near(slope, here) and (slope == 0) == (here == 0), (s, t)
    tokens = oracle.tokens_of(options["surrogate"], batch)
    picked = oracle.chosen(options["surrogate"], batch)
    assert out.metrics()["tokens_trained"] == len(losses)
    assert out.metrics()["cov_chosen_fraction"] == near(len(picked) / len(tokens))


@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(LOOKING, itertools.cycle((torch.float32, torch.bfloat16, torch.float16))))
)
def test_per_token_plain_torch(name, dtype, device):
    """A KL by weights and a regularizer stay, counts and what the look found are equal, and all else is near."""
    per_token = {
        "kl": rc.KL("k3", 0.3, weight="weights"),
        "regularizer": rc.SquaredLogRatio(0.2),
        "mean": rc.Mean("sequence"),
    }
    layout = "packed" if dtype == torch.float32 else "padded_right"
    laid, options, _ = drawn(name, 48, layout, dtype, broken=True)
    options |= per_token | {"ref_logp": laid.arguments["old_logp"]}
    with shaped(FEW):
        assert_as_plain_torch(laid, device, 1e-6, EXACT, name, **options)


def one_at_a_time(run):
    """Launches of several threads one after the other, because Triton's interpreter has one state."""
    lock = threading.Lock()

    def alone(launch):
        with lock:
            run(launch)

    return alone


def test_ranks_decide_together():
    """Two ranks have the gradients of one, to the bit: they choose among all tokens."""
    options = {"mean": rc.Mean("sum"), "backend": "triton"}
    laid, of_whole, batch = drawn("clip cov dual", 3, "packed", torch.float32)
    ids = {"sequence_ids": torch.arange(len(batch))}
    whole, _ = laid.gradient(laid(**options, **of_whole, **ids).value)

    def of_rank(rank):
        part = slice(0, 4) if rank == 0 else slice(4, None)
        laid, mine, _ = drawn("clip cov dual", 3, "padded_right", torch.float32, part=part)
        mine |= {"sequence_ids": torch.arange(len(batch))[part], "batch_group": Rank(rank=rank, ranks=2)}
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

"""PPO's clip with bounds scaled by entropy: beside loops in every layout, in blocks, in one piece and over ranks."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, error
from builders.loss_cases import OF_ENTROPY, with_entropy
from builders.reads import Reads
from builders.split_cases import Rank
from builders.threaded_ranks import Ranks
from oracles import entropy_losses as oracle
from rollout_corr.api.policy_loss import LOSSES
from rollout_corr.backends import loss_blocks, sees_batch

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (9, 1, 14, 0, 5, 12, 30, 3)


def check(surrogate, seed, layout, dtype=torch.float64, within=1e-11, broken=False):
    laid, entropy, batch, rows = with_entropy(seed, layout, LENGTHS, dtype, broken=broken)
    out = laid(surrogate=surrogate, entropy=entropy)
    losses, n = oracle.token_losses(surrogate, batch, rows), sum(m != 0 for q in batch for m in q.mask)
    assert error(out.value.item(), math.fsum(x for x, _ in losses.values()) / n) <= within, (surrogate, layout)
    found, elsewhere = laid.gradient(out.value)
    assert not any(elsewhere)
    for s, row in enumerate(found):
        assert all(error(a, losses.get((s, t), (0.0, 0.0))[1] / n) <= within for t, a in enumerate(row)), surrogate
    return out, oracle.widths(surrogate, batch, rows)


@pytest.mark.parametrize("name", OF_ENTROPY)
def test_value_gradient_and_metrics(name, way):
    for seed, layout in ((11, "packed_gaps"), (48, "padded_left")):
        out, widths = check(OF_ENTROPY[name], seed, layout, broken=seed == 48)
        found, n = out.metrics(), len(widths)
        assert found["entropy_clip_low_mean"] == pytest.approx(math.fsum(x for x, _ in widths.values()) / n)
        assert found["entropy_clip_high_mean"] == pytest.approx(math.fsum(x for _, x in widths.values()) / n)
        assert found["clip_high_fraction"] > 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout):
    check(OF_ENTROPY["entropy clip dual"], 5, layout)


def test_the_bounds_of_the_authors_code():
    """The statements of HAPO's compute_entropy_h and ada_clip: their scale by a standard deviation cancels."""
    _, _, batch, rows = with_entropy(3, "packed", LENGTHS)
    surrogate = rc.EntropyClip(0.2, 0.28, 1.0, pivot=0.8, widens="upper")
    ours = oracle.widths(surrogate, batch, rows)
    log = torch.tensor([rows[s][t] for s, t in ours], dtype=torch.float64).clamp(min=1e-8).log()
    h = log - log.sort().values[round(0.8 * (len(log) - 1))]
    h = h / h.square().mean().sqrt()
    place = torch.where(h > 0, h / h.max(), h / h.min())
    low, high = torch.full_like(h, 0.2), torch.full_like(h, 0.28)
    low = torch.where(place <= 0, low * (1 - place), low)
    high = torch.where(place > 0, high * (1 + place), high)
    for wanted, found in zip((low, high), zip(*ours.values(), strict=True), strict=True):
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), wanted, rtol=1e-12)


def test_the_same_bounds_for_all_of_one_entropy():
    """Then it is PPO, to the bit."""
    laid, entropy, _, _ = with_entropy(2, "packed", LENGTHS)
    one = laid(surrogate=rc.EntropyClip(0.1, 0.2, dual=1.5), entropy=torch.ones_like(entropy)).value
    assert one.item() == pytest.approx(laid(surrogate=rc.PPO(0.1, 0.2, dual=1.5)).value.item(), rel=1e-14)


@pytest.mark.parametrize("name", OF_ENTROPY)
def test_ranks_decide_together(name):
    """Two ranks have the gradients of one, to the bit."""
    for seed in range(2):
        options = {"surrogate": OF_ENTROPY[name], "mean": rc.Mean("sum")}
        laid, entropy, _, _ = with_entropy(seed, "packed", LENGTHS, torch.float32)
        whole = laid.gradient(laid(entropy=entropy, **options).value)[0]

        def of_rank(rank, seed=seed, options=options):
            part = slice(0, 4) if rank == 0 else slice(4, None)
            laid, entropy, _, _ = with_entropy(seed, "padded_right", LENGTHS, torch.float32, part)
            return laid.gradient(laid(entropy=entropy, batch_group=Rank(rank=rank, ranks=2), **options).value)[0]

        assert list(itertools.chain(*Ranks(2).run(of_rank))) == whole


def test_no_gradient_to_the_entropy_and_nothing_to_see():
    x, entropy = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    batches = rc.Batch(entropy=entropy), rc.Batch(entropy=entropy, mask=torch.zeros(2, 3))
    seen, out = (
        rc.policy_loss(x, torch.ones(2, 3), b, rc.Loss(rc.EntropyClip()), old_logp=x.detach()) for b in batches
    )
    seen.value.backward()
    assert entropy.grad is None and bool(x.grad.any())
    assert out.value.item() == 0.0 and all(math.isfinite(value) for value in out.metrics().values())


def test_no_read_and_no_sort_on_a_device():
    laid, entropy, _, _ = with_entropy(1, "padded_right", LENGTHS, torch.float32)
    with (
        mock.patch.dict(LOSSES, blocks=loss_blocks.run_whole),
        mock.patch.object(sees_batch, "in_blocks", return_value=False),
        Reads() as mode,
    ):
        laid(surrogate=rc.EntropyClip(), entropy=entropy)
    assert not mode.reads


def test_arguments():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"entropy: expected a value for the surrogate EntropyClip\(\), got None"):
        rc.policy_loss(x, x, loss=rc.Loss(rc.EntropyClip()), old_logp=x)
    for options, words in (
        ({"pivot": 1.5}, "EntropyClip.pivot: expected a number from 0 to 1, got 1.5"),
        ({"low": -0.1}, "EntropyClip.low: expected a number >= 0"),
        ({"strength": math.inf}, "EntropyClip.strength: expected a number >= 0 and <= 3.4"),
        ({"widens": "lower"}, "EntropyClip.widens: expected one of"),
        ({"dual": 0.5}, "EntropyClip.dual: expected a number >= 1"),
    ):
        with pytest.raises(ValueError, match=words):
            rc.EntropyClip(**options)

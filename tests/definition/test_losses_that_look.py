"""Surrogates that look at the batch or at groups: draws, ranks, order. test_random_calls.py judges them by loops."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_corr as rc
from builders.batches import LAYOUTS
from builders.calls import bundled_loss
from builders.launches import Operations
from builders.loss_cases import LOOKING, LaidLoss, compare, looked_at, mean_of, run_as
from builders.rounding import GRID, assert_near, is_near, near
from builders.threaded_ranks import Rank, Ranks
from oracles import batch_losses as oracle
from rollout_corr.backends import sees_batch, sequence_groups
from rollout_corr.specs.terms import Objective

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = list(LOOKING)
# One of each kind.
KINDS = ("clip cov", "kl cov", "real")


def objective(name, **more):
    return Objective(LOOKING[name], **{"mean": mean_of(name)} | more)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_see(name):
    x = torch.zeros(2, 3, requires_grad=True)
    given = {"surrogate": LOOKING[name], "old_logp": x.detach(), "group_size": 1}
    out = rc.policy_loss(x, x.detach(), **bundled_loss(mask=torch.zeros(2, 3), **given))
    out.value.backward()
    assert out.value.item() == 0.0 and not x.grad.any()
    assert all(math.isfinite(value) for value in out.metrics().values())
    packed, cu = torch.zeros(0), torch.zeros(1, dtype=torch.int64)
    given |= {"old_logp": packed, "cu_seqlens": cu}
    assert rc.policy_loss(packed, packed, **bundled_loss(**given)).value.item() == 0.0


def test_a_kl_of_its_own_reduction():
    """Its own pass does not look, and the statistics keep their places."""
    laid = LaidLoss(looked_at("kl cov", 6, "ref"), "packed")
    kl = rc.KL("k3", 0.1, mean=rc.Mean("sequence"))
    found = laid(surrogate=LOOKING["kl cov"], kl=kl).metrics()
    assert found["kl_new_ref_k3"] == laid(surrogate=rc.PPO(), kl=kl).metrics()["kl_new_ref_k3"] > 0.0
    assert found["cov_chosen_fraction"] > 0.0


def test_a_criterion_of_new_old_counts_tokens_that_rollout_has_no_number_for():
    zeros = torch.zeros(2, 2)
    rollout = torch.tensor([[math.nan, 0.0], [0.0, 0.0]])
    spec = rc.Spec(criteria=(rc.Criterion("external", upper=9.0, of="new/old", name="x", label="c"),))
    given = {"old_logp": zeros, "rollout_logp": rollout, "spec": spec, "surrogate": rc.KLCov()}
    found = rc.policy_loss(zeros, zeros, **bundled_loss(external={"x": torch.full((2, 2), 3.0)}, **given)).metrics()
    assert (found["c/mean"], found["c/min"], found["c/max"], found["c/std"]) == (3.0, 3.0, 3.0, 0.0)


# --- what must not matter ---


def pieces(name, batch, layout="packed", **options):
    """The gradient of each sequence in float32, as if the loss were a sum."""
    laid = LaidLoss(batch, layout, torch.float32)
    out = laid(surrogate=LOOKING[name], mean=rc.Mean("sum"), **options)
    return laid.gradient(out.value)[0], out


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from(NAMES), st.sampled_from(LAYOUTS), st.randoms())
def test_packing_and_order(seed, name, layout, rng):
    """With the numbers of the sequences given, neither order nor layout changes what is decided: bits of float32."""
    batch = [replace(q, number=rng.randrange(-(2**62), 2**62)) for q in looked_at(name, seed)]
    order = list(range(len(batch)))
    rng.shuffle(order)
    (one, out), (two, other) = pieces(name, batch), pieces(name, [batch[i] for i in order], layout)
    assert [one[i] for i in order] == two
    for key in ("cov_chosen_fraction", "cov_eligible_fraction"):
        assert out.metrics().get(key) == other.metrics().get(key)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_decide_together(name):
    """Two ranks have the gradients of one, to the bit, and their statistics merge to those of the whole."""
    surrogate = LOOKING[name]
    batch = [replace(q, number=7 * s + 1) for s, q in enumerate(looked_at(name, 1))]
    whole, out = pieces(name, batch)
    count = {"group_count": 5} if name.startswith("real") else {}

    def of_rank(rank):
        part = batch[slice(0, 4) if rank == 0 else slice(4, None)]
        found, result = pieces(name, part, "padded_right", batch_group=Rank(rank=rank, ranks=2), **count)
        return found, result.statistics

    found = Ranks(2).run(of_rank)
    assert found[0][0] + found[1][0] == whole
    merged, wanted = found[0][1].merge(found[1][1]).metrics(), out.metrics()
    own = {metric for key in surrogate.traits.sums for metric in (key, f"{key}_fraction", f"{key}_mean")} & set(wanted)
    assert {key: merged[key] for key in own} == near({key: wanted[key] for key in own}, torch.float32)


def test_groups_of_neighbors_stay_on_their_rank():
    """`group_size` counts whole groups on each rank, so ranks exchange nothing for it."""
    batch = [replace(q, group=i // 2) for i, q in enumerate(looked_at("real", 1)[:8])]
    alone = [replace(q, group=None) for q in batch]

    def of_rank(rank):
        part = alone[4 * rank : 4 * rank + 4]
        return pieces("real", part, group_size=2, batch_group=Rank(rank=rank, ranks=2))[0]

    found = Ranks(2).run(of_rank)
    assert found[0] + found[1] == pieces("real", batch)[0]


@pytest.mark.parametrize("name", KINDS)
def test_no_read_on_a_device(name):
    laid = LaidLoss(looked_at(name, 1), "padded_right", torch.float32)
    unread = mock.patch("rollout_corr.backends.sequence_groups.torch.aminmax", return_value=(0, 4))
    with run_as("whole"), unread, Operations() as mode:
        laid(surrogate=LOOKING[name])
    assert mode.names and not mode.waits


# --- draws ---


def test_the_draw_is_splitmix():
    place, number = torch.arange(50), torch.tensor([[3], [-5], [2**40]])
    for seed in (0, 1, 2**63 - 1):
        found = sees_batch.uniform(seed, number, place)
        assert found.tolist() == [[oracle.drawn(seed, n, t) for t in range(50)] for n in (3, -5, 2**40)]


def zeros_of(x, front=0, back=0, more=None, **options):
    """Where a draw of rows of equal tokens leaves no gradient."""
    padded = torch.nn.functional.pad(x, (front, back), value=-7.0)
    mask = torch.nn.functional.pad(torch.ones_like(x), (front, back))
    new = padded.clone().requires_grad_()
    batch = rc.Batch(mask=mask, **(more or {}))
    surrogate = rc.ClipCov(lower=-9.0, upper=9.0, **options)
    rc.policy_loss(new, torch.ones_like(padded), batch, rc.Loss(surrogate), old_logp=padded).value.backward()
    return (new.grad == 0)[:, front : front + x.shape[1]]


def test_what_a_draw_depends_on():
    """Not the padding; the seed: 200 seeds draw each of 40 tokens 50 times within five deviations; the rank."""
    x = torch.linspace(-3.0, -1.0, 40).view(2, 20)
    first = zeros_of(x, share=0.25)
    assert all(torch.equal(first, zeros_of(x, *around, share=0.25)) for around in ((5, 0), (0, 3), (2, 9)))
    drawn = [zeros_of(x, share=0.25, seed=seed) for seed in range(200)]
    assert all(one.sum() == 10 for one in drawn)
    assert (sum(drawn) - 50).abs().max() < 5 * math.sqrt(200 * 0.25 * 0.75)

    def of_rank(rank):
        return zeros_of(x.view(1, 40), share=0.5, more={"ranks": rc.Ranks(batch=Rank(rank=rank, ranks=2))})

    # Without numbers the first sequences of all ranks would lose the same places.
    one, two = Ranks(2).run(of_rank)
    assert int(one.sum() + two.sum()) == 40 and not torch.equal(one, two)


def test_ties_share_their_fate():
    """All covariances are equal, so all tokens are the largest."""
    x = torch.full((2, 4), -1.0)
    out = rc.policy_loss(x, torch.ones(2, 4), loss=rc.Loss(rc.KLCov(0.01, 1.0)), old_logp=x - 0.5)
    assert out.metrics()["cov_chosen_fraction"] == 1.0


# --- groups ---


def test_autograd_of_the_formula():
    """logsumexp and its derivative by autograd, for groups of one size."""
    torch.manual_seed(3)
    new = (-torch.rand(12, 7, dtype=torch.float64)).requires_grad_()
    old, advantages = new.detach() + torch.randn(12, 7, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    mask = torch.arange(7) < torch.randint(1, 8, (12, 1))
    score = ((new - old) * mask).sum(1) / mask.sum(1) / 0.5
    good, zero = (advantages > 0).view(-1, 4), torch.zeros(3, 1, dtype=torch.float64)
    parts = [
        torch.cat([sign * score.view(-1, 4).masked_fill(left, -sign * math.inf), zero], 1).logsumexp(1)
        for sign, left in ((1.0, good), (-1.0, ~good))
    ]
    wanted = torch.where(good.any(1) & ~good.all(1), parts[0] + parts[1], 0.0).mean()
    recipe = rc.recipe("swift.real", num_generations=4, real_tau=0.5)
    out = rc.policy_loss(new, advantages, rc.Batch(mask=mask, **recipe.batch), recipe.loss, old_logp=old)
    one, other = (torch.autograd.grad(x, new, retain_graph=True)[0] for x in (out.value, wanted))
    assert (out.value - wanted).abs() <= GRID and (one - other).abs().max() <= GRID


def of_sequences(x, advantages, surrogate, size):
    """The loss of four tokens' log-ratios, and its slope by sequence."""
    new = torch.zeros(len(advantages), 3, dtype=x.dtype, requires_grad=True)
    old, loss = x[:, None].expand_as(new), rc.Loss(surrogate, mean_of("real"))
    out = rc.policy_loss(new, torch.tensor(advantages), rc.Batch(groups=rc.Groups(size=size)), loss, old_logp=old)
    return out, torch.autograd.grad(out.value, new)[0].sum(1)


def test_far_scores_and_the_smallest_temperature_stay_finite():
    """Scores of +-15 at 0.01: e^1500 has no number. At 1e-30 slopes are 1e30; those of 1e-40 would be infinite."""
    x = torch.tensor([15.0, -15.0, 15.0, -15.0], dtype=torch.float64)
    out, slopes = of_sequences(x, [1.0, 1.0, -1.0, -1.0], rc.REAL(0.01), 4)
    assert is_near(out.value.item(), 3000.0)
    assert_near(slopes, torch.tensor([-100.0, 0.0, 0.0, 100.0], dtype=torch.float64))
    out, slopes = of_sequences(torch.full((16,), -0.5), [1.0, -1.0] * 8, rc.REAL(1e-30), 16)
    assert out.value.isfinite() and slopes.isfinite().all() and slopes.abs().max() > 1e28


def test_one_kind_alone_has_no_loss():
    out, _ = of_sequences(torch.full((4,), -0.5), [1.0, 2.0, -1.0, 0.0], rc.REAL(), 2)
    assert out.value.item() == 0.0 and out.metrics()["sequence_group_contrast_fraction"] == 0.0


def test_a_sequence_of_no_group_has_no_loss():
    """Such as its number is on a device, where numbers are not looked at."""
    batch = looked_at("real", 2)
    groups = torch.tensor([99 if q.group == 2 else q.group for q in batch])
    with mock.patch.object(sequence_groups.torch.compiler, "is_compiling", return_value=True):
        read = sequence_groups.read_groups(
            rc.Groups(index=groups), "REAL()", len(batch), torch.device("cpu"), False, False
        )
    laid = LaidLoss(batch, "packed")
    with mock.patch("rollout_corr.api.loss_request.groups_of", return_value=read):
        out = laid(surrogate=rc.REAL(), mean=mean_of("real"))
    alone = [replace(q, group=100 + i if q.group == 2 else q.group) for i, q in enumerate(batch)]
    compare(out, laid, alone, objective("real"), "no group")


# --- what cannot be ---

X, IDS, INDEX = torch.zeros(4, 3), torch.arange(4), torch.zeros(4, dtype=torch.int64)


def call(surrogate, **options):
    return rc.policy_loss(X, X, **bundled_loss(old_logp=X, surrogate=surrogate, **options))


def on_a_rank(surrogate, over, **options):
    return Ranks(1).run(lambda rank: call(surrogate, **{over: Rank(rank=rank, ranks=1)}, **options))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: call(rc.ClipCov(), sequence_ids=[0, 1]), "sequence_ids: expected a tensor, got list"),
        (lambda: call(rc.ClipCov(), sequence_ids=IDS.float()), "sequence_ids: .* int64, got float32"),
        (lambda: call(rc.ClipCov(), sequence_ids=IDS[:3]), r"sequence_ids: expected shape \[4\]"),
        (lambda: call(rc.ClipCov(), sequence_ids=IDS.to("meta")), "sequence_ids: expected device cpu"),
        (lambda: call(rc.REAL()), r"groups: expected rc\.Groups\(index=.* for the surrogate REAL\(\), got None"),
        (lambda: call(rc.REAL(), group_size=3), r"groups\.size: expected a divisor of the 4 sequences, got 3"),
        (lambda: call(rc.REAL(), group_index=INDEX + 4), r"groups\.index: expected numbers from 0 to 3"),
        (lambda: call(rc.REAL(), group_index=INDEX[:2]), r"groups\.index: expected shape \[4\]"),
        (lambda: on_a_rank(rc.REAL(), over="batch_group", group_index=INDEX), r"groups\.count: expected the number"),
        (lambda: on_a_rank(rc.KLCov(), over="sequence_group"), r"Loss\.surrogate: .* does not look .* got KLCov\(\)"),
        *((lambda tau=tau: rc.REAL(tau), r"REAL\.tau: expected a (finite )?number") for tau in (0.0, 9e-31, math.nan)),
        (lambda: rc.ClipCov(share=0.0), "ClipCov.share: expected a number above 0 and at most 1, got 0.0"),
        (lambda: rc.KLCov(1.5), "KLCov.share: expected a number above 0 and at most 1, got 1.5"),
        (lambda: rc.ClipCov(lower=2.0, upper=1.0), "ClipCov.upper: expected a number >= lower=2.0, got 1.0"),
        (lambda: rc.ClipCov(seed=1.0), "ClipCov.seed: expected an integer, got float 1.0"),
        (lambda: rc.ClipCov(seed=-1), "ClipCov.seed: expected an integer from 0"),
        (lambda: rc.KLCov(penalty=-1.0), "KLCov.penalty: expected a number >= 0"),
        (lambda: rc.KLCov(penalty=math.inf), r"KLCov.penalty: expected a number >= 0 and <= 3.4.*got inf"),
    ],
)
def test_what_is_wrong_is_named(made, words):
    with pytest.raises((ValueError, TypeError), match=words):
        made()

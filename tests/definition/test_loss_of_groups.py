"""Surrogates that compare the sequences of a group: beside loops in every layout, in blocks and over ranks."""

from __future__ import annotations

import math
import random
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_corr as rc
from builders.batches import LAYOUTS, error
from builders.calls import bundled_loss
from builders.group_loss_cases import GROUPS, LENGTHS, TOGETHER, expected, made
from builders.loss_cases import OF_GROUPS, LaidLoss, only, random_batch
from builders.reads import Reads
from builders.split_cases import Rank
from builders.threaded_ranks import Ranks
from oracles import group_losses as oracle
from oracles.loss import valid
from rollout_corr.api.policy_loss import LOSSES
from rollout_corr.backends import loss_blocks

pytestmark = pytest.mark.usefixtures("one_thread")


def check(surrogate, batch, layout, dtype=torch.float64, within=1e-11, groups=GROUPS, **options):
    laid = LaidLoss(batch, layout, dtype)
    out = laid(surrogate=surrogate, group_index=torch.tensor(groups), **TOGETHER, **options)
    value, slopes = expected(surrogate, batch, groups)
    assert error(out.value.item(), value) <= within, (surrogate, layout, out.value.item(), value)
    found, elsewhere = laid.gradient(out.value)
    assert not any(elsewhere)
    for row, wanted in zip(found, slopes, strict=True):
        assert all(error(a, b) <= within for a, b in zip(row, wanted, strict=True)), (surrogate, layout)
    return out


@pytest.mark.parametrize("name", OF_GROUPS)
def test_value_and_gradient(name, way):
    for seed, layout, names in ((11, "packed_gaps", ()), (48, "packed", ()), (0, "padded_left", ("weights",))):
        for holes in ((), ("train_mask",)):
            out = check(OF_GROUPS[name], made(seed, *names, *holes), layout)
    assert 0.0 < out.metrics()["sequence_group_contrast_fraction"] <= 1.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout):
    check(OF_GROUPS["real"], made(5, "weights", "train_mask"), layout)


def test_the_clamp_is_reached():
    batch = made(11)
    for surrogate, some in ((OF_GROUPS["real"], 0), (OF_GROUPS["real clamped"], 1)):
        tokens = oracle.tokens_of(surrogate, batch)
        scores = [oracle.score(surrogate, [q for q in tokens if q.s == i]) for i in {q.s for q in tokens}]
        assert (sum(abs(x) == surrogate.clamp for x in scores) > 0) == bool(some)


def test_gradient_by_difference_quotients():
    """The hand-made gradient is that of the whole value: scores of the others of a group move it too."""
    batch = made(2)
    laid = LaidLoss(batch, "packed")
    options = {"surrogate": rc.REAL(0.3), "group_index": torch.tensor(GROUPS), **TOGETHER}
    slopes = torch.autograd.grad(laid(**options).value, laid.new)[0]
    step, start, moved = 1e-6, laid.new, 0.0
    for i in laid.laid.mask.nonzero().flatten().tolist():
        sides = []
        for sign in (1.0, -1.0):
            laid.new = start.detach().clone()
            laid.new[i] += sign * step
            sides.append(laid(**options).value.item())
        wanted = (sides[0] - sides[1]) / (2 * step)
        assert abs(wanted - slopes[i].item()) < 1e-8
        moved += abs(wanted)
    assert moved > 0.1


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
    assert out.value.item() == pytest.approx(wanted.item(), rel=1e-12)
    slopes = [torch.autograd.grad(x, new, retain_graph=True)[0] for x in (out.value, wanted)]
    assert torch.allclose(*slopes, rtol=1e-11, atol=1e-14)


def test_far_scores_stay_finite():
    """Scores of +-15 at a temperature of 0.01: e^1500 has no number."""
    new = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    old = torch.tensor([15.0, -15.0, 15.0, -15.0], dtype=torch.float64)[:, None].expand(4, 3)
    given = {"old_logp": old, "surrogate": rc.REAL(0.01), "group_size": 4, **TOGETHER}
    out = rc.policy_loss(new, torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64), **bundled_loss(**given))
    assert out.value.item() == pytest.approx(3000.0)
    (slopes,) = torch.autograd.grad(out.value, new)
    wanted = torch.tensor([-100.0, 0.0, 0.0, 100.0], dtype=torch.float64)
    assert torch.allclose(slopes.sum(1), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype):
    rng = random.Random(3)
    batch = made(3)
    for q in batch:
        for row in (q.new, q.old):
            row[:] = [-rng.randrange(1, 200) / 64 for _ in row]
    check(OF_GROUPS["real"], batch, "packed", dtype, 2e-6 if dtype == torch.float32 else 4e-3)


def test_tokens_that_are_not_finite_are_not_seen(way):
    check(OF_GROUPS["real"], made(7, broken=True), "padded_left")


def test_nothing_to_see(way):
    x = torch.zeros(2, 3, requires_grad=True)
    given = {"old_logp": x.detach(), "surrogate": rc.REAL()}
    out = rc.policy_loss(x, x.detach(), **bundled_loss(mask=torch.zeros(2, 3), group_size=2, **given))
    out.value.backward()
    assert out.value.item() == 0.0 and not x.grad.any()
    assert all(math.isfinite(value) for value in out.metrics().values())
    packed, cu = torch.zeros(0), torch.zeros(1, dtype=torch.int64)
    given = {"old_logp": packed, "surrogate": rc.REAL(), "cu_seqlens": cu}
    assert rc.policy_loss(packed, packed, **bundled_loss(group_index=cu[:0], **given)).value.item() == 0.0


def test_one_kind_alone_has_no_loss():
    x = torch.zeros(4, 3, requires_grad=True)
    advantages = torch.tensor([1.0, 2.0, -1.0, 0.0])
    out = rc.policy_loss(
        x, advantages, rc.Batch(groups=rc.Groups(size=2)), rc.Loss(rc.REAL()), old_logp=x.detach() - 0.5
    )
    assert out.value.item() == 0.0 and out.metrics()["sequence_group_contrast_fraction"] == 0.0


# --- what must not matter ---


def pieces(batch, groups, layout, dtype=torch.float32, **options):
    """The gradient of each sequence, as if the loss were a sum."""
    laid = LaidLoss(batch, layout, dtype)
    out = laid(surrogate=rc.REAL(), mean=rc.Mean("sum"), group_index=torch.tensor(groups), **options)
    return laid.gradient(out.value)[0], out


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from(LAYOUTS), st.randoms())
def test_packing_and_order(seed, layout, rng):
    """Neither order nor layout changes a bit of float32."""
    batch = made(seed)
    order = list(range(len(batch)))
    rng.shuffle(order)
    one, _ = pieces(batch, GROUPS, "packed")
    two, _ = pieces([batch[i] for i in order], [GROUPS[i] for i in order], layout)
    assert [one[i] for i in order] == two


def test_ranks_decide_together():
    """Groups span ranks: two have the gradients of one, to the bit, and their statistics merge to the whole's."""
    for seed in range(3):
        batch = made(seed)
        parts = slice(0, 4), slice(4, None)
        whole, out = pieces(batch, GROUPS, "packed")

        def of_rank(rank, batch=batch, parts=parts):
            found, result = pieces(
                batch[parts[rank]],
                GROUPS[parts[rank]],
                "padded_right",
                group_count=5,
                batch_group=Rank(rank=rank, ranks=2),
            )
            return found, result.statistics

        found = Ranks(2).run(of_rank)
        assert found[0][0] + found[1][0] == whole
        merged = found[0][1].merge(found[1][1]).metrics()
        assert merged["sequence_group_contrast_fraction"] == out.metrics()["sequence_group_contrast_fraction"] > 0.0


def test_groups_of_neighbors_stay_on_their_rank():
    """`group_size` counts whole groups on each rank, so ranks exchange nothing for it."""
    batch = made(1)[:8]

    def of_rank(rank):
        laid = LaidLoss(batch[4 * rank : 4 * rank + 4], "packed")
        options = {
            "surrogate": rc.REAL(),
            "mean": rc.Mean("sum"),
            "group_size": 2,
            "batch_group": Rank(rank=rank, ranks=2),
        }
        return laid.gradient(laid(**options).value)[0]

    found = Ranks(2).run(of_rank)
    assert found[0] + found[1] == pieces(batch, [0, 0, 1, 1, 2, 2, 3, 3], "packed", torch.float64)[0]


def test_a_sequence_of_no_group_has_no_loss():
    """Such as its number is on a device, where numbers are not looked at."""
    from rollout_corr.backends import sequence_groups

    batch = made(2)
    laid = LaidLoss(batch, "packed")
    groups = torch.tensor([99 if g == 2 else g for g in GROUPS])
    with mock.patch.object(sequence_groups.torch.compiler, "is_compiling", return_value=True):
        given = rc.Groups(index=groups)
        read = sequence_groups.read_groups(given, "REAL()", len(batch), torch.device("cpu"), False, False)
    with mock.patch("rollout_corr.api.loss_request.groups_of", return_value=read):
        out = laid(surrogate=rc.REAL(), group_index=groups, **TOGETHER)
    slopes = laid.gradient(out.value)[0]
    wanted = expected(rc.REAL(), batch, [g if g != 2 else 100 + i for i, g in enumerate(GROUPS)])
    assert error(out.value.item(), wanted[0]) < 1e-11
    assert not any(x for row, g in zip(slopes, GROUPS, strict=True) if g == 2 for x in row)


def test_no_read_and_no_sort_on_a_device():
    laid = LaidLoss(made(1), "padded_right", torch.float32)
    groups = torch.tensor(GROUPS)
    with (
        mock.patch.dict(LOSSES, blocks=loss_blocks.run_whole),
        mock.patch("rollout_corr.backends.sequence_groups.torch.aminmax", return_value=(0, 4)),
        Reads() as mode,
    ):
        laid(surrogate=rc.REAL(), group_index=groups)
    assert not mode.reads


def test_a_spec_in_the_same_call():
    """A rejected sequence is none of its group: it trains nothing and is compared with nobody."""
    batch = only(random_batch(6, LENGTHS, advantages="sequence"), "old", "rollout")
    laid = LaidLoss(batch, "packed")
    spec = rc.Spec(criteria=(rc.Criterion("abs", over="sequence", reduce="mean", upper=0.3),))
    out = laid(surrogate=rc.REAL(), spec=spec, group_index=torch.tensor(GROUPS), **TOGETHER)
    keep = out.keep.tolist()
    assert not all(k for k, q in zip(keep, batch, strict=True) if valid(q)) and any(keep)
    for q, kept in zip(batch, keep, strict=True):
        q.rollout, q.train_mask = None, [int(kept)] * len(q)
    assert error(out.value.item(), expected(rc.REAL(), batch, GROUPS)[0]) < 1e-11


# --- what cannot be ---


def test_arguments():
    x, index = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)

    def call(**options):
        return rc.policy_loss(x, x, **bundled_loss(old_logp=x, surrogate=rc.REAL(), **options))

    for options, words in (
        ({}, r"groups: expected rc\.Groups\(index=\.\.\.\) or .* for the surrogate REAL\(\), got None"),
        ({"group_size": 3}, r"groups\.size: expected a divisor of the 4 sequences, got 3"),
        ({"group_index": index + 4}, r"groups\.index: expected numbers from 0 to 3"),
        ({"group_index": index[:2]}, r"groups\.index: expected shape \[4\]"),
    ):
        with pytest.raises(ValueError, match=words):
            call(**options)
    for tau in (0.0, -1.0, 9e-31, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"REAL\.tau: expected a (finite )?number"):
            rc.REAL(tau)


def test_the_smallest_temperature_has_finite_gradients():
    """Slopes of 1e30 times the size of a group; those of 1e-40 would be infinite in float32."""
    new = torch.zeros(16, 3, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0]).repeat(8)
    out = rc.policy_loss(
        new, advantages, rc.Batch(groups=rc.Groups(size=16)), rc.Loss(rc.REAL(1e-30)), old_logp=new.detach() - 0.5
    )
    (slopes,) = torch.autograd.grad(out.value, new)
    assert out.value.isfinite() and slopes.isfinite().all() and slopes.abs().max() > 1e28


def test_groups_over_ranks_have_a_count():
    x, index = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)

    def of_rank(rank):
        options = {"group_index": index, "batch_group": Rank(rank=rank, ranks=1)}
        with pytest.raises(ValueError, match=r"groups\.count: expected the number of groups on all ranks"):
            rc.policy_loss(x, x, **bundled_loss(old_logp=x, surrogate=rc.REAL(), **options))
        return True

    assert Ranks(1).run(of_rank) == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "groups", [{"group_size": 5}, {"group_index": torch.tensor(GROUPS), "group_count": 5}], ids=str
)
def test_inside_a_compiled_function(groups):
    laid = LaidLoss(made(4), "padded_right", torch.float32)
    given_ = laid.laid.advantages, laid.laid.mask, laid.arguments["old_logp"]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(new, advantages, mask, old):
        return rc.policy_loss(
            new, advantages, **bundled_loss(mask=mask, old_logp=old, surrogate=rc.REAL(), **groups)
        ).value

    laid.new = torch.nan_to_num(laid.new.detach()).requires_grad_()
    values = laid(surrogate=rc.REAL(), **groups).value, compiled(laid.new, *given_)
    slopes = [torch.autograd.grad(value, laid.new)[0] for value in values]
    assert torch.allclose(*values, rtol=1e-6) and torch.allclose(*slopes, rtol=1e-6, atol=1e-8)

"""Surrogates that compare the sequences of a group, on the kernels: beside loops, beside plain torch, over ranks."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, error
from builders.group_loss_cases import GROUPS, LENGTHS, TOGETHER, expected, made
from builders.kernel_cases import MIDDLE, NARROW, WIDE, shaped
from builders.loss_cases import OF_GROUPS, LaidLoss
from builders.loss_kernel_cases import assert_as_plain_torch, fenced_loss
from builders.split_cases import Rank
from builders.threaded_ranks import Ranks
from rollout_corr.backends import loss_operators
from rollout_corr.spec.encode import decode, encode
from rollout_corr.spec.loss import Objective

pytestmark = pytest.mark.usefixtures("one_thread")


def check(name, batch, layout, device, groups=GROUPS, **options):
    """Value and gradient in float64 as the loops have them."""
    surrogate, laid = OF_GROUPS[name], LaidLoss(batch, layout)
    index = torch.tensor(groups, device=device)
    out, (rows, elsewhere) = fenced_loss(laid, device, surrogate=surrogate, group_index=index, **TOGETHER, **options)
    value, slopes = expected(surrogate, batch, groups)
    assert error(out.value.item(), value) <= 1e-11 and not any(elsewhere), (name, layout)
    for row, wanted in zip(rows, slopes, strict=True):
        assert all(error(a, b) <= 1e-11 and (a == 0) == (b == 0) for a, b in zip(row, wanted, strict=True)), name
    return out


@pytest.mark.parametrize("name", OF_GROUPS)
def test_value_and_gradient(name, device):
    for seed, layout, shapes, names in (
        (11, "packed_gaps", NARROW, ()),
        (48, "packed", WIDE, ("weights", "train_mask")),
        (0, "padded_left", MIDDLE, ("weights", "train_mask")),
    ):
        with shaped(shapes):
            out = check(name, made(seed, *names), layout, device)
    assert 0.0 < out.metrics()["group_contrast_fraction"] <= 1.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, device):
    """With advantages of each token, whose mean decides, and tokens that are not finite."""
    batch = made(7, "weights", "train_mask", advantages="token", broken=True)
    with shaped(NARROW):
        check("real", batch, layout, device)


def test_groups_of_one_have_no_loss(device):
    with shaped(WIDE):
        out = check("real", made(5), "packed", device, groups=list(range(len(LENGTHS))))
    assert out.value == 0.0 and out.metrics()["group_contrast_fraction"] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_beside_plain_torch(dtype, device):
    """Factors of tokens, a KL and a regulariser stay; counts and what the look found are equal, all else is near."""
    laid = LaidLoss(made(3, "weights", "train_mask", "scale"), "packed_gaps", dtype)
    options = {
        "surrogate": rc.REAL(0.3, coef=2.0),
        "group_index": torch.tensor(GROUPS),
        "kl": rc.KL("k3", 0.3, weight="weights"),
        "regulariser": rc.SquaredLogRatio(0.2),
        "ref_logp": laid.arguments["old_logp"],
    }
    exact = ("group_contrast_fraction", "loss_tokens", "loss_sequences")
    with shaped(WIDE):
        assert_as_plain_torch(laid, device, 2e-6, exact, dtype, **options)


def test_order_and_packing_change_no_bit(device):
    """In float32, before the sum is divided: whatever the neighbours, the layout and the tiles."""
    batch = made(9)
    order = [6, 2, 9, 0, 4, 8, 1, 3, 7, 5]

    def pieces(order, layout, shapes):
        laid = LaidLoss([batch[i] for i in order], layout, torch.float32)
        index = torch.tensor([GROUPS[i] for i in order], device=device)
        with shaped(shapes):
            _, (rows, _) = fenced_loss(laid, device, surrogate=rc.REAL(), reduction="sum", group_index=index)
        return dict(zip(order, rows, strict=True))

    one = pieces(range(len(batch)), "packed", NARROW)
    assert one == pieces(order, "packed_gaps", WIDE) == pieces(order, "padded_right", MIDDLE)
    assert sum(any(row) for row in one.values()) > 4


def test_ranks_decide_together(quick_interpreter):
    """Two ranks have the gradients of one, to the bit. Triton's interpreter runs one kernel at a time."""
    batch, lock, kernels = made(1), threading.Lock(), loss_operators.kernels()
    parts = slice(0, 4), slice(4, None)

    def alone(run):
        def locked(*given):
            with lock:
                return run(*given)

        return locked

    def pieces(batch, groups, **options):
        laid = LaidLoss(batch, "packed", torch.float32)
        options |= {"surrogate": rc.REAL(), "reduction": "sum", "group_index": torch.tensor(groups)}
        return laid.gradient(laid(backend="triton", **options).value)[0]

    def of_rank(rank):
        options = {"group_count": 5, "batch_group": Rank(rank=rank, ranks=2)}
        return pieces(batch[parts[rank]], GROUPS[parts[rank]], **options)

    backward = loss_operators.backward()
    with (
        mock.patch.object(kernels, "facts", alone(kernels.facts)),
        mock.patch.object(kernels, "run", alone(kernels.run)),
        mock.patch.object(backward, "scale", alone(backward.scale)),
    ):
        found = Ranks(2).run(of_rank)
    assert found[0] + found[1] == pieces(batch, GROUPS)


def test_an_objective_survives_the_operator():
    wanted = Objective(rc.REAL(0.3, coef=2.0))
    assert decode(*encode(wanted)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "groups", [{"group_size": 5}, {"group_index": torch.tensor(GROUPS), "group_count": 5}], ids=str
)
def test_inside_a_compiled_function(groups):
    """The decision of groups is traced, between two operators."""
    laid = LaidLoss(made(4), "padded_right", torch.float32)
    new = torch.nan_to_num(laid.new.detach()).requires_grad_()
    given = new, laid.laid.advantages, laid.laid.mask, laid.arguments["old_logp"]

    def loss(new, advantages, mask, old, backend):
        options = {"surrogate": rc.REAL(), "backend": backend, **groups}
        return rc.policy_loss(new * 1.0, advantages, mask=mask, old_logp=old, **options).value

    eager = loss(*given, "torch")
    value = torch.compile(lambda *given: loss(*given, "triton"), fullgraph=True, backend="aot_eager")(*given)
    (wanted,), (found,) = torch.autograd.grad(eager, new), torch.autograd.grad(value, new)
    assert torch.allclose(value, eager, rtol=1e-6) and torch.allclose(found, wanted, rtol=1e-6, atol=1e-8)

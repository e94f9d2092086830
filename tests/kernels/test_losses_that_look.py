"""Surrogates that look at the whole batch, on the kernels: beside loops, and beside plain torch."""

from __future__ import annotations

import itertools
import math
import threading
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.batches import error
from builders.kernel_cases import NARROW, WIDE, shaped
from builders.loss_cases import OF_BATCH, OF_ENTROPY, LaidLoss, only, random_batch, with_entropy
from builders.loss_kernel_cases import (
    assert_as_plain_torch,
    assert_close,
    by_reference,
    compare_with_reference,
    fenced_loss,
    tensors_of,
)
from builders.split_cases import Rank
from builders.threaded_ranks import Ranks
from oracles import entropy_losses
from oracles import looks as oracle
from rollout_corr.aot.variant import LossVariant
from rollout_corr.kernels.launches import Launch
from rollout_corr.metrics.loss import sum_names
from rollout_corr.spec.encode import decode, encode
from rollout_corr.spec.loss import Objective

pytestmark = pytest.mark.usefixtures("one_thread")

LOOKING = OF_BATCH | OF_ENTROPY
LENGTHS = (9, 1, 14, 0, 5, 12, 30, 3)
BESIDE = ("old", "weights", "train_mask")
# Metrics that come from counts, and from sums of the look, which is one code.
EXACT = ("loss_tokens", "loss_sequences", "clip_", "cov_", "bapo_", "entropy_clip_")


def drawn(name, seed, layout, dtype, broken=False, part=slice(None)):
    """A batch laid out, the arguments beside it, its sequences, and what gives their entropies, if they have any."""
    surrogate = LOOKING[name]
    if surrogate.reads_entropy:
        given = {"part": part, "broken": True, "names": BESIDE, "unread": broken}
        laid, entropy, batch, rows = with_entropy(seed, layout, LENGTHS, dtype, **given)
        return laid, {"surrogate": surrogate, "entropy": entropy}, batch, lambda: rows
    batch = only(random_batch(seed, LENGTHS, broken=broken), *BESIDE)[part]
    return LaidLoss(batch, layout, dtype), {"surrogate": surrogate}, batch, lambda: None


@pytest.mark.parametrize("name", LOOKING)
@pytest.mark.parametrize("layout", ["packed_gaps", "padded_left"])
def test_value_and_gradient(name, layout, device):
    """In float64 as the loops have them."""
    laid, options, batch, entropy = drawn(name, 11, layout, torch.float64)
    of = entropy_losses if "entropy" in options else oracle
    losses = of.token_losses(options["surrogate"], batch, entropy())
    n = sum(m != 0 for q in batch for m in q.mask)
    with shaped(NARROW):
        out, (rows, elsewhere) = fenced_loss(laid, device, **options)
    wanted = sum(batch[s].weights[t] * value for (s, t), (value, _) in losses.items()) / n
    assert error(out.value.item(), wanted) <= 3e-8 and not any(elsewhere)
    for s, row in enumerate(rows):
        for t, slope in enumerate(row):
            here = losses.get((s, t), (0.0, 0.0))[1]
            here = batch[s].weights[t] * here / n if here else 0.0
            assert error(slope, here) <= 3e-8 and (slope == 0) == (here == 0), (s, t)
    assert out.metrics()["loss_tokens"] == len(losses)


@pytest.mark.parametrize("name", [name for name, surrogate in OF_BATCH.items() if surrogate.hands_tokens == "mask"])
def test_as_many_are_chosen(name, device):
    laid, options, batch, _ = drawn(name, 11, "packed", torch.float64)
    tokens = oracle.tokens_of(options["surrogate"], batch)
    picked = oracle.chosen(options["surrogate"], tokens, list(range(len(batch))))
    out, _ = fenced_loss(laid, device, **options)
    assert out.metrics()["cov_chosen_fraction"] == pytest.approx(len(picked) / len(tokens), rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOOKING)
def test_beside_plain_torch(name, dtype, device):
    """A KL by weights and a regulariser stay, counts and what the look found are equal, and all else is near."""
    beside = {
        "kl": rc.KL("k3", 0.3, weight="weights"),
        "regulariser": rc.SquaredLogRatio(0.2),
        "reduction": "sequence_mean_token_mean",
    }
    layout = "packed" if dtype == torch.float32 else "padded_right"
    laid, options, _, _ = drawn(name, 48, layout, dtype, broken=True)
    options |= beside | {"ref_logp": laid.arguments["old_logp"]}
    with shaped(WIDE):
        assert_as_plain_torch(laid, device, 1e-6, EXACT, name, **options)


@pytest.mark.parametrize("surrogate", [rc.BAPO(dual=3.0), rc.EntropyClip()])
def test_next_to_a_bound(surrogate, device):
    """A ratio at its bound, and one float32 to either side of it, is cut or left as in plain torch."""
    variant = LossVariant("near", Objective(surrogate), weights=None, mask=None)
    given = tensors_of(variant)
    bound = given.looked
    if bound is None:
        bound = torch.where(given.advantages < 0, given.decided[2], given.decided[3]).float()
    given.base.zero_()
    for i, aside in enumerate((0.0, math.inf, -math.inf)):
        given.new[i::3] = bound[i::3].nextafter(torch.tensor(aside)) if i else bound[i::3]
    compare_with_reference(given, variant.objective, device, surrogate)
    found, _ = by_reference(given, variant.objective, torch.float32)
    names = sum_names(variant.objective)
    low, high = (found.statistics[names.index(name)] for name in ("clip_low", "clip_high"))
    assert low == torch.count_nonzero(given.advantages[2::3] < 0)
    assert high == torch.count_nonzero(given.advantages[1::3] > 0)


@pytest.mark.parametrize("name", ["bapo upper first", "entropy clip dual"])
@pytest.mark.parametrize("nonfinite", ["neutral", "propagate"])
def test_what_is_not_finite(name, nonfinite, device):
    """Read as 1 or passed on as in plain torch, whose NaN it is."""
    laid, options, _, _ = drawn(name, 9, "packed", torch.float32, broken=True)
    for other in ("weights", "train_mask"):
        del laid.arguments[other]
    options |= {"spec": rc.Spec(nonfinite=nonfinite), "rollout_logp": laid.arguments["old_logp"]}
    like = laid(backend="torch", **options)
    like_rows, _ = laid.gradient(like.value)
    out, (rows, _) = fenced_loss(laid, device, **options)
    assert_close(out.value, like.value, 1e-6, 1.0, name)
    assert out.value.isnan() == (nonfinite == "propagate")
    for got, wanted in zip(rows, like_rows, strict=True):
        assert_close(torch.tensor(got), torch.tensor(wanted), 1e-6, 0.01, name)


def one_at_a_time(run):
    """Launches of several threads one after the other, because Triton's interpreter has one state."""
    lock = threading.Lock()

    def alone(launch):
        with lock:
            run(launch)

    return alone


@pytest.mark.parametrize("name", ["clip cov", "bapo", "entropy clip"])
def test_ranks_decide_together(name):
    """Two ranks have the gradients of one, to the bit: their bounds are those of all tokens."""
    options = {"reduction": "sum", "backend": "triton"}
    laid, of_whole, batch, _ = drawn(name, 3, "packed", torch.float32)
    ids = {"sequence_ids": torch.arange(len(batch))}
    whole, _ = laid.gradient(laid(**options, **of_whole, **ids).value)

    def of_rank(rank):
        part = slice(0, 4) if rank == 0 else slice(4, None)
        laid, mine, _, _ = drawn(name, 3, "padded_right", torch.float32, part=part)
        mine |= {"sequence_ids": torch.arange(len(batch))[part], "batch_group": Rank(rank=rank, ranks=2)}
        return laid.gradient(laid(**options, **mine).value)[0]

    with mock.patch.object(Launch, "run", one_at_a_time(Launch.run)):
        found = Ranks(2).run(of_rank)
    assert list(itertools.chain(*found)) == whole


@pytest.mark.parametrize(
    "surrogate",
    [
        rc.ClipCov(seed=2**62 + 1, dual=3.0),
        rc.KLCov(0.5),
        rc.BAPO(0.4, first="upper", dual=3.0),
        rc.EntropyClip(0.1, widens="upper"),
    ],
)
def test_an_objective_survives_the_operator(surrogate):
    assert decode(*encode(Objective(surrogate))) == Objective(surrogate)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip cov", "kl cov", "bapo dual", "entropy clip dual"])
def test_inside_a_compiled_function(name):
    """The look is traced, and the kernels are the operator."""
    laid, options, _, _ = drawn(name, 4, "padded_right", torch.float32)
    new = torch.nan_to_num(laid.new.detach()).requires_grad_()
    given = new, laid.laid.advantages, laid.laid.mask, laid.arguments["old_logp"], options.get("entropy")

    def loss(new, advantages, mask, old, entropy, backend):
        return rc.policy_loss(
            new * 1.0, advantages, mask=mask, old_logp=old, surrogate=LOOKING[name], entropy=entropy, backend=backend
        )

    eager = loss(*given, "torch").value
    value = torch.compile(lambda *given: loss(*given, "triton").value, fullgraph=True, backend="aot_eager")(*given)
    (wanted,), (found,) = torch.autograd.grad(eager, new), torch.autograd.grad(value, new)
    assert torch.allclose(value, eager, rtol=1e-6) and torch.allclose(found, wanted, rtol=1e-6, atol=1e-8)

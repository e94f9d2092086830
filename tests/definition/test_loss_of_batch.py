"""Surrogates that look at the whole batch: beside loops in every layout, in blocks, in one piece and over ranks."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_corr as rc
from builders.batches import LAYOUTS, error
from builders.calls import bundled_loss
from builders.loss_cases import OF_BATCH, LaidLoss, only, random_batch
from builders.reads import Reads
from builders.split_cases import Rank
from builders.threaded_ranks import Ranks
from oracles import batch_losses as oracle
from rollout_corr.api.policy_loss import LOSSES
from rollout_corr.backends import loss_blocks, sees_batch

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (9, 1, 14, 0, 5, 12, 30, 3)


def expected(surrogate, batch, ids=None):
    """The mean over the valid tokens, and its derivatives by sequence."""
    losses = oracle.token_losses(surrogate, batch, ids)
    n = sum(m != 0 for q in batch for m in q.mask)
    weight = {(s, t): 1.0 if batch[s].weights is None else batch[s].weights[t] for s, t in losses}
    value = math.fsum(weight[at] * pair[0] for at, pair in losses.items()) / n
    slopes = [
        [weight.get((s, t), 0.0) * losses.get((s, t), (0.0, 0.0))[1] / n for t in range(len(q))]
        for s, q in enumerate(batch)
    ]
    return value, slopes


def check(surrogate, batch, layout, dtype=torch.float64, within=1e-11, ids=None, **options):
    laid = LaidLoss(batch, layout, dtype)
    if ids is not None:
        options["sequence_ids"] = torch.tensor(ids)
    out = laid(surrogate=surrogate, **options)
    value, slopes = expected(surrogate, batch, ids)
    assert error(out.value.item(), value) <= within, (surrogate, layout)
    found, elsewhere = laid.gradient(out.value)
    assert not any(elsewhere)
    for row, wanted in zip(found, slopes, strict=True):
        assert all(error(a, b) <= within for a, b in zip(row, wanted, strict=True)), (surrogate, layout)
    return out


@pytest.mark.parametrize("name", OF_BATCH)
def test_value_and_gradient(name, way):
    weighted = "old", "weights", "train_mask"
    for seed, layout, names in ((11, "packed_gaps", ("old",)), (48, "packed", ("old",)), (0, "padded_left", weighted)):
        check(OF_BATCH[name], only(random_batch(seed, LENGTHS), *names), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout):
    for seed, name in enumerate(("clip cov", "kl cov", "bapo upper first")):
        check(OF_BATCH[name], only(random_batch(seed, LENGTHS), "old", "weights", "train_mask"), layout)


@pytest.mark.parametrize("name", OF_BATCH)
def test_metrics(name, way):
    surrogate = OF_BATCH[name]
    batch = only(random_batch(5, LENGTHS), "old", "train_mask")
    out = check(surrogate, batch, "padded_right")
    tokens, found = oracle.tokens_of(surrogate, batch), out.metrics()
    if name.startswith("bapo"):
        bounds = oracle.bounds(surrogate, tokens)
        assert (found["bapo_lower_mean"], found["bapo_upper_mean"]) == bounds
        up, down = oracle.contributions(surrogate, tokens, *bounds)
        assert found["bapo_positive_fraction"] == pytest.approx(up / (up + down), rel=1e-9)
        assert found["clip_high_fraction"] == sum(q.a > 0 and q.ratio(surrogate) > bounds[1] for q in tokens) / len(
            tokens
        )
        assert found["clip_low_fraction"] == sum(q.a < 0 and q.ratio(surrogate) < bounds[0] for q in tokens) / len(
            tokens
        )
        return
    picked, values = oracle.chosen(surrogate, tokens, list(range(len(batch)))), oracle.covariances(tokens)
    assert found["cov_chosen_fraction"] == pytest.approx(len(picked) / len(tokens), rel=1e-15)
    some = [value for value, q in zip(values, tokens, strict=True) if (q.s, q.t) in picked]
    assert found["cov_chosen_mean"] == pytest.approx(sum(some) / max(len(some), 1), abs=1e-9)
    if name.startswith("clip"):
        assert found["cov_eligible_fraction"] == len(oracle.eligible(surrogate, tokens)) / len(tokens)


def test_the_cases_reach_what_they_are_for():
    """Draws leave some of the eligible out, and bounds stop at their start, on their way and at their end."""
    batch = only(random_batch(5, LENGTHS), "old")
    for name in ("clip cov", "clip cov dual"):
        tokens = oracle.tokens_of(OF_BATCH[name], batch)
        assert (
            0
            < len(oracle.chosen(OF_BATCH[name], tokens, list(range(9))))
            < len(oracle.eligible(OF_BATCH[name], tokens))
        )
        assert any(oracle.clipped(OF_BATCH[name], q) for q in tokens)
    places = set()
    for seed in (11, 48):
        for name in ("bapo", "bapo upper first", "bapo dual", "bapo at once"):
            surrogate = OF_BATCH[name]
            tokens = oracle.tokens_of(surrogate, only(random_batch(seed, LENGTHS), "old"))
            way = list(oracle.walk(surrogate))
            at = way.index(oracle.bounds(surrogate, tokens))
            places.add((name, "start" if at == 0 else "end" if at == len(way) - 1 else "between"))
    assert {
        ("bapo", "between"),
        ("bapo upper first", "between"),
        ("bapo dual", "end"),
        ("bapo at once", "start"),
    } <= places


@pytest.mark.parametrize("name", OF_BATCH)
def test_gradient_by_difference_quotients(name):
    """Where the step does not change what is decided, the value's own slope is the gradient."""
    surrogate = OF_BATCH[name]
    batch = only(random_batch(2, (6, 4, 9)), "old")
    laid = LaidLoss(batch, "packed")
    out = laid(surrogate=surrogate)
    slopes = torch.autograd.grad(out.value, laid.new)[0]
    step, fixed = 1e-6, None

    def value(x):
        with torch.no_grad():
            return rc.policy_loss(
                x, laid.laid.advantages, **bundled_loss(mask=laid.laid.mask, surrogate=surrogate, **laid.arguments)
            ).value

    def found(task, ids, ranks):
        return fixed

    original = loss_blocks.see_batch
    with mock.patch.object(loss_blocks, "see_batch", side_effect=original) as seen:
        laid(surrogate=surrogate)
        fixed = original(*seen.call_args.args)
    with mock.patch.object(loss_blocks, "see_batch", found):
        for i in laid.laid.mask.nonzero().flatten().tolist():
            sides = []
            for sign in (1.0, -1.0):
                moved = laid.new.detach().clone()
                moved[i] += sign * step
                sides.append(value(moved).item())
            assert abs((sides[0] - sides[1]) / (2 * step) - slopes[i].item()) < 1e-8


@pytest.mark.parametrize("name", OF_BATCH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(name, dtype):
    """Log-probs that a dtype holds, so that the oracle sees the same."""
    rng = random.Random(3)
    batch = only(random_batch(3, LENGTHS), "old")
    for q in batch:
        for row in (q.new, q.old):
            row[:] = [-rng.randrange(1, 200) / 64 for _ in row]
        q.advantages = [rng.choice((-1.0, -0.5, 0.75, 1.5)) for _ in q.advantages]
    # The gradient has the dtype of new_logp.
    check(OF_BATCH[name], batch, "packed", dtype, 2e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("name", OF_BATCH)
def test_tokens_that_are_not_finite_are_not_seen(name, way):
    batch = only(random_batch(7, LENGTHS, broken=True), "old")
    check(OF_BATCH[name], batch, "padded_left")


@pytest.mark.parametrize("name", OF_BATCH)
def test_nothing_to_see(name, way):
    x = torch.zeros(2, 3, requires_grad=True)
    out = rc.policy_loss(x, x.detach(), loss=rc.Loss(OF_BATCH[name]), mask=torch.zeros(2, 3), old_logp=x.detach())
    out.value.backward()
    assert out.value.item() == 0.0 and not x.grad.any()
    assert all(math.isfinite(value) for value in out.metrics().values())
    packed = torch.zeros(0)
    cu = torch.zeros(1, dtype=torch.int64)
    assert (
        rc.policy_loss(packed, packed, loss=rc.Loss(OF_BATCH[name]), cu_seqlens=cu, old_logp=packed).value.item() == 0.0
    )


# --- what must not matter ---


def pieces(batch, names):
    """The gradient of each sequence, as if the loss were a sum."""
    laid = LaidLoss(batch, names["layout"], names["dtype"])
    out = laid(surrogate=names["surrogate"], mean=rc.Mean("sum"), sequence_ids=torch.tensor(names["ids"]))
    return laid.gradient(out.value)[0], out


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from(sorted(OF_BATCH)), st.sampled_from(LAYOUTS), st.randoms())
def test_packing_and_order(seed, name, layout, rng):
    """With the numbers of the sequences given, neither order nor layout changes what is decided: bits of float32."""
    batch = only(random_batch(seed, LENGTHS), "old")
    ids = [rng.randrange(-(2**62), 2**62) for _ in batch]
    order = list(range(len(batch)))
    rng.shuffle(order)
    given_ = {"surrogate": OF_BATCH[name], "dtype": torch.float32}
    one, out = pieces(batch, {**given_, "layout": "packed", "ids": ids})
    two, other = pieces([batch[i] for i in order], {**given_, "layout": layout, "ids": [ids[i] for i in order]})
    assert [one[i] for i in order] == two
    for key in ("cov_chosen_fraction", "cov_eligible_fraction", "bapo_lower_mean", "bapo_upper_mean"):
        assert out.metrics().get(key) == other.metrics().get(key)


@pytest.mark.parametrize("name", OF_BATCH)
def test_ranks_decide_together(name):
    """Two ranks have the gradients of one, to the bit, and their statistics merge to those of the whole."""
    surrogate = OF_BATCH[name]
    for seed in range(3):
        batch = only(random_batch(seed, LENGTHS), "old")
        ids = [7 * s + 1 for s in range(len(batch))]
        parts = slice(0, 4), slice(4, None)
        whole, out = pieces(batch, {"surrogate": surrogate, "dtype": torch.float32, "layout": "packed", "ids": ids})

        def of_rank(rank, batch=batch, ids=ids, parts=parts):
            laid = LaidLoss(batch[parts[rank]], "padded_right", torch.float32)
            numbers = torch.tensor(ids[parts[rank]])
            found = laid(
                surrogate=surrogate, mean=rc.Mean("sum"), sequence_ids=numbers, batch_group=Rank(rank=rank, ranks=2)
            )
            return laid.gradient(found.value)[0], found.statistics

        found = Ranks(2).run(of_rank)
        assert found[0][0] + found[1][0] == whole
        merged, wanted = found[0][1].merge(found[1][1]).metrics(), out.metrics()
        for key in surrogate.traits.sums:
            for metric in {key, f"{key}_fraction", "cov_chosen_mean", "bapo_positive_fraction"} & set(wanted):
                assert merged[metric] == pytest.approx(wanted[metric], rel=1e-6)


# --- how it runs ---


@pytest.mark.parametrize("name", OF_BATCH)
def test_no_read_and_no_sort_on_a_device(name):
    batch = only(random_batch(1, LENGTHS), "old")
    laid = LaidLoss(batch, "padded_right", torch.float32)
    with (
        mock.patch.dict(LOSSES, blocks=loss_blocks.run_whole),
        mock.patch.object(sees_batch, "in_blocks", return_value=False),
        Reads() as mode,
    ):
        laid(surrogate=OF_BATCH[name])
    assert not mode.reads


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip cov", "kl cov", "bapo"])
def test_inside_a_compiled_function(name):
    batch = only(random_batch(4, LENGTHS), "old")
    laid = LaidLoss(batch, "padded_right", torch.float32)
    given = laid.laid.advantages, laid.laid.mask, laid.arguments["old_logp"]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(new, advantages, mask, old):
        return rc.policy_loss(new, advantages, loss=rc.Loss(OF_BATCH[name]), mask=mask, old_logp=old).value

    laid.new = torch.nan_to_num(laid.new.detach()).requires_grad_()
    eager = laid(surrogate=OF_BATCH[name]).value
    (wanted,) = torch.autograd.grad(eager, laid.new)
    value = compiled(laid.new, *given)
    (found,) = torch.autograd.grad(value, laid.new)
    assert torch.allclose(value, eager, rtol=1e-6) and torch.allclose(found, wanted, rtol=1e-6, atol=1e-8)


def test_a_spec_in_the_same_call():
    """Tokens that a correction rejects are not seen."""
    batch = only(random_batch(6, LENGTHS), "old", "rollout")
    laid = LaidLoss(batch, "packed")
    spec = rc.Spec(weight=rc.Weight.token(upper=1.5), criteria=(rc.Criterion("abs", upper=0.5),))
    out = laid(surrogate=OF_BATCH["kl cov"], spec=spec)
    kept = laid.laid.read(out.mask)
    weights = laid.laid.read(out.weights)
    fixed = [
        replace(q, rollout=None, weights=[float(w) for w in weight], train_mask=[int(m != 0) for m in row])
        for q, row, weight in zip(batch, kept, weights, strict=True)
    ]
    assert error(out.value.item(), expected(OF_BATCH["kl cov"], fixed)[0]) < 1e-11


def test_a_kl_of_its_own_reduction():
    """Its own pass does not look, and the statistics keep their places."""
    batch = only(random_batch(6, LENGTHS), "old", "ref")
    laid = LaidLoss(batch, "packed")
    kl = rc.KL("k3", 0.1, mean=rc.Mean("sequence"))
    out = laid(surrogate=OF_BATCH["kl cov"], kl=kl)
    alone = laid(surrogate=rc.PPO(), kl=kl).metrics()
    assert out.metrics()["kl_new_ref_k3"] == alone["kl_new_ref_k3"] > 0.0
    assert out.metrics()["cov_chosen_fraction"] > 0.0


def test_a_criterion_of_new_old_counts_tokens_that_rollout_has_no_number_for(way):
    zeros = torch.zeros(2, 2)
    rollout = torch.tensor([[math.nan, 0.0], [0.0, 0.0]])
    spec = rc.Spec(criteria=(rc.Criterion("external", upper=9.0, of="new/old", name="x", label="c"),))
    given = {"old_logp": zeros, "rollout_logp": rollout, "spec": spec, "surrogate": rc.KLCov()}
    found = rc.policy_loss(zeros, zeros, **bundled_loss(external={"x": torch.full((2, 2), 3.0)}, **given)).metrics()
    assert (found["c/mean"], found["c/min"], found["c/max"], found["c/std"]) == (3.0, 3.0, 3.0, 0.0)


# --- what cannot be ---


def test_arguments():
    x = torch.zeros(2, 3)

    def call(**options):
        return rc.policy_loss(x, x, **bundled_loss(old_logp=x, **options))

    ids = torch.arange(2)
    for options, kind, words in (
        ({"surrogate": rc.ClipCov(), "sequence_ids": [0, 1]}, TypeError, "sequence_ids: expected a tensor, got list"),
        ({"surrogate": rc.ClipCov(), "sequence_ids": ids.float()}, ValueError, "sequence_ids: .* int64, got float32"),
        (
            {"surrogate": rc.ClipCov(), "sequence_ids": torch.arange(3)},
            ValueError,
            r"sequence_ids: expected shape \[2\]",
        ),
        ({"surrogate": rc.ClipCov(), "sequence_ids": ids.to("meta")}, ValueError, "sequence_ids: expected device cpu"),
    ):
        with pytest.raises(kind, match=words):
            call(**options)
    for make, kind, words in (
        (lambda: rc.ClipCov(share=0.0), ValueError, "ClipCov.share: expected a number above 0 and at most 1, got 0.0"),
        (lambda: rc.KLCov(1.5), ValueError, "KLCov.share: expected a number above 0 and at most 1, got 1.5"),
        (
            lambda: rc.ClipCov(lower=2.0, upper=1.0),
            ValueError,
            "ClipCov.upper: expected a number >= lower=2.0, got 1.0",
        ),
        (lambda: rc.ClipCov(seed=1.0), TypeError, "ClipCov.seed: expected an integer, got float 1.0"),
        (lambda: rc.ClipCov(seed=-1), ValueError, "ClipCov.seed: expected an integer from 0"),
        (lambda: rc.KLCov(penalty=-1.0), ValueError, "KLCov.penalty: expected a number >= 0"),
        (lambda: rc.KLCov(penalty=math.inf), ValueError, r"KLCov.penalty: expected a number >= 0 and <= 3.4.*got inf"),
        (
            lambda: rc.KLCov(penalty=1e39),
            ValueError,
            r"KLCov.penalty: expected a number that float32 holds, got 1e\+39",
        ),
        (lambda: rc.BAPO(lower=math.inf), ValueError, r"BAPO.lower: expected a number >= 0 and <= 3.4.*, got inf"),
        (lambda: rc.BAPO(upper=math.inf), ValueError, r"BAPO.upper: expected a number >= 0 and <= 3.4.*, got inf"),
        (lambda: rc.BAPO(0.0), ValueError, "BAPO.share: expected a number above 0"),
        (lambda: rc.BAPO(first="both"), ValueError, "BAPO.first: expected one of"),
        (lambda: rc.BAPO(upper_step=1e-4), ValueError, "BAPO.upper_step: expected at most 1000 steps from 1.2 to 3.0"),
        (lambda: rc.BAPO(dual=0.5), ValueError, "BAPO.dual: expected a number >= 1"),
        (lambda: rc.BAPO(upper_most=math.inf), ValueError, "BAPO.upper_step: expected at most 1000 steps"),
    ):
        with pytest.raises(kind, match=words):
            make()


def test_parts_of_sequences_are_refused():
    x = torch.zeros(2, 3)

    def of_rank(rank):
        with pytest.raises(
            ValueError, match=r"Loss\.surrogate: expected one that does not look .* ranks\.sequence, got BAPO\(\)"
        ):
            rc.policy_loss(
                x, x, rc.Batch(ranks=rc.Ranks(sequence=Rank(rank=rank, ranks=1))), rc.Loss(rc.BAPO()), old_logp=x
            )
        return True

    assert Ranks(1).run(of_rank) == [True]

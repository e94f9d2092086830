"""Invariance of a policy loss under order, splits, padding, empty sequences and garbage; and its refusals."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rollout_corr as rc
from builders.batches import GARBAGE, LAYOUTS
from builders.calls import bundled_loss
from builders.loss_cases import COUNTED, MEANS, PLAIN, SURROGATES, TENSORS, LaidLoss, only
from builders.rounding import assert_near, is_near, near
from oracles import loss as oracle_loss
from rollout_corr.specs.surrogate import Surrogate

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = settings(max_examples=20)
PARTS = ("old", "weights", "train_mask", "ref", "scale")
WITHOUT_GAPS = [layout for layout in LAYOUTS if layout != "packed_gaps"]


@st.composite
def batches(draw):
    """Any number of sequences, empty ones among them, with ordinary and broken tokens."""
    made = []
    log_probs = st.one_of([st.floats(-8.0, -0.125, width=16)] * 8 + [st.sampled_from((math.nan, -math.inf, -200.0))])
    for length in draw(st.lists(st.integers(0, 6), max_size=5)):

        def row(values, length=length):
            return draw(st.lists(values, min_size=length, max_size=length))

        new = row(log_probs)
        moves = [row(st.floats(-0.75, 0.75, width=16)) for _ in range(3)]
        old, rollout, ref = ([x + d for x, d in zip(new, move, strict=True)] for move in moves)
        mask, trains = row(st.sampled_from((0, 1, 1, 1))), row(st.sampled_from((0, 1, 1)))
        advantages, weights = row(st.sampled_from((-1.0, -0.5, 0.0, 0.25, 2.0))), row(st.floats(0.125, 2.0, width=16))
        scale = row(st.sampled_from((0.0, 0.5, 1.0, 3.0)))
        made.append(oracle_loss.Sequence(new, mask, advantages, old, rollout, ref, weights, trains, scale))
    return only(made, *PARTS)


@st.composite
def calls(draw, means=MEANS):
    """Options of a call."""
    mean = draw(st.sampled_from(means))
    scope = draw(st.sampled_from(("kept", "all")))
    return {
        "surrogate": draw(st.sampled_from(list(SURROGATES.values()))),
        "kl": rc.KL(draw(st.sampled_from(("k1", "k2", "k3", "abs"))), 0.1, scope=scope),
        "regularizer": draw(st.sampled_from((None, rc.SquaredLogRatio(0.1, scope)))),
        "mean": mean if mean.of == "sum" else replace(mean, over=draw(st.sampled_from(COUNTED))),
    }


def run(batch, options, layout="packed"):
    laid = LaidLoss(batch, layout)
    if not batch:
        for name in PARTS:
            key = name if name in PLAIN else f"{name}_logp"
            laid.arguments[key] = laid.laid.rollout
    out = laid(**options)
    return out, laid.gradient(out.value)[0] if batch else []


def assert_same_statistics(one, other):
    assert torch.equal(one.maxima, other.maxima)
    assert_near(one.sums, other.sums)


@CASES
@given(batches(), calls(), st.sampled_from(LAYOUTS))
def test_layout_does_not_matter(batch, options, layout):
    (one, slopes), (other, others) = run(batch, options), run(batch, options, layout)
    assert is_near(other.value.item(), one.value.item())
    assert slopes == others
    assert_same_statistics(one.statistics, other.statistics)


@CASES
@given(batches(), calls(), st.randoms(use_true_random=False))
def test_order_of_sequences_does_not_matter(batch, options, random):
    order = list(range(len(batch)))
    random.shuffle(order)
    (one, slopes), (other, others) = run(batch, options), run([batch[s] for s in order], options)
    assert is_near(other.value.item(), one.value.item())
    assert others == [slopes[s] for s in order]
    assert_same_statistics(one.statistics, other.statistics)


@CASES
@given(batches(), calls(), st.lists(st.integers(0, 5), max_size=3), st.sampled_from(WITHOUT_GAPS))
def test_micro_batches_add_up_to_the_whole(batch, options, cuts, layout):
    """With the denominator of the whole, values add up and gradients are the very same numbers."""
    whole, slopes = run(batch, options, layout)
    shared = dict(options)
    mean = options["mean"]
    if mean.unit is not None:
        kind = "loss" if mean.over == "kept" else "loss_valid"
        count = whole.statistics.metrics_async().values()[f"{kind}_{mean.unit}"]
        # A total divides in place of what is counted, over the original tokens of each sequence.
        assume((mean.of, mean.over) != ("sequence", "kept"))
        shared |= {"mean": replace(mean, over="original"), "total": torch.tensor(count)}
    edges = [0, *sorted(min(cut, len(batch)) for cut in cuts), len(batch)]
    parts, found = [], []
    for start, end in itertools.pairwise(edges):
        part, slope = run(batch[start:end], shared, layout)
        parts.append(part)
        found += slope
    assert is_near(sum(part.value.item() for part in parts), whole.value.item())
    assert found == slopes
    if mean.over == "original":
        assert_same_statistics(rc.Statistics.sum(part.statistics for part in parts), whole.statistics)


@CASES
@given(batches(), calls(), st.sampled_from(LAYOUTS), st.lists(st.integers(0, 4), max_size=3))
def test_empty_sequences_change_nothing(batch, options, layout, places):
    assume(batch)
    more, order = list(batch), list(range(len(batch)))
    for length, place in enumerate(places):
        at = min(place, len(more))
        junk = [math.nan] * length
        empty = oracle_loss.Sequence(junk, [0] * length, junk, junk, None, junk, junk, junk, junk)
        more.insert(at, empty)
        order = [s + (s >= at) for s in order]
    (few, slopes), (many, others) = run(batch, options, layout), run(more, options, layout)
    assert is_near(many.value.item(), few.value.item())
    assert [others[s] for s in order] == slopes
    assert_same_statistics(many.statistics, few.statistics)


@CASES
@given(batches(), calls(), st.sampled_from(LAYOUTS), st.sampled_from(GARBAGE), st.sampled_from(GARBAGE))
def test_what_stands_at_invalid_tokens_does_not_matter(batch, options, layout, one, other):
    def filled(value, second):
        made = []
        for q in batch:
            rows = {}
            for i, name in enumerate(("new", "advantages", *TENSORS)):
                row, fill = getattr(q, name), (value, second)[i % 2]
                rows[name] = row and [x if m else fill for x, m in zip(row, q.mask, strict=True)]
            made.append(oracle_loss.Sequence(mask=q.mask, **rows))
        return made

    (clean, slopes), (dirty, others) = run(filled(0.0, 0.0), options, layout), run(filled(one, other), options, layout)
    assert torch.equal(clean.value, dirty.value) and slopes == others
    assert torch.equal(clean.statistics.sums, dirty.statistics.sums)


@CASES
@given(batches(), calls())
def test_nothing_is_nan(batch, options):
    out, slopes = run(batch, options)
    assert out.value.isfinite()
    assert all(math.isfinite(x) for row in slopes for x in row)
    assert all(math.isfinite(x) for x in out.metrics().values())


# --- what comes back, and what is refused -----------------------------------------------------------------------------


def z(*shape):
    return torch.zeros(*shape)


def test_masks_that_come_back():
    new, mask = z(2, 3).requires_grad_(), torch.tensor([[1.0, 0.3, 0.0], [1.0, 1.0, 1.0]])
    trains = torch.tensor([[1, 1, 1], [0, 1, 0]])
    assert rc.policy_loss(new, new, mask=mask).mask is mask
    assert rc.policy_loss(new, new).mask.all()
    out = rc.policy_loss(new, new, mask=mask, correction=rc.Factors(mask=trains))
    assert out.mask.dtype == mask.dtype and out.mask.tolist() == [[1.0, mask[0, 1].item(), 0.0], [0.0, 1.0, 0.0]]
    assert rc.policy_loss(new, new, correction=rc.Factors(mask=trains)).mask.tolist() == trains.bool().tolist()
    assert out.weights is None and out.keep is None and out.warnings() == []
    spec = rc.Spec(rc.Weight.token())
    out = rc.policy_loss(new, new, mask=mask, rollout_logp=new, spec=spec)
    assert out.weights.tolist() == [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]] and out.keep.tolist() == [True, True]
    rows = [z(3), z(2)]
    out = rc.policy_loss(rows, rows, rollout_logp=rows, spec=spec)
    assert [row.shape[0] for row in out.weights] == [3, 2] and len(out.mask) == 2


def test_statistics_merge_and_name_what_differs():
    generator = torch.Generator().manual_seed(0)
    new, advantages, rollout = (torch.randn(4, 5, generator=generator) for _ in range(3))
    spec = rc.Spec(rc.Weight.token(upper=2.0))
    whole = rc.policy_loss(new, advantages, rollout_logp=rollout, spec=spec)
    parts = [
        rc.policy_loss(new[i : i + 2], advantages[i : i + 2], rollout_logp=rollout[i : i + 2], spec=spec)
        for i in (0, 2)
    ]
    merged = rc.Statistics.sum(part.statistics for part in parts)
    assert merged.metrics().keys() == whole.metrics().keys()
    assert merged.metrics() == near(whole.metrics(), torch.float32)
    assert whole.metrics_async().result() == whole.metrics()
    assert whole.statistics.to("cpu").metrics() == whole.metrics()
    other = rc.policy_loss(new, advantages, loss=rc.Loss(rc.GPG()), rollout_logp=rollout, spec=spec)
    with pytest.raises(ValueError, match=r"^other: expected statistics of the same objective Objective\(PPO"):
        whole.statistics.merge(other.statistics)
    with pytest.raises(ValueError, match=r"^names: expected 'dashboard' or one of \['native'\]"):
        rc.policy_loss(new, advantages).metrics("verl")


def call(*given, **options):
    """A loss of two sequences of three tokens."""
    given = given or (z(2, 3), z(2))
    return rc.policy_loss(*given, **bundled_loss(**options))


ROWS, SPEC, WEIGHTED = z(2, 3), rc.Spec(), rc.Spec(rc.Weight.token())
OLD_NEW = rc.Spec(criteria=(rc.Criterion("ratio", upper=1.0, of="new/old"),))
V, T = ValueError, TypeError
REFUSED = [
    (lambda: call(ROWS, None), V, "advantages: expected one per token or per sequence, got None"),
    (lambda: call(ROWS, z(3)), V, "advantages: expected shape [2, 3] (per token), [2] or [2, 1] (per sequence), got ["),
    (lambda: call(z(1, 2, 3), z(2)), V, "new_logp: expected shape [N], [1, N] or [B, T], got [1, 2, 3]"),
    (lambda: call(old_logp=z(3, 2)), V, "old_logp: expected shape [2, 3] (of new_logp), got [3, 2]"),
    (lambda: call(kl=rc.KL("k1", 0.1)), V, "ref_logp: expected a value, because Loss.kl is given, got None"),
    (lambda: call(ref_logp=ROWS), V, "Loss.kl: expected a value, because ref_logp is given, got None"),
    (lambda: call(weights=z(2)), V, "Factors.weights: expected shape [2, 3] (of new_logp), got [2]"),
    (lambda: call(scale=z(3)), V, "scale: expected shape [2, 3] (per token), [2] or [2, 1] (per sequence), got [3]"),
    (lambda: call(scale=z(2), surrogate=rc.GMPO(), backend="triton"), V, "backend: expected 'auto' or 'torch', got 't"),
    (lambda: call(rollout_logp=ROWS, weights=ROWS), V, "correction: expected no weights in bypass mode, where PPO's o"),
    (lambda: call(train_mask=z(2)), V, "Factors.mask: expected shape [2, 3] (of new_logp), got [2]"),
    (lambda: call(total=7.0, mean=rc.Mean(over="kept")), V, "total: expected None with Mean(over='kept'), got both"),
    (lambda: call(old_logp=ROWS, spec=SPEC), V, "rollout_logp: expected the log-probs of the engine that sampled"),
    (lambda: call(rollout_logp=ROWS, spec=OLD_NEW), V, "old_logp: expected log-probs for criterion 'token_ratio_of_ne"),
    (lambda: call(surrogate=rc.PPO(of="new/rollout"), old_logp=ROWS), V, "rollout_logp: expected log-probs for a surr"),
    (
        lambda: call(surrogate=rc.Score(upper=2.0), rollout_logp=ROWS, spec=WEIGHTED),
        V,
        "Loss.surrogate: expected Score() w",
    ),
    (lambda: rc.Mean("mean"), V, "Mean.of: expected one of ['token', 'sequence', 'sequence_sum', 'sum'], got 'mean'"),
    (lambda: rc.Mean("token_mean"), V, "Mean.of: expected one of ['token', 'sequence', 'sequence_sum', 'sum'], got 't"),
    (lambda: rc.Mean(over="all"), V, "Mean.over: expected one of ['original', 'kept', 'rows'], got 'all'"),
    (lambda: rc.Mean("sum", "kept"), V, "Mean.over: expected its default with of='sum', which does not divide, got 'k"),
    (lambda: call(total=z(2)), V, "total: expected a number or a tensor that holds one, got float32 of shape [2]"),
    (lambda: call(backend="compiled"), V, "backend: expected one of ['auto', 'triton', 'torch'] for policy_loss, got "),
    (lambda: rc.PPO(2.0), V, "PPO.low: expected a number >= 0 and <= 1, got 2.0"),
    (lambda: rc.PPO(dual=0.5), V, "PPO.dual: expected a number >= 1, got 0.5"),
    (lambda: rc.PPO(of="old"), V, "PPO.of: expected one of ['new/old', 'new/rollout'], got 'old'"),
    (lambda: rc.PPO(clamp=50.0), V, "PPO.clamp: expected a finite number > 0 and <= 40, got 50.0"),
    (lambda: rc.GSPO(through="both"), V, "GSPO.through: expected one of ['sequence', 'token'], got 'both'"),
    (lambda: rc.Score(2.0, 1.0), V, "Score: expected lower <= upper, got lower=2.0, upper=1.0"),
    (lambda: rc.DPPO("js"), V, "DPPO.divergence: expected one of ['tv', 'kl'], got 'js'"),
    (lambda: rc.SAPO(0.0), V, "SAPO.positive: expected a finite number > 0, got 0.0"),
    (lambda: rc.DRO(-1.0), V, "DRO.beta: expected a finite number > 0, got -1.0"),
    (lambda: rc.KL("full", 0.1), V, "KL.kind: expected one of ['k1', 'k2', 'k3', 'abs'], got 'full'"),
    (lambda: rc.KL("k1", -0.1), V, "KL.coef: expected a finite number >= 0, got -0.1"),
    (lambda: rc.SquaredLogRatio(0.1, "some"), V, "SquaredLogRatio.scope: expected one of ['kept', 'all'], got 'some'"),
    (lambda: call(surrogate="ppo"), T, "Loss.surrogate: expected a surrogate such as PPO(), got str"),
    (lambda: call(kl=0.1, ref_logp=ROWS), T, "Loss.kl: expected KL(...) or None, got float"),
    (lambda: call(regularizer=0.1), T, "Loss.regularizer: expected SquaredLogRatio(...) or None"),
    (lambda: call(rollout_logp=ROWS, spec={}), T, "spec: expected a Spec or None, got dict"),
    (lambda: call(correction=(1, 2)), T, "correction: expected what correct() gives, or rc.Factors, got tuple"),
    (lambda: rc.PPO(True), T, "PPO.low: expected a number, got bool True"),
    (lambda: Surrogate(), T, "Surrogate: expected one of its kinds"),
]


@pytest.mark.parametrize(("made", "kind", "message"), REFUSED)
def test_what_is_wrong_is_named(made, kind, message):
    with pytest.raises(kind, match="^" + re.escape(message)):
        made()

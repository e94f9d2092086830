"""Bugs that users reported to the frameworks, each as a test that carries the thread's number.

These belong to the policy loss and come with it: the denominator after rejection (slime#657, 0.49 or 1.23), phantom
tokens of masked samples (miles#2796), the stride-0 gradient of an expanded loss (TransformerEngine#623), and the
backward halves of verl#6349, swift#9767, prime-rl#2085 and OpenRLHF#1335. Offsets beyond 2^31 tokens (fla#1082) need a
GPU; here only the counters pass 2^31.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

import rollout_corr as rc
from builders.rounding import near
from builders.weights import weight_of

NAN, INF = math.nan, math.inf
FULL = rc.Spec(
    rc.Weight.token(upper=2.0), (rc.Criterion("k3", over="sequence", reduce="mean", upper=0.5),), detail="full"
)


def rows(train, rollout, mask=None, spec=rc.Spec(), **others):  # noqa: B008  (frozen)
    """`correct` on a padded batch given as lists."""
    mask = None if mask is None else torch.tensor(mask)
    return rc.correct(torch.tensor(train), torch.tensor(rollout), mask=mask, spec=spec, **others)


def close(value, wanted):
    return value == near(wanted, torch.float32)


def test_verl_7771_empty_rows_change_no_metric():
    """One padding row moved log_ppl_abs_diff from 1.0 to 0.5, three moved training_ppl from 7.39 to 2.60."""
    train, rollout = torch.full((2, 4), -2.0), torch.full((2, 4), -1.0)
    mask = torch.ones(2, 4, dtype=torch.int64)
    wanted = rc.correct(train, rollout, mask=mask, spec=FULL).metrics()
    assert close(wanted["sequence_log_ppl_diff_abs_mean"], 1.0)
    assert close(wanted["sequence_train_ppl_mean"], math.exp(2.0))
    for k in (1, 3):
        out = rc.correct(
            torch.cat([train, torch.zeros(k, 4)]),
            torch.cat([rollout, torch.zeros(k, 4)]),
            mask=torch.cat([mask, torch.zeros(k, 4, dtype=torch.int64)]),
            spec=FULL,
        )
        assert out.metrics() == wanted
        assert out.keep.tolist() == [True] * (2 + k)


@pytest.mark.parametrize("rejected", ["mask", "zero", "both"])
def test_verl_3984_everything_rejected(rejected):
    """Geometric 0.99 to 1.001 and a veto at 1e-4 rejected every row, and the metrics asserted a valid token."""
    spec = rc.Spec(
        rc.Weight.product(upper=2.0, normalize="batch"),
        (
            rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.99, upper=1.001),
            rc.Criterion("ratio", over="sequence", reduce="min", lower=1e-4, label="veto"),
        ),
        rejected=rejected,
        detail="full",
    )
    out = rows([[-1.0, -2.0], [-12.0, -1.0]], [[-2.0, -3.0], [-1.0, -1.0]], [[1, 1], [1, 1]], spec)
    assert out.keep.tolist() == [False, False]
    assert out.mask.tolist() == ([[1, 1], [1, 1]] if rejected == "zero" else [[0, 0], [0, 0]])
    assert bool((out.weights == 0).all()) == (rejected != "mask")
    metrics = out.metrics()
    assert (metrics["tokens"], metrics["tokens_kept"], metrics["sequences_kept"]) == (4, 0, 0)
    assert all(math.isfinite(value) for value in metrics.values())
    again = rows([[-1.0, -2.0]], [[-2.0, -3.0]], [[0, 0]], spec)
    assert again.metrics()["tokens"] == 0


def test_verl_5859_nothing_valid_and_one_token():
    """A mask that is all False crashed the metrics; the deviation of a single token is 0, not NaN."""
    nothing = rows([[-1.0, NAN]], [[-2.0, -INF]], [[False, False]], FULL)
    assert nothing.weights.tolist() == [[0.0, 0.0]]
    assert all(math.isfinite(value) for value in nothing.metrics().values())
    one = rows([[-1.0, NAN]], [[-2.0, -INF]], [[True, False]], FULL).metrics()
    assert (one["logratio_std"], one["weight_std"], one["sequence_mean_k3/std"]) == (0.0, 0.0, 0.0)
    assert one["logratio_mean"] == 1.0


def test_verl_6377_bounds_0_6_to_1_4_reject_a_ratio_of_1_5():
    """Compared as -log ratio with [log lower, log upper], 1.5 was kept and 1/1.5 lost."""
    logs = [[math.log(r) for r in (0.5, 0.61, 1.0, 1.39, 1.5)]]
    zeros = [[0.0] * 5]
    wanted = [[False, True, True, True, False]]
    for criterion in (
        rc.Criterion("ratio", lower=0.6, upper=1.4),
        rc.Criterion("k1", lower=-math.log(1.4), upper=-math.log(0.6)),
    ):
        assert rows(logs, zeros, spec=rc.Spec(criteria=(criterion,))).mask.tolist() == wanted


@pytest.mark.parametrize("fill", [NAN, INF, -INF])
def test_verl_6349_swift_9767_nan_where_the_mask_is_0(fill):
    """NaN * 0 is NaN: whatever stands at an invalid token reaches nothing."""
    spec = rc.Spec(FULL.weight, FULL.criteria, rejected="both", detail="full")
    clean = rows([[-1.0, 0.0, -2.0]], [[-1.5, 0.0, -2.5]], [[1.0, 0.0, 1.0]], spec)
    dirty = rows([[-1.0, fill, -2.0]], [[-1.5, fill, -2.5]], [[1.0, 0.0, 1.0]], spec)
    assert torch.equal(dirty.weights, clean.weights)
    assert dirty.metrics() == clean.metrics()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_prime_rl_2085_openrlhf_1335_rare_token_of_minus_200_nats(dtype):
    """exp(200) is infinite in fp32: every value is clamped before exp, so all stay finite."""
    train = torch.tensor([[-200.0, -1.0], [-1.0, -1.0]], dtype=dtype)
    rollout = torch.tensor([[-1.0, -1.0], [-200.0, -1.0]], dtype=dtype)
    stats = ("k3", "k3_reverse", "ratio_error", "ratio_deviation", "binary_kl_symmetric")
    criteria = tuple(rc.Criterion(s, over="sequence", reduce="sum", upper=1e30) for s in stats)
    for level in ("token", "product", "geometric"):
        out = rc.correct(train, rollout, spec=rc.Spec(weight_of(level), criteria, detail="full"))
        assert bool(out.weights.isfinite().all())
        metrics = out.metrics()
        assert all(math.isfinite(value) for value in metrics.values())
        assert (metrics["tokens_clamped"], metrics["sequences_clamped"]) == (2, 2)
        assert metrics["kl_rollout_train_k3"] == near((math.exp(20) - 21 + math.exp(-20) + 19) / 4, torch.float32)


def test_nemo_3753_a_column_does_not_broadcast():
    """[B, 1] times [B] became [B, B]: a metric B times too large. A column of advantages is one value a sequence."""
    train, rollout = torch.tensor([[-1.0, -1.0], [-3.0, -3.0]]), torch.full((2, 2), -2.0)
    spec = rc.Spec(criteria=(rc.Criterion("abs", upper=0.5, when="negative_advantage"),))
    column = rc.correct(train, rollout, spec=spec, advantages=torch.tensor([[1.0], [-1.0]]))
    flat = rc.correct(train, rollout, spec=spec, advantages=torch.tensor([1.0, -1.0]))
    assert column.mask.tolist() == flat.mask.tolist() == [[True, True], [False, False]]
    assert column.metrics() == flat.metrics()
    assert column.metrics()["logratio_abs_mean"] == 1.0
    for mask in (torch.ones(2, 1), torch.ones(2)):
        with pytest.raises(ValueError, match=r"^mask: expected shape \[2, 2\]"):
            rc.correct(train, rollout, mask=mask)


def test_trl_7120_product_and_geometric_mean_of_300_small_steps():
    """0.005 nats on 300 tokens: the product of the ratios is 4.48, their geometric mean 1.005."""
    rollout = torch.full((1, 300), -1.0, dtype=torch.float64)
    for level, wanted in (("product", math.exp(1.5)), ("geometric", math.exp(0.005)), ("token", math.exp(0.005))):
        weights = rc.correct(rollout + 0.005, rollout, spec=rc.Spec(weight_of(level))).weights
        assert weights.tolist() == [[near(wanted)] * 300]
    assert round(math.exp(1.5), 2) == 4.48
    for reduce, kept in (("sum", False), ("mean", True)):
        spec = rc.Spec(criteria=(rc.Criterion("ratio", over="sequence", reduce=reduce, upper=3.0),))
        assert rc.correct(rollout + 0.005, rollout, spec=spec).keep.tolist() == [kept]


def test_trl_7120_product_of_300_ratios_of_0_7_does_not_underflow():
    """0.7^300 is 3e-47, 0 in fp32: criteria decide in log space and the weight ends at exp(-20)."""
    rollout = torch.full((1, 300), -1.0)
    train = rollout + math.log(0.7)
    assert rc.correct(train, rollout, spec=rc.Spec(rc.Weight.product())).weights[0, 0] == pytest.approx(math.exp(-20.0))
    geometric = rc.correct(train, rollout, spec=rc.Spec(rc.Weight.geometric())).weights
    assert geometric[0, 0] == near(0.7, torch.float32)
    for lower, kept in ((1e-50, True), (1e-45, False)):
        spec = rc.Spec(criteria=(rc.Criterion("ratio", over="sequence", reduce="sum", lower=lower),))
        assert rc.correct(train, rollout, spec=spec).keep.tolist() == [kept]


def test_verl_7913_metrics_do_not_depend_on_the_number_of_micro_batches():
    train = -torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    rollout, mask = train.flip(0), torch.arange(5) < torch.tensor([[5], [1], [3], [0], [2], [4]])
    whole = rc.correct(train, rollout, mask=mask, spec=FULL).metrics()
    for size in (1, 2, 4):
        parts = zip(train.split(size), rollout.split(size), mask.split(size), strict=True)
        corrected = (rc.correct(a, b, mask=valid, spec=FULL) for a, b, valid in parts)
        merged = rc.Statistics.sum(out.statistics for out in corrected).metrics()
        assert merged == near(whole, torch.float32)


def test_megatron_5420_effective_sample_size_of_two_micro_batches():
    """Weights 1,1,1,1 and 2,2,2,2: each half says 1.0, the batch 0.9."""
    spec = rc.Spec(rc.Weight.token())
    halves = [rc.correct(torch.full((1, 4), x), torch.zeros(1, 4), spec=spec).statistics for x in (0.0, math.log(2))]
    assert [close(half.metrics()["weight_ess"], 1.0) for half in halves] == [True, True]
    assert close(halves[0].merge(halves[1]).metrics()["weight_ess"], 0.9)


def test_liger_1294_one_sequence_of_more_than_65_536_tokens():
    n = 200_003
    train, rollout = torch.full((n,), -1.0), torch.full((n,), -1.0 - 2.0**-16)
    offsets = torch.tensor([0, n])
    out = rc.correct(train, rollout, cu_seqlens=offsets, spec=rc.Spec(rc.Weight.product()))
    assert out.weights[0] == out.weights[-1] == near(math.exp(n * 2.0**-16), torch.float32)
    assert out.metrics()["tokens"] == n


def test_fla_1077_more_than_65_535_sequences():
    count = 70_001
    offsets = torch.arange(count + 1) * 2
    train = torch.zeros(2 * count)
    rollout = torch.zeros(2 * count)
    rollout[::2] = -0.5
    rollout[-2] = -2.0
    spec = rc.Spec(rc.Weight.product(), (rc.Criterion("ratio", over="sequence", reduce="sum", upper=3.0),))
    out = rc.correct(train, rollout, cu_seqlens=offsets.int(), spec=spec)
    assert out.keep.sum() == count - 1
    assert not out.keep[-1]
    assert not out.mask[-2:].any()
    assert out.weights[:-2].unique().tolist() == [pytest.approx(math.exp(0.5))]
    assert out.metrics()["sequences"] == count


def test_fla_1082_counters_pass_2_to_the_31():
    """Merged 40 times with itself: a counter of int32 would have gone round, one of fp32 stood still."""
    total = rows([[-1.25, -1.0, -1.0]], [[-1.0, -1.0, -1.0]], spec=rc.Spec(detail="full")).statistics
    for _ in range(40):
        total = total.merge(total)
    one = rows([[-1.0]], [[-1.0]], spec=rc.Spec(detail="full")).statistics
    assert total.merge(one).metrics()["tokens"] == 3 * 2**40 + 1
    assert total.metrics()["logratio_mean"] == pytest.approx(-0.25 / 3)


def test_verl_3787_percentiles_of_more_than_2_to_the_24_tokens():
    """torch.quantile refuses more than 2^24 elements; the histogram merges to any number."""
    part = rc.correct(
        torch.linspace(-2.0, -1.0, 1001, dtype=torch.float64)[None],
        torch.full((1, 1001), -1.0, dtype=torch.float64),
        spec=rc.Spec(detail="full"),
    ).statistics
    total = part
    for _ in range(15):
        total = total.merge(total)
    metrics = total.metrics()
    assert metrics["tokens"] > 2**24
    for percent in (1, 5, 25, 50, 75, 95, 99):
        wanted = -1.0 + percent / 100
        assert metrics[f"logratio_p{percent}"] == pytest.approx(wanted, rel=0.125)
        assert metrics[f"logratio_p{percent}"] == pytest.approx(part.metrics()[f"logratio_p{percent}"], rel=1e-3)


def test_verl_4105_weights_carry_no_gradient():
    train = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    rollout = torch.tensor([[-1.5, -1.5]], requires_grad=True)
    spec = rc.Spec(rc.Weight.token(normalize="batch"), (rc.Criterion("k1", upper=5.0),), "both", detail="full")
    mask = torch.ones(1, 2)
    out = rc.correct(train, rollout, mask=mask, spec=spec, advantages=torch.ones(1, 2, requires_grad=True))
    for tensor in (out.weights, out.mask, out.keep, out.statistics.sums, out.statistics.maxima):
        assert not tensor.requires_grad
        assert tensor.grad_fn is None
    assert train.grad is rollout.grad is None


def test_trl_6693_nan_at_a_valid_token_is_counted_and_its_row_rejected():
    """NaN means broken logits: neutralized silently, the metrics even look healthy."""
    train, rollout = [[-1.0, NAN], [-1.0, -1.0]], [[-1.0, -1.0], [-1.0, -1.0]]
    out = rows(train, rollout, [[1, 1], [1, 1]], rc.Spec(rc.Weight.token()))
    assert out.keep.tolist() == [False, True]
    assert out.weights.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert out.mask.tolist() == [[0, 0], [1, 1]]
    assert out.metrics()["tokens_nonfinite"] == 1
    assert any("1 valid token" in text and "NaN" in text for text in out.warnings())
    mask = torch.ones(2, 2)
    watched = rc.correct(torch.tensor(train), torch.tensor(rollout), mask=mask)
    assert watched.mask is mask
    assert watched.keep.tolist() == [True, True]
    assert watched.metrics()["tokens_nonfinite"] == 1


def test_verl_4544_groups_need_not_be_neighbors():
    rng = random.Random(0)
    for alone in ("reward", "zero"):
        n = 40
        group = [rng.randrange(12) for _ in range(n)]
        keep = [rng.random() < 0.6 for _ in range(n)]
        rewards = [rng.gauss(0, 3) if k else rng.choice((NAN, INF, 1e30)) for k in keep]
        out = rc.filter_groups(
            torch.tensor(rewards, dtype=torch.float64), torch.tensor(keep), torch.tensor(group), alone
        )
        for s in range(n):
            kept = [rewards[i] for i in range(n) if keep[i] and group[i] == group[s]]
            mean = math.fsum(kept) / len(kept) if kept else 0.0
            std = math.sqrt(math.fsum((x - mean) ** 2 for x in kept) / len(kept)) if kept else 0.0
            baseline, std = (0.0, 1.0) if len(kept) == 1 and alone == "reward" else (mean, std)
            assert out.size[s] == len(kept)
            assert out.mean[s] == near(baseline)
            assert out.std[s] == near(std)
            assert out.centered[s] == near(rewards[s] - baseline if keep[s] else 0.0)


def test_a_lone_sample_has_an_advantage_of_its_own_size_or_none():
    """Its standard deviation of 0 made a reward of 1 an advantage of a million."""
    rewards, keep, index = torch.tensor([1.0, 5.0]), torch.tensor([True, False]), torch.tensor([0, 0])
    for alone, wanted in (({}, 0.0), ({"alone": "reward"}, 1.0)):
        groups = rc.filter_groups(rewards, keep, index, **alone)
        assert (groups.centered / (groups.std + 1e-6))[0].item() == pytest.approx(wanted, abs=1e-5)


def test_verl_6310_keep_of_a_batch_feeds_the_groups():
    """Empty responses keep True and count in nothing; the `keep` of `correct` is what `filter_groups` takes."""
    spec = rc.Spec(criteria=(rc.Criterion("abs", over="sequence", reduce="max", upper=1.0),))
    out = rows([[-1.0], [-9.0], [NAN]], [[-1.0]] * 3, [[1], [1], [0]], spec)
    assert out.keep.tolist() == [True, False, True]
    groups = rc.filter_groups(torch.tensor([1.0, 100.0, 3.0]), out.keep, torch.tensor([0, 0, 0], dtype=torch.int32))
    assert groups.centered.tolist() == [-1.0, 0.0, 1.0]
    nothing = rc.filter_groups(torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64))
    assert [x.shape[0] for x in nothing] == [0] * 4
    nobody = rc.filter_groups(torch.tensor([NAN, 5.0]), torch.tensor([False, False]), torch.tensor([1, 1]))
    assert [x.tolist() for x in nobody] == [[0.0, 0.0]] * 4

"""`suggest` gives bounds that keep healthy sequences of any length, in every layout, and says why."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch
import yaml

import rollout_corr as rc
from builders.healthy import healthy
from rollout_corr.testing import pad


def of(batch, train=None, **more):
    """Suggest for a packed batch, perhaps of another trainer."""
    train = batch.train_logp if train is None else train
    return rc.suggest(train, batch.rollout_logp, mask=batch.mask, cu_seqlens=batch.cu_seqlens, **more)


def kept(batch, spec):
    given = {"mask": batch.mask, "cu_seqlens": batch.cu_seqlens, "spec": spec}
    return rc.correct(batch.train_logp, batch.rollout_logp, **given).keep.double().mean().item()


def bounds(rows, keep):
    """The bounds of |mean D| and |sum of D| of rows of D, by loops: what is measured, and what normal sums need."""
    allowed = math.floor((1.0 - keep) * len(rows) + 1e-9)
    left = [row for row in rows if min(row) >= math.log(1e-4)]
    allowed -= len(rows) - len(left)
    tokens = [d for row in left for d in row]
    mean, std = statistics.fmean(tokens), statistics.pstdev(tokens)
    share = 1.0 - max(0.25 * (1.0 - keep), 1.0 - keep - 0.0075)
    found = []
    for over in (len, lambda row: 1):
        values = sorted((abs(sum(row)) / over(row) for row in left), reverse=True)
        normal = []
        for row in left:
            own = math.sqrt((sum(d * d for d in row) + 3.0 * std**2) / (len(row) + 3.0))
            normal.append(statistics.NormalDist(mean * len(row) / over(row), own * math.sqrt(len(row)) / over(row)))
        low, high = 0.0, 100.0
        for _ in range(60):
            middle = (low + high) / 2.0
            kept = statistics.fmean(one.cdf(middle) - one.cdf(-middle) for one in normal)
            low, high = (low, middle) if kept >= share else (middle, high)
        found.append(max(values[allowed], high))
    return found


@pytest.mark.parametrize(("keep", "vetoed", "drift"), [(0.8, 3, 0.05), (0.9, 1, -0.03), (0.5, 0, 0.0)])
def test_bounds_by_loops(keep, vetoed, drift):
    """Short sequences that lean to one side; what the veto rejects leaves less to the other bounds."""
    rng = random.Random(f"{keep} {vetoed}")
    rows = [[rng.gauss(drift, 0.1 + 0.1 * (n % 3)) for _ in range(n)] for n in range(2, 32)]
    for row in rows[:vetoed]:
        row[0] = -10.0
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    d = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    found = rc.suggest(d - 5.0, torch.full_like(d, -5.0), cu_seqlens=offsets, keep=keep)
    for criterion, bound in zip((found.geometric, found.product), bounds(rows, keep), strict=True):
        excess = math.exp(bound) - 1.0
        digit = 10.0 ** (math.floor(math.log10(excess)) - 1)
        assert criterion.upper == pytest.approx(1.0 + math.ceil(excess / digit) * digit)
        assert criterion.lower == pytest.approx(1.0 / criterion.upper)
    # The 10th and the 90th percentile of the lengths, 2 to 31.
    assert "30 sequences of 4 to 28 tokens" in " ".join(found.sentences)


def test_the_next_batch_loses_at_most_a_hundredth():
    """Measured: 0.1 to 0.6 %; without room for other lengths and tails 1.0 to 2.5 %."""
    rejected = []
    for seed in range(5):
        found = of(healthy(seed, 48, 200, 3e-4))
        rejected += [1.0 - kept(healthy(100 + 2 * seed + i, 48, 200, 3e-4), found.spec) for i in range(2)]
    assert sum(rejected) / len(rejected) <= 0.01, rejected


def test_products_beyond_a_factor_of_ten_are_none():
    for k3, some in ((3e-5, True), (3e-3, False)):
        found = of(healthy(0, 48, 500, k3))
        assert (found.product is not None) is some
        assert found.product is None or found.product.upper <= 10.0


def test_where_the_policies_differ_that_is_said_first():
    """Bounds that fit broken data come after the advice to find out why."""
    for k3, first in ((1e-3, "32 sequences"), (0.03, "Find out why they differ first: k3 is 0.0"), (0.2, "Find out")):
        assert of(healthy(0, 32, 200, k3)).sentences[0].startswith(first)


def test_lines_to_paste():
    found = of(healthy(0, 32, 200))
    lines = yaml.safe_load(found.to_paste("verl"))["algorithm"]["rollout_correction"]
    read = rc.spec("verl", lines).criteria[0]
    lower, upper = map(math.exp, (-read.upper, -read.lower))
    # Short, and rounded outward.
    assert len(lines["rollout_rs_threshold"]) <= 16
    assert found.geometric.lower - 1e-5 < lower <= found.geometric.lower
    assert found.geometric.upper - 1e-12 <= upper < found.geometric.upper + 1e-5
    assert kept(healthy(0, 32, 200), rc.spec("verl", lines)) >= kept(healthy(0, 32, 200), found.spec)
    assert found.to_paste("verl").endswith("# verl has no setting for the veto")
    assert found.to_paste("trl").startswith("# cannot be said in trl: criteria[0]=")
    with pytest.raises(ValueError, match=r"framework: expected one of \['areal', .*got 'flash_rl'"):
        found.to_paste("flash_rl")


def test_skyrl_has_the_veto_as_its_outlier_mask():
    batch = healthy(0, 32, 200)
    found = of(batch)
    lines = found.to_paste("skyrl")
    read = rc.spec("skyrl", yaml.safe_load(lines)["trainer"]["algorithm"]["off_policy_correction"])
    assert "#" not in lines
    # A token that the veto rejects, and a sequence beyond the geometric bound.
    train, (first, second) = batch.train_logp.clone(), batch.cu_seqlens[1:3].tolist()
    train[first - 1] -= 12.0
    train[first:second] += 0.5
    given = {"mask": batch.mask, "cu_seqlens": batch.cu_seqlens}
    keeps = [rc.correct(train, batch.rollout_logp, **given, spec=spec).keep.tolist() for spec in (found.spec, read)]
    assert keeps[0] == keeps[1] and not any(keeps[0][:2]) and any(keeps[0])


def test_every_layout_gives_the_same():
    batch = healthy(0, 16, 60)
    packed, tensors = of(batch), batch[:3]

    def laid(as_laid, **offsets):
        train, rollout, mask = map(as_laid, tensors)
        return rc.suggest(train, rollout, mask=mask, **offsets)

    padded = laid(lambda x: pad(x, batch.lengths))
    listed = laid(lambda x: list(x.split(batch.lengths.tolist())))
    jagged = laid(lambda x: torch.nested.nested_tensor_from_jagged(x, batch.cu_seqlens))
    assert packed.sentences == padded.sentences == listed.sentences == jagged.sentences
    assert packed == padded == listed == jagged
    # Tokens outside, invalid ones and empty sequences count in nothing.
    moved = torch.cat([batch.cu_seqlens[:1], batch.cu_seqlens]) + 3
    around = laid(lambda x: torch.cat([x.new_full((3,), 1), x, x.new_full((2,), 1)]), cu_seqlens=moved)
    assert around.geometric == packed.geometric
    # Nothing that lies on the default device has a part: on meta nothing could be read.
    with torch.device("meta"):
        assert of(batch).sentences == packed.sentences
        assert laid(lambda x: pad(x, batch.lengths)).sentences == packed.sentences


def test_broken_sequences_do_not_widen_the_bounds():
    batch = healthy(0, 64, 300)
    train = batch.train_logp.clone()
    first, last = batch.cu_seqlens[:2].tolist()
    train[last - 1] -= 15.0
    plain, spoiled = of(batch, keep=0.95), of(batch, train, keep=0.95)
    assert abs(math.log(spoiled.geometric.upper / plain.geometric.upper)) < 0.002
    assert spoiled.veto.lower == 1e-4 and spoiled.rejected["veto"] == 1 / 64
    assert first == 0


def test_a_veto_goes_down_where_tails_are_long_and_stops():
    batch = healthy(0, 64, 300)
    ends = batch.cu_seqlens[1:] - 1
    # 5 % of 64 sequences are 3: the veto may have one of them.
    for many, drop, lower, rejected in (
        (16, 11.0, 1e-5, 0.0),
        (16, 13.0, 1e-6, 0.0),
        (16, 30.0, 1e-6, 0.25),
        (2, 11.0, 1e-5, 0.0),
    ):
        train = batch.train_logp.clone()
        train[ends[:many]] = batch.rollout_logp[ends[:many]] - drop
        found = of(batch, train, keep=0.95)
        assert found.veto.lower == lower
        assert found.rejected["veto"] == rejected
        said = f"veto: no token's ratio below {lower:g}. 0.0001 would reject {100 * many / 64:.1f} %"
        assert said in " ".join(repr(found).split())


def test_products_of_long_sequences_have_no_bound():
    found = of(healthy(0, 8, 30_000, 5e-3))
    assert found.product is None and "product: none. It would have to accept products from 1/" in " ".join(
        repr(found).split()
    )
    assert found.geometric.upper < 1.02


def test_identical_log_probs_leave_some_room():
    batch = healthy(0)
    found = of(batch, batch.rollout_logp)
    assert 1.0001 <= found.geometric.upper < 1.0002


def rule(k3, n):
    """Log of the upper bound that docs/guide.md gives for sequences of n tokens."""
    return k3 + 2.0 * math.sqrt(2.0 * k3 / n)


@pytest.mark.parametrize(("n", "k3"), [(50, 1e-3), (200, 5e-3), (1000, 1e-5)])
def test_it_agrees_with_the_rule_of_the_guide(n, k3):
    generator = torch.Generator().manual_seed(n)
    rollout = -1.0 - torch.rand(400, n, generator=generator)
    s = math.sqrt(2.0 * k3)
    found = rc.suggest(rollout + s * torch.randn(400, n, generator=generator) - 0.5 * s * s, rollout, keep=0.95)
    # Measured: 0.88 to 1.02. Where KL matters one side alone rejects, and the rule is wider than it has to be.
    assert 0.8 < math.log(found.geometric.upper) / rule(k3, n) < 1.2


def test_truncated_sampling_is_taken_out_of_d():
    batch = healthy(0)
    log_mass = torch.full_like(batch.train_logp, math.log(0.9))
    cut = batch._replace(rollout_logp=batch.rollout_logp - log_mass)
    given = rc.Batch(mask=batch.mask, cu_seqlens=batch.cu_seqlens, kept_mass=rc.KeptMass(log_mass))
    found = rc.suggest(cut.train_logp, cut.rollout_logp, given)
    assert found.geometric.upper == pytest.approx(of(batch).geometric.upper, abs=2e-4)
    assert of(cut).geometric.upper > 1.1


def test_it_prints_at_the_width_of_the_terminal(monkeypatch):
    """Sentence by sentence, each folded; `sentences` has them whole."""
    found = of(healthy(0, 48, 500, 3e-3))
    monkeypatch.setenv("COLUMNS", "70")
    lines = repr(found).splitlines()
    assert max(map(len, lines)) <= 70 and len(lines) > len(found.sentences)
    assert " ".join(lines) == " ".join(found.sentences)
    monkeypatch.setenv("COLUMNS", "1000")
    assert repr(found).splitlines() == [*found.sentences]

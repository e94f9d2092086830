"""verl's configuration of 0.6.1 and 0.7.0 in the drop-in, beside plain loops: levels, lower bound, veto, metrics."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from builders import fake_verl
from builders.fake_verl import DataProto
from oracles import peers as oracle_reports
from rollout_corr.frameworks.verl import shared, v07

RS = {None: {}, "token": (1.3, 0.8), "sequence": (1.5, 0.5), "geometric": (1.05, None)}
VETO = 0.7


@pytest.fixture(autouse=True)
def protocol(monkeypatch):
    fake_verl.put(monkeypatch)
    monkeypatch.setattr(shared.DROP_IN, "_said", set())


def batch(seed=0):
    made = torch.Generator().manual_seed(seed)
    rollout = torch.rand(6, 9, generator=made, dtype=torch.float64).log()
    train = rollout + 0.25 * torch.randn(6, 9, generator=made, dtype=torch.float64)
    mask = (torch.rand(6, 9, generator=made) < 0.7).long()
    mask[4] = 0
    return train, rollout, mask


def correct(*given, **options):
    proto, mask, metrics = v07.compute_rollout_correction_and_rejection_mask(*given, **options)
    return None if proto is None else proto.batch["rollout_is_weights"], mask, metrics


def of_ratios(prefix, rows, level, lower, upper):
    """0.7.0's metrics of ratios before truncation; rows without a token count, with the ratio 1 and the mean 0."""
    sums = [math.fsum(d) for d in rows]
    logs = [math.fsum(d) / max(len(d), 1) for d in rows] if level == "geometric" else sums
    ratios = [
        [math.exp(x) if level == "token" else math.exp(log) for x in d] for d, log in zip(rows, logs, strict=True)
    ]
    flat = [*itertools.chain(*ratios)]
    counted = flat if level == "token" else [*map(math.exp, logs)]
    clamped = [min(max(r, lower), upper) for r in flat]
    mean = oracle_reports.average(clamped) + 1e-8
    means = [oracle_reports.average(row) for row in ratios]
    found = {
        "mean": oracle_reports.average(flat),
        "max": max(flat) if level == "token" else math.exp(max(logs)),
        "min": min(flat) if level == "token" else math.exp(min(logs)),
        "ratio_fraction_high": oracle_reports.average(r > upper for r in counted),
        "ratio_fraction_low": oracle_reports.average(r < lower for r in counted),
        "std": oracle_reports.population(clamped),
        "eff_sample_size": 1 / oracle_reports.average((r / mean) ** 2 for r in clamped),
        "seq_mean": oracle_reports.average(means),
        "seq_std": oracle_reports.spread(means),
        "seq_max": max(means),
        "seq_min": min(means),
        "seq_max_deviation": max(abs(x - 1) for x in means),
        "seq_fraction_high": oracle_reports.average(x > upper for x in means),
        "seq_fraction_low": oracle_reports.average(x < lower for x in means),
    }
    return {f"rollout_corr/{prefix}_{key}": value for key, value in found.items()}


@pytest.mark.parametrize("veto", [None, VETO])
@pytest.mark.parametrize("rs", RS)
@pytest.mark.parametrize("level", [None, "token", "sequence"])
def test_everything(level, rs, veto):
    for seed in range(3):
        train, rollout, mask = batch(seed)
        upper, lower = RS[rs] or (None, None)
        options = {"rollout_is": level, "rollout_is_threshold": 1.4, "rollout_rs": rs, "rollout_rs_threshold": upper}
        options |= {"rollout_rs_threshold_lower": lower, "rollout_token_veto_threshold": veto}
        weights, kept, metrics = correct(train, rollout, mask, **options)
        rows = [d[ok != 0].tolist() for d, ok in zip(train - rollout, mask, strict=True)]
        if rs is not None and lower is None:
            lower = 1 / upper
        expected = oracle_reports.verl_off_policy(
            [list(zip(*row, strict=True)) for row in zip(train.tolist(), rollout.tolist(), mask.tolist(), strict=True)]
        )
        expected = {f"rollout_corr/{key.removeprefix('rollout_corr/')}": value for key, value in expected.items()}
        vetoed = [veto is not None and any(math.exp(x) < veto for x in d) for d in rows]
        tokens = [*itertools.chain(*rows)]
        bad = [veto is not None and math.exp(x) < veto for x in tokens]
        expected["rollout_corr/rollout_is_veto_fraction"] = oracle_reports.average(vetoed)
        expected["rollout_corr/rollout_is_catastrophic_token_fraction"] = oracle_reports.average(bad)
        if level is None:
            assert weights is None
        else:
            expected |= of_ratios("rollout_is", rows, level, 1 / 1.4, 1.4)
            raw = [[math.exp(x if level == "token" else math.fsum(d)) for x in d] for d in rows]
            for row, ok, wanted in zip(weights, mask, raw, strict=True):
                assert row[ok != 0].tolist() == pytest.approx([min(w, 1.4) for w in wanted], rel=1e-12)
                assert not row[ok == 0].any()
        inside = [[True] * len(d) for d in rows]
        if rs is not None:
            expected |= of_ratios("rollout_rs", rows, rs, lower, upper)
            whole = {"sequence": math.fsum, "geometric": oracle_reports.average}.get(rs)
            inside = [[lower <= math.exp(x if whole is None else whole(d)) <= upper for x in d] for d in rows]
            outside = [not all(row) for row in inside]
            expected["rollout_corr/rollout_rs_masked_fraction"] = oracle_reports.average(
                not x for x in itertools.chain(*inside)
            )
            expected["rollout_corr/rollout_rs_seq_masked_fraction"] = oracle_reports.average(outside)
        for row, ok, keep, gone in zip(kept, mask, inside, vetoed, strict=True):
            assert row[ok != 0].tolist() == [float(x and not gone) for x in keep] and not row[ok == 0].any()
        assert kept.dtype == (torch.int64 if rs is None and veto is None else torch.float32)
        assert metrics.keys() == expected.keys()
        assert metrics == pytest.approx({key: float(value) for key, value in expected.items()}, rel=1e-9, abs=1e-12)


def test_normalized():
    given = batch()
    raw = correct(*given, rollout_is="token", rollout_is_threshold=1.4)[0]
    weights, _, metrics = correct(*given, rollout_is="token", rollout_is_threshold=1.4, rollout_is_batch_normalize=True)
    mean = raw.sum() / given[2].sum()
    torch.testing.assert_close(weights, raw / mean, rtol=1e-12, atol=0.0)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(float(mean), rel=1e-12)


def test_open_lower_side():
    """A lower bound of 0 leaves it open."""
    given = batch()
    options = {"rollout_rs": "sequence", "rollout_rs_threshold": 1.5, "rollout_rs_threshold_lower": 0}
    _, kept, metrics = correct(*given, **options)
    sums = torch.where(given[2] != 0, given[0] - given[1], 0.0).sum(-1)
    assert torch.equal(kept.any(-1), (sums <= math.log(1.5)) & given[2].any(-1))
    assert metrics["rollout_corr/rollout_rs_ratio_fraction_low"] == 0.0


def test_bounds_beside_one():
    """The ratio of a row without a token is 1, so it counts as rejected where the bounds leave 1 out."""
    given = batch()
    options = {"rollout_rs": "geometric", "rollout_rs_threshold": 1.5, "rollout_rs_threshold_lower": 1.05}
    _, kept, metrics = correct(*given, **options)
    kept_rows = int(kept.any(-1).sum())
    assert 0 < kept_rows < 5
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx((6 - kept_rows) / 6)


def test_empty_batch():
    train, rollout, mask = batch()
    options = {"rollout_is": "token", "rollout_rs": "geometric", "rollout_rs_threshold": 1.1}
    weights, kept, metrics = correct(train, rollout, mask * 0, **options, rollout_token_veto_threshold=VETO)
    assert not weights.any() and not kept.any() and set(metrics.values()) == {0.0}
    with pytest.raises(ValueError, match="at least one valid token"):
        correct(train, rollout, mask * 0, **options, empty_batch="raise")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "geometric"}, "rollout_is: expected one of"),
        ({"rollout_rs": "token_k1"}, "rollout_rs: expected one of"),
        ({"rollout_rs": "token", "rollout_rs_threshold": None}, "rollout_rs_threshold: expected a threshold"),
        ({"rollout_token_veto_threshold": 0.0}, "rollout_token_veto_threshold: expected a finite number > 0"),
        ({"rollout_is": "token", "rollout_is_threshold": -1.0}, "rollout_is_threshold: expected a finite number > 0"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        correct(*batch(), **options)


def test_adds_to_batch(caplog):
    """The batch's function reads the veto, too, from the configuration."""
    train, rollout, mask = batch()
    config = {"rollout_rs": "token", "rollout_rs_threshold": 1.3, "rollout_token_veto_threshold": VETO}
    given = DataProto(batch={"old_log_probs": train, "rollout_log_probs": rollout, "response_mask": mask})
    _, metrics = v07.compute_rollout_correction_and_add_to_batch(given, config)
    expected = correct(train, rollout, mask, **config)
    assert torch.equal(given.batch["response_mask"], expected[1]) and metrics == expected[2] and len(config) == 3
    assert metrics["rollout_corr/rollout_is_veto_fraction"] > 0.0
    correct(train, rollout, mask)
    said = [record.getMessage() for record in caplog.records]
    assert "yes, as in 0.7" in said[0] and "no, metrics only: neither rollout_is, rollout_rs nor" in said[1]

"""The drop-in for AReaL beside plain loops: every metric, level and action, padded and packed."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rollout_corr.frameworks.areal import config as areal_config
from rollout_corr.frameworks.areal import dropin

BOUNDS = {
    "ratio": ((None, 1.2), (0.9, 1.1)),
    "kl_k1": ((None, 0.05), (-0.05, 0.1)),
    "kl_k2": ((None, 0.02),),
    "kl_k3": ((None, 0.02),),
    "binary_kl": ((None, 0.01),),
}


@dataclass
class RejectionSamplingResult:
    """AReaL's own."""

    loss_mask: torch.Tensor
    behave_imp_weight: torch.Tensor
    filtered_fraction: float


@pytest.fixture(autouse=True)
def theirs(monkeypatch):
    """AReaL's module, as far as it is used."""
    module = ModuleType(dropin.MODULE)
    module.RejectionSamplingResult = RejectionSamplingResult
    monkeypatch.setitem(sys.modules, dropin.MODULE, module)


def configuration(**changed):
    defaults = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0, "lower": None}
    return SimpleNamespace(**defaults | changed)


def batch(seed=0):
    made = torch.Generator().manual_seed(seed)
    old = torch.rand(5, 9, generator=made, dtype=torch.float64).log().clamp(max=-0.01)
    proximal = (old + 0.2 * torch.randn(5, 9, generator=made, dtype=torch.float64)).clamp(max=-0.01)
    mask = (torch.rand(5, 9, generator=made) < 0.7).long()
    mask[2] = 0
    return proximal, old, mask


def bernoulli(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def value_of(metric, proximal, old):
    d = proximal - old
    if metric == "binary_kl":
        p, q = math.exp(proximal), math.exp(old)
        return max(bernoulli(p, q), bernoulli(q, p))
    return {"ratio": d, "kl_k1": d, "kl_k2": d * d / 2, "kl_k3": math.exp(-d) - 1 + d}[metric]


def by_hand(rows, config):
    """Mask and weight of each token, as loops."""
    low = -math.inf if config.lower is None else config.lower
    floor = 0.0 if config.lower is None else config.lower
    masks, weights = [], []
    for row in rows:
        valid = [(a, b) for a, b, ok in row if ok]
        values = [value_of(config.metric, a, b) for a, b in valid]
        d = [a - b for a, b in valid]
        whole = {
            "sum": math.fsum,
            "mean": lambda x: math.fsum(x) / max(len(x), 1),
            "max": lambda x: max(x, default=0.0),
        }
        aggregate = whole[config.agg](values)
        geometric = math.exp(math.fsum(d) / max(len(d), 1))
        kept, weighed = [], []
        for a, b, ok in row:
            value = aggregate if config.level == "sequence" else value_of(config.metric, a, b)
            inside = low <= (math.exp(value) if config.metric == "ratio" else value) <= config.upper
            weight = geometric if (config.level, config.metric) == ("sequence", "ratio") else math.exp(a - b)
            if config.action == "clamp":
                clamped = min(max(weight, floor), config.upper)
                kept.append(ok)
                weighed.append((clamped if config.level == "token" or not inside else weight) if ok else 0.0)
            else:
                kept.append(ok and inside)
                weighed.append(weight if ok and inside else 0.0)
        masks.append([int(ok) for ok in kept])
        weights.append(weighed)
    return masks, weights


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("metric", BOUNDS)
@pytest.mark.parametrize("action", areal_config.ACTIONS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_everything(level, action, metric, packed):
    if action == "clamp" and metric != "ratio":
        with pytest.raises(ValueError, match=f"action: expected 'mask' with metric '{metric}', as AReaL does"):
            dropin.apply_rejection_sampling(*batch(), None, configuration(action=action, metric=metric, level=level))
        return
    for seed, agg in enumerate(("sum", "mean", "max")):
        for lower, upper in BOUNDS[metric]:
            config = configuration(level=level, action=action, metric=metric, agg=agg, upper=upper, lower=lower)
            given = batch(seed)
            columns = zip(*(x.tolist() for x in given), strict=True)
            masks, weights = by_hand([list(zip(*row, strict=True)) for row in columns], config)
            offsets = torch.arange(6, dtype=torch.int32) * 9 if packed else None
            x = [y.reshape(-1) for y in given] if packed else given
            found = dropin.apply_rejection_sampling(*x, offsets, config)
            assert type(found) is RejectionSamplingResult and found.loss_mask.dtype == torch.int64
            assert found.loss_mask.reshape(5, 9).tolist() == masks
            expected = torch.tensor(weights, dtype=torch.float64)
            torch.testing.assert_close(found.behave_imp_weight.reshape(5, 9), expected, rtol=1e-12, atol=0.0)
            tokens = int(given[2].sum())
            raw = (given[0] - given[1]).exp() if (level, metric) != ("sequence", "ratio") else None
            if action == "mask":
                assert found.filtered_fraction == pytest.approx(1 - sum(map(sum, masks)) / tokens)
            elif raw is not None:
                changed = (given[2] != 0) & ((expected - raw).abs() > 1e-12)
                assert found.filtered_fraction == pytest.approx(int(changed.sum()) / tokens)


def test_packed_tokens_need_no_offsets():
    given = [x.reshape(-1) for x in batch()]
    config = configuration(upper=1.1)
    found = dropin.apply_rejection_sampling(*given, None, config)
    expected = dropin.apply_rejection_sampling(*batch(), None, config)
    assert torch.equal(found.loss_mask, expected.loss_mask.reshape(-1))
    with pytest.raises(ValueError, match="cu_seqlens: expected the offsets of packed sequences at the level sequence"):
        dropin.apply_rejection_sampling(*given, None, configuration(level="sequence"))


def test_dtypes_and_gradient():
    proximal, old, mask = batch()
    found = dropin.apply_rejection_sampling(
        proximal.bfloat16().requires_grad_(), old.bfloat16(), mask.float(), None, configuration(upper=1.1)
    )
    assert found.behave_imp_weight.dtype == found.loss_mask.dtype == torch.float32
    assert not found.behave_imp_weight.requires_grad


def test_nonfinite():
    """A ratio that is no number is 1, as in AReaL; a divergence that is none rejects its sequence."""
    proximal, old, mask = batch()
    old[0, 0], mask[0, 0] = math.nan, 1
    found = dropin.apply_rejection_sampling(proximal, old, mask, None, configuration(upper=1.1))
    assert found.behave_imp_weight[0, 0] == 1.0 and found.loss_mask[0, 0] == 1
    found = dropin.apply_rejection_sampling(proximal, old, mask, None, configuration(metric="kl_k3", upper=0.5))
    assert not found.loss_mask[0].any() and found.behave_imp_weight.isfinite().all()


def test_nothing_valid():
    proximal, old, mask = batch()
    for action in areal_config.ACTIONS:
        found = dropin.apply_rejection_sampling(proximal, old, mask * 0, None, configuration(action=action))
        assert not found.behave_imp_weight.any() and found.filtered_fraction == 0.0


@pytest.mark.parametrize("name", ["level", "action", "metric", "agg"])
def test_wrong_configuration(name):
    with pytest.raises(ValueError, match=f"{name}: expected one of"):
        dropin.apply_rejection_sampling(*batch(), None, configuration(**{name: "word"}))


def test_says_what_it_does(caplog, monkeypatch):
    monkeypatch.setattr(dropin.DROP_IN, "_said", set())
    for _ in range(2):
        dropin.apply_rejection_sampling(*batch(), None, configuration(upper=1.1))
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == "rollout-corr in areal: correction active: yes, ratio at the level token, mask, bounds [None, 1.1]"

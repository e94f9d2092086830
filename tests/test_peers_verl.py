"""verl 0.9.1 itself: its weights, masks and metrics beside ours (make test-peers).

With float64 log-probs verl computes in float64, except that it counts in float32. So the comparison is tight there, and
what float32 log-probs give is compared with verl's float64 numbers of the same log-probs: its own float32 spreads are
differences of squares, and wrong in the second digit where weights lie close together.
"""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from rollout_corr.presets import verl as presets
from rollout_corr.presets import verl_options

pytestmark = pytest.mark.peers

PRESETS = (
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis",
    "decoupled_geo_rs_token_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_seq_tis",
    "bypass_pg_geo_rs_token_tis",
    "disabled",
)

OPTIONS = ",".join(sorted(verl_options.RS_OPTIONS))
OF_OPTIONS = {"k1": "0.8_1.3", "k2": "0.05", "k3": "0.04"}
THRESHOLDS = ",".join(OF_OPTIONS[option[-2:]] for option in OPTIONS.split(","))

# rows, width, spread of D, share of empty rows
SHAPES = (
    (8, 24, 0.3, 0.3),
    (1, 1, 0.2, 0.0),
    (1, 17, 0.1, 0.0),
    (6, 40, 0.003, 0.2),
    (16, 12, 0.05, 0.0),
    (5, 30, 1.5, 0.3),
    (4, 16, 9.0, 0.0),
    (3, 300, 1e-4, 0.0),
)

# What verl counts it averages in float32. A spread is the root of a difference of squares.
COUNTED = ("fraction_high", "fraction_low", "masked_fraction", "oob_ratio")


@pytest.fixture(scope="module")
def helper():
    from verl.trainer.ppo import rollout_corr_helper

    return rollout_corr_helper


@pytest.fixture(scope="module")
def config_class():
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    return RolloutCorrectionConfig


def batch(seed, rows, width, scale, empty, dtype=torch.float64, mask_dtype=torch.int64):
    """Right-padded rows with holes; what stands outside the mask is any finite number."""
    made = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.rand(*shape, generator=made, dtype=torch.float64)

    mask = torch.arange(width) < random(rows, 1) * width + 1
    mask &= random(rows, width) > 0.15
    mask &= random(rows, 1) >= empty
    mask[0, 0] = True
    rollout = random(rows, width).log()
    noise = torch.randn(rows, width, generator=made, dtype=torch.float64)
    shift = torch.randn(rows, 1, generator=made, dtype=torch.float64)
    gap = scale * (noise + shift / 3) * random(rows, 1)
    # The ratios of the first row stay near 1, because verl divides by zero where IcePop leaves nothing.
    gap[0] *= 0.05 / (0.05 + gap[0].abs().sum())
    return (rollout + gap).to(dtype), rollout.to(dtype), mask.to(mask_dtype)


def verls(helper, given, **config):
    """verl's weights (or None), mask and metrics."""
    proto, mask, metrics = helper.compute_rollout_correction_and_rejection_mask(*given, **config)
    return None if proto is None else proto.batch["rollout_is_weights"], mask, metrics


def arguments(config):
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    return {name: getattr(config, name) for name in names}


def spec_of(rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold):
    weight, criteria = None, ()
    if rollout_is is not None:
        weight = verl_options.weight(rollout_is, rollout_is_threshold, rollout_is_batch_normalize)
    if rollout_rs is not None:
        criteria = verl_options.criteria(rollout_rs, rollout_rs_threshold)
    return presets.spec(weight, criteria)


def configurations():
    weights = ((None, 2.0), ("token", 1.2), ("token", "0.9_1.1"), ("sequence", 1.5), ("sequence", "0.5_2.0"))
    for level, threshold in weights:
        for normalize in (False, True) if level else (False,):
            for options, thresholds in ((None, None), (OPTIONS, THRESHOLDS)):
                yield {
                    "rollout_is": level,
                    "rollout_is_threshold": threshold,
                    "rollout_is_batch_normalize": normalize,
                    "rollout_rs": options,
                    "rollout_rs_threshold": thresholds,
                }


def assert_agree(out, theirs, exact):
    """Ours against verl's; exact says that both computed in float64."""
    weights, mask, metrics = theirs
    assert torch.equal(out.mask, mask) and out.mask.dtype == mask.dtype
    if weights is None:
        assert out.weights is None
    else:
        # Ten times what was measured: 2e-15 and, where the log-probs are float32, 2.4e-7.
        torch.testing.assert_close(out.weights.double(), weights.double(), rtol=2e-14 if exact else 2.4e-6, atol=0.0)
    ours = out.metrics("verl")
    assert sorted(ours) == sorted(metrics)
    wrong = {key: (ours[key], metrics[key]) for key in metrics if not _close(key, ours[key], metrics[key], exact)}
    assert not wrong


def _close(key, ours, verls, exact):
    """Measured: 1e-14 in float64; of float32 log-probs 1.6e-6 in e^(2 sum D), else 8e-7 relative or 4e-8."""
    if key.endswith(COUNTED):
        return abs(ours - verls) <= 1e-7
    # A spread of 0 is the root of rounding in verl: 3e-10 in float64.
    slack = 1e-8 if key.endswith("_std") else 0.0
    rtol, atol = (1e-12, 1e-14) if exact else (8e-6, 4e-7)
    return ours == verls or abs(ours - verls) <= rtol * abs(verls) + atol + slack


def test_presets_are_verls(config_class):
    """Every classmethod of verl's configuration has a preset of its name, and the two hold the same numbers."""
    named = [name for name, member in vars(config_class).items() if isinstance(member, classmethod)]
    assert sorted(PRESETS) == sorted(name for name in named if not name.startswith("_"))
    for name in PRESETS:
        assert getattr(presets, name)() == spec_of(**arguments(getattr(config_class, name)()))


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name, helper, config_class):
    spec, config = getattr(presets, name)(), arguments(getattr(config_class, name)())
    for seed, shape in enumerate(SHAPES * 3):
        given = batch(seed, *shape)
        assert_agree(rc.correct(*given, spec=spec), verls(helper, given, **config), exact=True)


@pytest.mark.parametrize(
    "config", list(configurations()), ids=lambda config: "-".join(str(x)[:12] for x in config.values())
)
def test_configurations(config, helper):
    """Everything at once: all 11 options beside each kind of weight."""
    spec = spec_of(**config)
    for seed, shape in enumerate(SHAPES * 3, start=100):
        given = batch(seed, *shape)
        assert_agree(rc.correct(*given, spec=spec), verls(helper, given, **config), exact=True)


@pytest.mark.parametrize(
    "config", list(configurations()), ids=lambda config: "-".join(str(x)[:12] for x in config.values())
)
def test_float32(config, helper):
    spec = spec_of(**config)
    for seed, shape in enumerate(SHAPES, start=200):
        train, rollout, mask = batch(seed, *shape, dtype=torch.float32)
        precise = verls(helper, (train.double(), rollout.double(), mask), **config)
        out = rc.correct(train, rollout, mask, spec=spec)
        assert_agree(out, precise, exact=False)
        weights, theirs, _ = verls(helper, (train, rollout, mask), **config)
        assert torch.equal(out.mask, theirs)
        if weights is not None:
            assert out.weights.dtype == weights.dtype


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.float32])
def test_mask_dtypes(mask_dtype, helper):
    config = {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.95_1.05"}
    spec = presets.spec(verl_options.weight("token", 2.0), verl_options.criteria("seq_mean_k1", "0.95_1.05"))
    given = batch(5, *SHAPES[0], mask_dtype=mask_dtype)
    assert_agree(rc.correct(*given, spec=spec), verls(helper, given, **config), exact=True)


def test_packed_and_merged(helper):
    """verl's metrics of the padded batch, from packed sequences in three parts."""
    config = next(c for c in configurations() if c["rollout_rs"] and c["rollout_is"] == "token")
    spec, given = spec_of(**config), batch(6, *SHAPES[0])
    expected = verls(helper, given, **config)[2]
    width = given[0].shape[1]
    parts = []
    for rows in (slice(0, 3), slice(3, 4), slice(4, 8)):
        packed = [x[rows].reshape(-1) for x in given]
        offsets = torch.arange(packed[0].numel() // width + 1) * width
        parts.append(rc.correct(*packed, cu_seqlens=offsets, spec=spec).statistics)
    ours = rc.Statistics.sum(parts).metrics("verl")
    assert not {key: (ours[key], expected[key]) for key in expected if not _close(key, ours[key], expected[key], True)}


def test_what_verl_cannot(helper):
    """Where verl raises, ours are 0: an all-masked batch, and IcePop that zeroes every weight."""
    given = (torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int64))
    config = {"rollout_is": "token", "rollout_is_threshold": "0.9_1.1"}
    spec = presets.decoupled_token_icepop(threshold=1.1, threshold_lower=0.9)
    with pytest.raises(ValueError, match="at least one valid token"):
        verls(helper, given, **config)
    assert set(rc.correct(*given, spec=spec).metrics("verl").values()) == {0.0}
    given = (*given[:2], torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ZeroDivisionError):
        verls(helper, given, **config)
    assert rc.correct(*given, spec=spec).metrics("verl")["rollout_corr/rollout_is_eff_sample_size"] == 0.0


def test_verl_loses_small_spreads(helper):
    """Why float32 metrics are compared with verl's float64 ones."""
    given = (torch.full((4, 64), -1.0), -1.0 + 1e-4 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))
    given = (*given, torch.ones(4, 64, dtype=torch.int64))
    ours = rc.correct(*given, spec=presets.decoupled_token_is()).metrics("verl")["rollout_corr/rollout_is_std"]
    theirs = verls(helper, given, rollout_is="token")[2]["rollout_corr/rollout_is_std"]
    assert ours == pytest.approx(1e-4, rel=0.1)
    assert not math.isclose(theirs, ours, rel_tol=0.05)

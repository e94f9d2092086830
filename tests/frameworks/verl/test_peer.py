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
from builders.preset_cases import EXPECTED
from builders.verl_cases import SHAPES, arguments, batch, close, configurations, verls
from rollout_corr.frameworks.verl import config as presets
from rollout_corr.frameworks.verl import options

pytestmark = pytest.mark.peers

PRESETS = [name.removeprefix("verl.") for name in EXPECTED if name.startswith("verl.")]


@pytest.fixture(scope="module")
def helper():
    from verl.trainer.ppo import rollout_corr_helper

    return rollout_corr_helper


@pytest.fixture(scope="module")
def config_class():
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    return RolloutCorrectionConfig


def spec_of(rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold):
    weight, criteria = None, ()
    if rollout_is is not None:
        weight = options.weight(rollout_is, rollout_is_threshold, rollout_is_batch_normalize)
    if rollout_rs is not None:
        criteria = options.criteria(rollout_rs, rollout_rs_threshold)
    return presets.made(weight, criteria)


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
    wrong = {key: (ours[key], metrics[key]) for key in metrics if not close(key, ours[key], metrics[key], exact)}
    assert not wrong


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
        assert_agree(rc.correct(*given[:2], mask=given[2], spec=spec), verls(helper, given, **config), exact=True)


@pytest.mark.parametrize(
    "config", list(configurations()), ids=lambda config: "-".join(str(x)[:12] for x in config.values())
)
def test_configurations(config, helper):
    """Everything at once: all 11 options beside each kind of weight, in float64 and in float32."""
    spec = spec_of(**config)
    for seed, shape in enumerate(SHAPES * 3, start=100):
        given = batch(seed, *shape)
        assert_agree(rc.correct(*given[:2], mask=given[2], spec=spec), verls(helper, given, **config), exact=True)
    for seed, shape in enumerate(SHAPES, start=200):
        train, rollout, mask = batch(seed, *shape, dtype=torch.float32)
        precise = verls(helper, (train.double(), rollout.double(), mask), **config)
        out = rc.correct(train, rollout, mask=mask, spec=spec)
        assert_agree(out, precise, exact=False)
        weights, theirs, _ = verls(helper, (train, rollout, mask), **config)
        assert torch.equal(out.mask, theirs)
        if weights is not None:
            assert out.weights.dtype == weights.dtype


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.float32])
def test_mask_dtypes(mask_dtype, helper):
    config = {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.95_1.05"}
    spec = presets.made(options.weight("token", 2.0), options.criteria("seq_mean_k1", "0.95_1.05"))
    given = batch(5, *SHAPES[0], mask_dtype=mask_dtype)
    assert_agree(rc.correct(*given[:2], mask=given[2], spec=spec), verls(helper, given, **config), exact=True)


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
        parts.append(rc.correct(*packed[:2], mask=packed[2], cu_seqlens=offsets, spec=spec).statistics)
    ours = rc.Statistics.sum(parts).metrics("verl")
    assert not {key: (ours[key], expected[key]) for key in expected if not close(key, ours[key], expected[key], True)}


def test_what_verl_cannot(helper):
    """Where verl raises, ours are 0: an all-masked batch, and IcePop that zeroes every weight."""
    given = (torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int64))
    config = {"rollout_is": "token", "rollout_is_threshold": "0.9_1.1"}
    spec = rc.spec("verl.decoupled_token_icepop", upper=1.1, lower=0.9)
    with pytest.raises(ValueError, match="at least one valid token"):
        verls(helper, given, **config)
    assert set(rc.correct(*given[:2], mask=given[2], spec=spec).metrics("verl").values()) == {0.0}
    given = (*given[:2], torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ZeroDivisionError):
        verls(helper, given, **config)
    assert (
        rc.correct(*given[:2], mask=given[2], spec=spec).metrics("verl")["rollout_corr/rollout_is_eff_sample_size"]
        == 0.0
    )


def test_verl_loses_small_spreads(helper):
    """Why float32 metrics are compared with verl's float64 ones."""
    given = (torch.full((4, 64), -1.0), -1.0 + 1e-4 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))
    given = (*given, torch.ones(4, 64, dtype=torch.int64))
    ours = rc.correct(*given[:2], mask=given[2], spec=rc.spec("verl.decoupled_token_is")).metrics("verl")[
        "rollout_corr/rollout_is_std"
    ]
    theirs = verls(helper, given, rollout_is="token")[2]["rollout_corr/rollout_is_std"]
    assert ours == pytest.approx(1e-4, rel=0.1)
    assert not math.isclose(theirs, ours, rel_tol=0.05)

"""Cases of the comparison with verl 0.9.1 itself: batches, configurations, and how close is close."""

from __future__ import annotations

import torch

from rollout_corr.frameworks.verl import options as verl_options

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


def close(key, ours, verls, exact):
    """Measured: 1e-14 in float64; of float32 log-probs 1.6e-6 in e^(2 sum D), else 8e-7 relative or 4e-8."""
    if key.endswith(COUNTED):
        return abs(ours - verls) <= 1e-7
    # A spread of 0 is the root of rounding in verl: up to that of 2^-52, which is 1.5e-8.
    slack = 2e-8 if key.endswith("_std") else 0.0
    rtol, atol = (1e-12, 1e-14) if exact else (8e-6, 4e-7)
    return ours == verls or abs(ours - verls) <= rtol * abs(verls) + atol + slack

"""Specs that report under the peers' metric schemes, by their configurations, and batches for them."""

from __future__ import annotations

import math
import random

import torch
import yaml

import rollout_corr as rc
from builders.config_cases import rows as rows_of

# `NAME | CONFIG`, with bounds that some units of the batches below miss, on both sides.
TABLES = {
    "verl": """
metrics_only | {rollout_is: null}
token_tis | {rollout_is: token, rollout_is_threshold: 1.2}
token_icepop_normalized | {rollout_is: token, rollout_is_threshold: '0.8_1.3', rollout_is_batch_normalize: true}
sequence_tis | {rollout_is: sequence, rollout_is_threshold: 1.5, rollout_is_batch_normalize: true}
sequence_icepop | {rollout_is: sequence, rollout_is_threshold: '0.6_1.5'}
caps_below_one | {rollout_is: sequence, rollout_is_threshold: '0.9'}
k1_options | {rollout_is: token, rollout_rs: 'token_k1,seq_sum_k1,seq_mean_k1',
    rollout_rs_threshold: '0.7_1.2,0.6_1.5,0.9_1.05'}
other_options | {rollout_is: sequence,
    rollout_rs: 'token_k2,token_k3,seq_sum_k2,seq_sum_k3,seq_mean_k2,seq_mean_k3,seq_max_k2,seq_max_k3',
    rollout_rs_threshold: '0.05,0.03,0.3,0.2,0.03,0.04,0.2,0.15'}
skewed_k1 | {rollout_rs: seq_mean_k1, rollout_rs_threshold: '1.02_1.3'}
""",
    "xtuner": """
mismatch_only | {}
shipped | {rollout_is_mode: both, rollout_is_threshold: [1.5, 0.7], rollout_is_mask_threshold: [1.3, 0.8],
    rollout_is_veto_threshold: [1.8, 0.5]}
truncate_open_below | {rollout_is_threshold: [1.5, 0.0], rollout_is_veto_threshold: [1.8, 0.0]}
token_mask | {rollout_is_mode: mask, rollout_is_threshold: [1.3, 0.8]}
sequence_both | {rollout_is_level: sequence, rollout_is_mode: both, rollout_is_threshold: [1.4, 0.7],
    rollout_is_mask_threshold: [1.6, 0.6]}
sequence_mask | {rollout_is_level: sequence, rollout_is_mode: mask, rollout_is_threshold: [0.95, 0.4],
    rollout_is_veto_threshold: [2.0, 0.4]}
sequence_beside_one | {rollout_is_level: sequence, rollout_is_mode: both, rollout_is_threshold: [1.6, 1.1]}
geometric_both | {rollout_is_level: geometric, rollout_is_mode: both, rollout_is_threshold: [1.05, 0.9],
    rollout_is_veto_threshold: [1.8, 0.5]}
""",
    "skyrl": """
ratios_only | {tis_ratio_type: null}
token_tis | {tis_ratio_type: token, token_tis_ratio_clip_high: 1.2}
sequence_tis | {tis_ratio_type: sequence, sequence_tis_ratio_clip_high: 1.3, outlier_token_is_threshold_low: 0.5}
geo_mask | {sequence_mask_metric: geometric, geo_mask_low: 0.95, geo_mask_high: 1.02}
product_mask_above_one | {tis_ratio_type: sequence, sequence_tis_ratio_clip_high: 0.9, sequence_mask_metric: product,
    product_mask_low: 1.1, product_mask_high: 3.0}
product_mask_below_one | {sequence_mask_metric: product, product_mask_low: 0.4, product_mask_high: 0.9}
everything | {tis_ratio_type: token, token_tis_ratio_clip_high: 1.2, outlier_token_is_threshold_low: 0.4,
    outlier_token_is_threshold_high: 2.0, token_mask_is_threshold_low: 0.8, token_mask_is_threshold_high: 1.25,
    sequence_mask_metric: geometric, geo_mask_low: 0.97, geo_mask_high: 1.03}
""",
}
CASES = {
    scheme: {name: rc.spec(scheme, yaml.safe_load(config)) for name, config in rows_of(table)}
    for scheme, table in TABLES.items()
}
ALL = [(scheme, name) for scheme, cases in CASES.items() for name in cases]


def batch(seed, lengths=(5, 1, 9, 0, 4, 12, 3), width=12, *, scale=0.25, invalid=0.2):
    """Rows of one width, with holes; the third has no valid token. NaN stands where nothing counts."""
    rng = random.Random(seed)
    rows = []
    for i, length in enumerate(lengths):
        shift, row = rng.gauss(0.0, scale / 3), []
        for t in range(width):
            rollout = -rng.expovariate(1.5)
            old = rollout + shift + rng.gauss(0.0, scale)
            valid = i != 2 and t < length and rng.random() >= invalid
            row.append((old, rollout, valid) if valid else (math.nan, rollout, False))
        rows.append(row)
    return rows


def tensors(rows, dtype=torch.float64):
    columns = list(zip(*(zip(*row, strict=True) for row in rows), strict=True))
    old, rollout = (torch.tensor(column, dtype=dtype) for column in columns[:2])
    return old, rollout, torch.tensor(columns[2], dtype=torch.bool)


def correct(rows, spec, dtype=torch.float64):
    train, rollout, mask = tensors(rows, dtype)
    return rc.correct(train, rollout, mask=mask, spec=spec)

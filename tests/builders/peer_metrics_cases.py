"""Specs that report under the peers' metric schemes, and their batches."""

from __future__ import annotations

import math
import random

import torch

import rollout_corr as rc
from builders.config_cases import option

LOG = math.log

# verl's options with bounds that some units of the batches below miss, on both sides.
K1 = (("token_k1", LOG(0.7), LOG(1.2)), ("seq_sum_k1", LOG(0.6), LOG(1.5)), ("seq_mean_k1", LOG(0.9), LOG(1.05)))
OTHERS = (
    ("token_k2", None, 0.05),
    ("token_k3", None, 0.03),
    ("seq_sum_k2", None, 0.3),
    ("seq_sum_k3", None, 0.2),
    ("seq_mean_k2", None, 0.03),
    ("seq_mean_k3", None, 0.04),
    ("seq_max_k2", None, 0.2),
    ("seq_max_k3", None, 0.15),
)


WHERE = {
    "token": {"over": "token"},
    "sequence": {"over": "sequence", "reduce": "sum"},
    "geometric": {"over": "sequence", "reduce": "mean"},
}


def verl(options=(), **weight):
    """The Spec of a configuration in verl's own words."""
    made = None
    if weight:
        lower, outside = weight.get("lower"), "clamp" if "lower" not in weight else "zero"
        normalize = "batch" if weight.get("normalize") else None
        where = WHERE[weight["level"]]
        made = rc.Weight(**where, lower=lower, upper=weight["upper"], outside=outside, normalize=normalize)
    criteria = tuple(option(*each) for each in options)
    return rc.Spec(weight=made, criteria=criteria, report=("native", "verl"))


def xtuner(**config):
    made, criteria = None, []
    if config:
        where = WHERE[config["level"]]
        bounds = {"lower": config["lower"], "upper": config["upper"]}
        made = rc.Weight(**where) if config.get("mode") == "mask" else rc.Weight(**where, **bounds)
        if config.get("mode", "truncate") != "truncate":
            lower, upper = config.get("mask", (config["lower"], config["upper"]))
            criteria.append(rc.Criterion("ratio", lower=lower, upper=upper, label="mask", **where))
        if "veto" in config:
            lower, upper = config["veto"]
            criteria.append(rc.Criterion("ratio", lower=lower, upper=upper, drop="sequence", label="veto"))
    return rc.Spec(weight=made, criteria=tuple(criteria), report=("native", "xtuner"))


def skyrl(**config):
    made, criteria = None, []
    if "tis" in config:
        made = rc.Weight(**WHERE[config["tis"]], upper=config["cap"])
    for label, drop in (("outlier", "sequence"), ("token_mask", "unit")):
        if label in config:
            lower, upper = config[label]
            criteria.append(rc.Criterion("ratio", lower=lower, upper=upper, drop=drop, label=label))
    sums_over = "kept" if criteria else "valid"
    if "sequence_mask" in config:
        (lower, upper), name = config["bounds"], config["sequence_mask"]
        reduce = {"geo": "mean", "product": "sum"}[name]
        label = f"{name}_sequence_mask"
        criteria.append(rc.Criterion("ratio", over="sequence", reduce=reduce, lower=lower, upper=upper, label=label))
    return rc.Spec(weight=made, criteria=tuple(criteria), sums_over=sums_over, report=("skyrl",))


CASES = {
    "verl": {
        "metrics_only": verl(),
        "token_tis": verl(level="token", upper=1.2),
        "token_icepop_normalized": verl(level="token", upper=1.3, lower=0.8, normalize=True),
        "sequence_tis": verl(level="sequence", upper=1.5, normalize=True),
        "sequence_icepop": verl(level="sequence", upper=1.5, lower=0.6),
        "caps_below_one": verl(level="sequence", upper=0.9),
        "k1_options": verl(options=K1, level="token", upper=2.0),
        "other_options": verl(options=OTHERS, level="sequence", upper=2.0),
        "skewed_k1": verl(options=(("seq_mean_k1", LOG(1.02), LOG(1.3)),)),
    },
    "xtuner": {
        "mismatch_only": xtuner(),
        "shipped": xtuner(level="token", mode="both", upper=1.5, lower=0.7, mask=(0.8, 1.3), veto=(0.5, 1.8)),
        "truncate_open_below": xtuner(level="token", upper=1.5, lower=0.0, veto=(0.0, 1.8)),
        "token_mask": xtuner(level="token", mode="mask", upper=1.3, lower=0.8),
        "sequence_both": xtuner(level="sequence", mode="both", upper=1.4, lower=0.7, mask=(0.6, 1.6)),
        "sequence_mask": xtuner(level="sequence", mode="mask", upper=0.95, lower=0.4, veto=(0.4, 2.0)),
        "sequence_beside_one": xtuner(level="sequence", mode="both", upper=1.6, lower=1.1),
        "geometric_both": xtuner(level="geometric", mode="both", upper=1.05, lower=0.9, veto=(0.5, 1.8)),
    },
    "skyrl": {
        "ratios_only": skyrl(),
        "token_tis": skyrl(tis="token", cap=1.2),
        "sequence_tis": skyrl(tis="sequence", cap=1.3, outlier=(0.5, None)),
        "geo_mask": skyrl(sequence_mask="geo", bounds=(0.95, 1.02)),
        "product_mask_above_one": skyrl(tis="sequence", cap=0.9, sequence_mask="product", bounds=(1.1, 3.0)),
        "product_mask_below_one": skyrl(sequence_mask="product", bounds=(0.4, 0.9)),
        "everything": skyrl(
            tis="token", cap=1.2, outlier=(0.4, 2.0), token_mask=(0.8, 1.25), sequence_mask="geo", bounds=(0.97, 1.03)
        ),
    },
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

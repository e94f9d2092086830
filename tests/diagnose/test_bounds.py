"""The bounds of the doctor's causes: each decides between two values that lie within a factor of two of one another."""

from __future__ import annotations

import copy
import functools
import re
from collections import Counter

import pytest
import torch

from builders.diagnose_cases import CASES, measured
from rollout_corr.diagnose.doctor.diagnosis import CAUSES
from rollout_corr.diagnose.measure.evidence import FIRST_TURN
from rollout_corr.diagnose.measure.profiles import PROBABILITY_BINS
from rollout_corr.diagnose.measure.sharpness import Sharpness


@functools.cache
def of_case(name):
    """Measure a dump by its name, or the first of a cause."""
    return measured(next(case for case in CASES if name in (case.name, case.cause)).make(0))


def outcome(cause, dump, values):
    """Return what a cause makes of a dump some of whose numbers were replaced: None, or severity and title."""
    of = copy.deepcopy(of_case(dump))
    metrics = of.metrics()
    for path, value in values.items():
        *owners, name = path.split(".")
        owner = metrics if owners == ["metrics"] else of.evidence
        for part in owners if owner is of.evidence else ():
            by_key = isinstance(owner, dict)
            owner = owner[part] if by_key else owner[int(part)] if part.isdigit() else getattr(owner, part)
        if isinstance(owner, dict):
            owner[name] = value
        else:
            is_method = callable(getattr(owner, name)) and not callable(value)
            setattr(owner, name, (lambda *_, value=value: value) if is_method else value)
    signs = CAUSES[cause].recognize(of, metrics)
    return signs and (signs.severity or CAUSES[cause].severity, re.sub(r"[\d.,]+", "", signs.title))


def slope(slope, error=1e-3, outer=None):
    return Sharpness(slope, error, slope if outer is None else outer, error)


def moved(late, first=0):
    return {-2: 0, -1: late + first, 0: 0, 1: 0, 2: 0}


def carried_by(path, dump, groups):
    """Return what makes tallies whose first groups have a sum of |D| that is carried by so many tokens."""

    def made(count):
        sums = getattr(of_case(dump).evidence, path).groups().clone()
        sums[:, :, 3] *= float(sums[:groups, :, 2].sum()) ** 2 / float(sums[:groups, :, 3].sum()) / count
        return sums

    return made


def repeats(few=1000, many=100, lowered=0.05, lifted=0.5, noise=0.01):
    """Return the sums of tokens whose D is lowered, and of others, that the sequence had before, whose D is lifted."""
    sums = torch.zeros(2, PROBABILITY_BINS, 4, dtype=torch.float64)
    for group, (count, mean) in enumerate(((few, -lowered), (many, lifted))):
        sums[group, 5] = count * torch.tensor([1.0, mean, abs(mean), mean**2 + noise**2])
    return sums


def over_first_turns(later, first):
    """Return what compares all tokens of later turns, and first tokens of them, with others."""
    return lambda groups, base: later if base == [FIRST_TURN] else first


def first_tokens_of(mean):
    """Return the tallies by position with as many first tokens as make this mean |D|."""
    sums = of_case("sequence_starts").evidence.positions.groups().clone()
    sums[0, :, 0] *= float(sums[0, :, 2].sum() / sums[0, :, 0].sum()) / mean
    return sums


def in_every_octave(count):
    return [count] * len(of_case("positions").evidence.positions.tokens_of_each())


PLAIN, FEW = "noise of a bf16 engine", "one token in a thousand 12 nats too low"
K3, MEAN, STD, RATIO = "metrics.kl_rollout_train_k3", "metrics.logratio_mean", "metrics.ratio_std", "metrics.ratio_mean"
MASS = {"tokens": 10_000}
NO_VALUE = {"repeated.rollout": Counter(), "repeated.train": Counter()}
SWAP, ORDER, SCALE = "pairing.swap", "pairing.order", "by_sequence.scale"
MANY = {f"{SCALE}.tested": 1_000, "by_sequence.divided": None}
# Tokens, k3 of them, and so on: of 100,000 tokens none is far off.
FAR = {"by_sequence.tokens": 100_000, "by_sequence.k3": 1.0, "by_sequence.far.0.tokens": 0, "by_sequence.far.1.k3": 1.0}
STARTS, TURNS = "the first token of a turn from another template", "turns.tokens"
ALONE = {"at_one_place": (9.0, 9.0)}
# Of D with a mean |D| of 1: ratios that average to 0.9 without an error, and a slope.
TRUNCATED = {RATIO: 0.9, STD: 1e-6, "metrics.logratio_abs_mean": 1.0, "sharpness.found": slope(0.2)}
EVEN = TRUNCATED | {"sharpness.found": slope(0.0)}
NOT_PLAIN = {"metrics.logratio_p99": 1.0, "far": 100_000}
FAR |= {"by_sequence.far.1.tokens": 50_000, K3: 0.5}

# The cause; a dump, or the first of the cause; numbers that are fixed; the number that moves, and its two values, which
# a function may turn into what is replaced.
ROWS = [
    ("not_log_probs", PLAIN, MASS, "positive.train", 8, 12),
    ("not_log_probs", PLAIN, MASS, "positive.train", 4_000, 6_000),
    ("not_log_probs", PLAIN, MASS | {"positive.train": 9_000}, "above_one.train", 400, 600),
    ("not_log_probs", PLAIN, MASS | {"positive.rollout": 1_000}, "repeated.rollout", 800, 950,
     lambda x: Counter({1.0: x})),
    ("not_log_probs", PLAIN, MASS | {"repeated.rollout": Counter({1.0: 5_900})}, "positive.rollout", 4_000, 6_000),
    ("filled", PLAIN, {"far": 50}, "repeated.rollout", 6, 9, lambda x: Counter({0.0: x})),
    ("filled", PLAIN, {"far": 10_000}, "repeated.rollout", 400, 600, lambda x: Counter({0.0: x})),
    ("filled", PLAIN, {"far": 500}, "repeated.rollout", 70, 90, lambda x: Counter({0.0: x, -1.5: 10, -2.5: 10})),
    ("filled", PLAIN, NO_VALUE | {"finite": 1_000}, "impossible.rollout", 4, 6),
    ("filled", PLAIN, NO_VALUE | {"finite": 100_000}, "impossible.rollout", 80, 120),
    ("filled", PLAIN, NO_VALUE | {"finite": 1_000, "unlikely.rollout": 1_000}, "impossible.rollout", 400, 600),
    ("identical", "identical", {"equal": 10_000}, "finite", 40, 60),
    ("shifted", PLAIN, {"pairing.paired": 1_000, "pairing.later_paired": 0}, "pairing.shifted", 40, 60, moved),
    ("shifted", PLAIN, {"pairing.paired": 1_000, "pairing.later_paired": 500, "pairing.later_shifted": 100},
     "pairing.shifted", 15, 25, lambda x: moved(100, x)),
    ("swapped", PLAIN, {f"{SWAP}.tested": 1_000}, f"{SWAP}.having", 40, 60),
    ("swapped", PLAIN, {f"{SWAP}.tested": 10}, f"{SWAP}.having", 1, 3),
    ("reordered", PLAIN, {f"{ORDER}.tested": 1_000}, f"{ORDER}.having", 40, 60),
    ("scale", PLAIN, {**MANY, "by_sequence.factor": (0.5, 0.01)}, f"{SCALE}.having", 40, 60),
    ("scale", PLAIN, {**MANY, "by_sequence.factor": (0.5, 0.1)}, f"{SCALE}.having", 400, 600),
    ("scale", PLAIN, {**MANY, f"{SCALE}.tested": 20, "by_sequence.factor": (0.5, 0.01)}, f"{SCALE}.having", 3, 5),
    ("scale", PLAIN, {**MANY, f"{SCALE}.having": 100}, "by_sequence.factor", 0.015, 0.025,
     lambda x: (0.5, x)),
    ("scale", PLAIN, {**MANY, f"{SCALE}.having": 900}, "by_sequence.factor", 0.2, 0.3,
     lambda x: (0.5, x)),
    ("wrong_weights", "other weights", {}, "finite", 40, 60),
    ("wrong_weights", "other weights", {}, "metrics.logratio_abs_mean", 0.4, 0.6),
    ("wrong_weights", "other weights", {"metrics.logratio_p50": -0.4}, "metrics.prob_correlation", 0.25, 0.35),
    ("wrong_weights", "other weights", {"metrics.prob_correlation": 0.5}, "metrics.logratio_p50", -0.4, -0.6),
    ("wrong_weights", "other weights", {}, "moments", 0.15, 0.25,
     lambda x: torch.tensor([100.0, 0.0, 0.0, 100.0 * x * x, 100.0, 0.0])),
    ("turn_starts", "other text before later turns", {}, TURNS, 40, 60),
    ("turn_starts", STARTS, {}, TURNS, 15, 25),
    ("turn_starts", STARTS, {TURNS: 40}, "turns.groups", 8, 12, carried_by("turns", STARTS, 1)),
    ("turn_starts", STARTS, {TURNS: 100}, "turns.groups", 13, 17, carried_by("turns", STARTS, 1)),
    ("turn_starts", STARTS, {TURNS: 1_000}, "turns.groups", 25, 35, carried_by("turns", STARTS, 1)),
    ("turn_starts", STARTS, {}, "at_one_place", 2.5, 3.5, lambda x: (x, x)),
    ("turn_starts", STARTS, ALONE, "turns.over", 2.5, 3.5),
    ("turn_starts", STARTS, ALONE, "turns.over", 8.0, 12.0),
    ("turn_starts", STARTS, ALONE, "turns.over", 3.5, 4.5, lambda x: over_first_turns(x, 1.0)),
    ("turn_starts", STARTS, ALONE, "turns.over", 2.5, 3.5, lambda x: over_first_turns(5.0, x)),
    ("turn_starts", STARTS, {}, TURNS, 0.015, 0.025,
     lambda x: int(of_case(STARTS).evidence.turns.table()[1][0].sum() / x)),
    ("sequence_starts", "sequence_starts", {}, "positions.over", 2.5, 3.5),
    ("sequence_starts", "sequence_starts", {}, "positions.over", 8.0, 12.0),
    ("sequence_starts", "sequence_starts", {"positions.over": 20.0}, "positions.groups", 0.015, 0.025, first_tokens_of),
    ("sequence_starts", "sequence_starts", {}, "positions.tokens", 15, 25),
    ("sequence_starts", "sequence_starts", {}, "positions.groups", 8, 12,
     carried_by("positions", "sequence_starts", 1)),
    ("sequence_starts", "sequence_starts", {}, "by_sequence.starts_over_rest", 1.2, 1.8),
    ("renormalized", "renormalized", {}, "finite", 40, 60),
    ("renormalized", "renormalized", {}, "metrics.logratio_p1", -4.0, -6.0),
    ("renormalized", "renormalized", {MEAN: -1.0, "metrics.logratio_abs_mean": 1.0}, "metrics.logratio_std", 0.2, 0.3),
    ("renormalized", "renormalized", {"metrics.logratio_abs_mean": 1.0}, MEAN, -0.32, -0.5),
    ("renormalized", "renormalized", {"far": 10_000}, "metrics.logratio_p99", 0.4, 0.6),
    ("renormalized", "renormalized", {STD: 1e-6, "sharpness.found": slope(0.0)}, RATIO, 0.96, 0.987),
    ("renormalized", "renormalized", {"metrics.logratio_p1": -6.0, "metrics.logratio_std": 0.1, MEAN: -1.0},
     "moments", 0.7, 0.9, lambda x: torch.tensor([100.0, 0.0, 0.0, 100.0, 100.0, 100.0 * x])),
    # Slightly, by ratio and by the share of D above 0; not by few tokens far off.
    ("renormalized", "renormalized", EVEN | {MEAN: -0.2}, RATIO, 0.96, 0.98),
    ("renormalized", "renormalized", EVEN | {MEAN: -0.2}, RATIO, 0.9965, 0.9985),
    ("renormalized", "renormalized", EVEN | {RATIO: 0.99}, MEAN, -0.05, -0.2),
    ("renormalized", "renormalized", EVEN | {RATIO: 0.99, "by_sequence.k3": 1.0}, "by_sequence.far.0.k3", 0.4, 0.6),
    # Under a temperature.
    ("renormalized", "renormalized", TRUNCATED | {MEAN: -0.3}, "sharpness.found", 0.08, 0.15, slope),
    ("renormalized", "renormalized", TRUNCATED | {MEAN: -0.3}, "sharpness.found", -0.7, -0.9, slope),
    ("renormalized", "renormalized", TRUNCATED | {MEAN: -0.3}, RATIO, 0.99, 0.9965),
    ("renormalized", "renormalized", TRUNCATED, MEAN, -0.15, -0.25),
    ("renormalized", "renormalized", TRUNCATED | NOT_PLAIN, MEAN, -0.7, -0.8),
    ("renormalized", "renormalized", TRUNCATED | NOT_PLAIN | {"sharpness.found": slope(-0.2)}, MEAN, -0.86, -0.94),
    ("bfloat16", "bfloat16", {"in_bfloat16.rollout": 1_000}, "fractional.rollout", 40, 60),
    ("bfloat16", "bfloat16", {"fractional.rollout": 1_000}, "in_bfloat16.rollout", 985, 995),
    ("drift", "worse step by step", {}, "values.steps", 4, 5, lambda x: {4 * step: 4 * step for step in range(x)}),
    ("drift", "worse step by step", {}, "columns.steps.tokens_of_each", 15, 25, lambda x: [x] * 20),
    ("penalties", "penalties", {}, "repeats.groups", 4, 6, lambda x: repeats(many=x)),
    ("penalties", "penalties", {}, "repeats.groups", 4, 6, lambda x: repeats(few=x)),
    ("penalties", "penalties", {}, "repeats.groups", 0.009, 0.015,
     lambda x: repeats(1000, 1000, lowered=0.008, lifted=x, noise=1e-4)),
    ("penalties", "penalties", {}, "repeats.groups", 0.02, 0.04, lambda x: repeats(lifted=x, noise=0.1)),
    ("penalties", "penalties", {}, "repeats.groups", 0.04, 0.07, lambda x: repeats(lowered=0.2, lifted=x)),
    ("penalties", "penalties", {}, "repeats.groups", 0.6, 0.42, lambda x: repeats(10_000, 1000, lifted=0.2, noise=x)),
    ("positions", "positions", {}, "positions.tokens_of_each", 40, 60, in_every_octave),
    ("positions", "positions", {}, "positions.over", 2.5, 3.5),
    ("positions", "positions", {"positions.over": 20.0}, "positions.each_over", 3, 5,
     lambda x: [*reversed(range(x)), *range(x, 9)]),
    ("drift", "worse step by step", {}, "values.steps", [0, 8, 4, 12, 16], [4, 8, 0, 12, 16],
     lambda x: dict(enumerate(x))),
    ("trainer_disagrees", "engine_alone", {"distances.tokens": 1.0}, "distances.new_train", 6e-5, 1.5e-4),
    ("temperature", "temperature", {}, "finite", 150, 250),
    ("temperature", "temperature", {}, "metrics.logratio_abs_mean", 0.004, 0.006),
    ("temperature", "temperature", {}, "sharpness.found", 0.016, 0.025, slope),
    ("temperature", "temperature", {}, "sharpness.found", 0.1, 0.15, lambda x: slope(x, 0.02)),
    ("temperature", "temperature", {}, "sharpness.found", -0.7, -0.9, slope),
    ("temperature", "temperature", {}, "sharpness.found", 0.25, 0.36, lambda x: slope(0.1, outer=0.1 / x)),
    ("temperature", "temperature", {}, "sharpness.found", 0.7, 0.9, lambda x: slope(0.1, outer=0.1 / x)),
    ("temperature", "temperature", {}, "sharpness.found", 0.1, 0.2, lambda x: Sharpness(0.2, 1e-3, 0.2, x)),
    ("temperature", "temperature", {"sharpness.found": slope(0.1, outer=0.2)}, K3, 8e-4, 1.2e-3),
    ("stale", "stale", {}, K3, 8e-4, 1.2e-3),
    ("engine_alone", "engine_alone", {"distances.tokens": 100.0, "distances.train_rollout": 100.0},
     "distances.new_train", 8.0, 12.0),
    ("trainer_varies", "trainer_varies", {}, "mean_squares", 0.4, 0.6, lambda x: (1.0, 1.0, x)),
    ("trainer_varies", "trainer_varies", {}, "mean_squares", 1.2, 1.5, lambda x: (1.0, x, 1.0)),
    ("outliers", FEW, FAR | {"by_sequence.far.0.k3": 1.0}, "by_sequence.far.0.tokens", 800, 1_200),
    ("outliers", FEW, FAR, "by_sequence.far.1.tokens", 2_400, 3_600),
    ("outliers", FEW, FAR | {"by_sequence.far.1.tokens": 100}, "by_sequence.far.1.k3", 0.96, 0.99),
    ("not_the_sampler", "not_the_sampler", {}, "finite", 40, 60),
    ("not_the_sampler", PLAIN, {K3: 1.0, STD: 1e-6}, RATIO, 1.04, 1.06),
    ("not_the_sampler", PLAIN, {K3: 1.0, STD: 1.0, "metrics.tokens": 10_000.0}, RATIO, 1.1, 1.16),
    ("different_policies", "trainer some updates ahead", {}, K3, 0.008, 0.012),
    ("different_policies", "trainer some updates ahead", {}, K3, 0.08, 0.12),
    ("long_products", "long_products", {}, "metrics.sequence_logratio_abs_mean", 0.8, 1.2),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}, {row[3]} {row[4]} to {row[5]}" for row in ROWS])
def test_a_bound_lies_between(row):
    cause, dump, fixed, path, low, high, *turned = row
    made = turned[0] if turned else lambda x: x
    assert outcome(cause, dump, fixed | {path: made(low)}) != outcome(cause, dump, fixed | {path: made(high)})

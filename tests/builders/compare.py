"""Comparisons of calls with the oracles: masks and decisions exactly, all else but for rounding."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import torch

import rollout_corr as rc
from builders.rounding import FORMULA, GRID, margin
from frozen.generator import LaidOut
from oracles import correction as oracle
from oracles import loss as oracle_loss
from oracles import metrics as oracle_metrics
from oracles.numbers import D_RANGE, add, clamp, probability, saturate
from rollout_corr.specs.terms import Objective


def error(got: float, wanted: float) -> float:
    """The difference relative to the larger of 1 and the wanted value; 0 where both are the same NaN or infinity."""
    if got == wanted or (math.isnan(got) and math.isnan(wanted)):
        return 0.0
    difference = abs(got - wanted) / max(1.0, abs(wanted))
    return math.inf if math.isnan(difference) else difference


def rounded(values: Iterable[float], dtype: torch.dtype) -> list[float]:
    """Numbers as a dtype has them."""
    return torch.tensor(list(values), dtype=torch.float64).to(dtype).double().tolist()


# --- a correction ---


def correction(
    spec: rc.Spec,
    out: rc.Correction | rc.PolicyLoss,
    wanted: oracle.Answer,
    laid: LaidOut,
    mask: Any,
    computes: torch.dtype,
    case: str,
    metrics: dict[str, float] | None = None,
) -> None:
    """Compare decisions, mask, weights and metrics.

    Args:
        spec: Its bounds are numbers.
        out: What the call gave.
        wanted: What the oracle answers.
        laid: Where the tokens lie.
        mask: The mask of the call.
        computes: The dtype that the call computes in.
        case: What the call was.
        metrics: Those to compare; None: all of `out`.
    """
    assert (out.keep.dtype, tuple(out.keep.shape)) == (torch.bool, (len(wanted.keep),)), case
    assert out.keep.tolist() == wanted.keep, f"keep: {out.keep.tolist()} for {wanted.keep}: {case}"
    if out.keep_turns is not None:
        # Behind the turns of a batch stand those that it might have had.
        turns = [x for row in wanted.keep_turns for x in row]
        more = [True] * (len(out.keep_turns) - len(turns))
        assert out.keep_turns.tolist() == turns + more, f"keep_turns: {case}"
    if wanted.mask_is_the_given and mask is not None:
        assert out.mask is mask, f"mask is not the one given: {case}"
    else:
        kind = next((x.dtype for x in (mask if isinstance(mask, list) else [mask]) if x is not None), torch.bool)
        assert {x.dtype for x in (out.mask if isinstance(out.mask, list) else [out.mask])} <= {kind}, case
        got, rows = laid.read(out.mask), [rounded(row, kind) for row in wanted.mask]
        assert got == rows, f"mask: {got} for {rows}: {case}"
        assert not any(laid.elsewhere(out.mask)), f"mask outside: {case}"

    assert (out.weights is None) == (wanted.weights is None), case
    if wanted.weights is not None:
        within, sizes = margin(computes, FORMULA), exponents(wanted, spec.weight)
        if spec.weight is not None and (spec.weight.over, spec.weight.normalize) == ("token", None):
            sizes = [1.0] * len(sizes)  # a token's own exponent counts below
        for s, rows in enumerate(zip(laid.read(out.weights), wanted.weights, strict=True)):
            for t, (a, b) in enumerate(zip(*rows, strict=True)):
                size = max(sizes[s], abs(math.log(b)) if b > 0.0 else 0.0)
                assert error(a, b) <= within * size, f"weight [{s}][{t}]: {a} for {b}: {case}"
        assert not any(laid.elsewhere(out.weights)), f"weight outside: {case}"

    outside = 0
    if laid.layout.packed:
        slots = out.mask.numel() - len(laid.places)
        outside = slots if mask is None else sum(map(bool, laid.elsewhere(mask)))
    # Padding that passes for tokens has its own test.
    every = oracle_metrics.metrics(wanted, spec) | {"tokens_outside": outside, "sequences_padded": 0}
    found = out.metrics() if metrics is None else metrics
    assert sorted(found) == sorted(every), f"keys: {set(found) ^ set(every)}: {case}"
    compare_metrics(spec, found, every, wanted, computes, case)


def compare_metrics(
    spec: rc.Spec,
    found: dict[str, float],
    every: dict[str, float],
    answer: oracle.Answer,
    computes: torch.dtype,
    case: str,
) -> None:
    """Compare the metrics found: counts exactly, percentiles within the resolution of their histogram.

    Args:
        spec: The Spec.
        found: Some metrics.
        every: All that the oracle has.
        answer: The answer that they are of, whose numbers say how they are rounded.
        computes: The dtype that the call computes in.
        case: What the call was.
    """
    poisoned = spec.nonfinite == "propagate" and every["tokens_nonfinite"] > 0
    criteria = {criterion.label: criterion for criterion in spec.criteria}
    within = margin(computes, max(FORMULA, sum(map(len, answer.tokens))))
    for key, got in found.items():
        value, counted = every[key], isinstance(every[key], int)
        if poisoned and not counted:
            continue
        allowed = 0.0 if counted else within
        if key.startswith("logratio_p"):
            allowed = abs(value) / 8 + (2.0**-23 if value else 0.0)
        if "_before_bounds_p" in key:
            # The histogram is of logarithms.
            got, value = (math.log(x) if x else 0.0 for x in (got, value))
            allowed = abs(value) / 8 + 2.0**-23
        if key.endswith("std"):
            # A variance from sums is exact to the rounding of the second moment, so its root is not where it is near 0.
            got, value = got**2, value**2
            allowed *= 1.0 + every[key.removesuffix("std") + "mean"] ** 2
        if key.endswith("/mean"):
            # Of values with both signs, a mean has the rounding of the largest.
            least, most = (every[key.removesuffix("mean") + end] for end in ("min", "max"))
            if least < 0.0 < most:
                allowed *= max(1.0, -least, most) / max(1.0, abs(value))
        if key == "prob_correlation":
            allowed *= spread(answer, computes)
        criterion = criteria.get(key.rpartition("/")[0])
        of_sums = criterion is not None and criterion.stat in ("ratio", "k1") and criterion.reduce in ("sum", "mean")
        if of_sums or CANCELS.search(key):
            allowed *= largest(token.d for row in answer.tokens for token in row if token)
        if "weight" in key and "_before_bounds_p" not in key:
            allowed *= max(exponents(answer, spec.weight), default=1.0)
        if key in EXPONENTS:
            most = math.inf if "ppl" in key else spec.clamp
            allowed *= exponent(answer, most, key.startswith("turn"))
        if (("ppl" in key and "log" not in key) or "chi2" in key) and value > 0.0:
            # An exponential is off by what its exponent is, and that by its size.
            allowed *= max(1.0, abs(math.log(value)))
        assert error(got, value) <= allowed, f"{key}: {found[key]} for {every[key]}: {case}"


# --- how rounding grows: no result is nearer than the numbers that it is made of ---

# Made of sums of log-ratios, which may cancel; and those that have such a sum for an exponent.
CANCELS = re.compile("_k1$|log_ppl_diff|^logratio_mean$|^(sequence|turn)_logratio_abs")
EXPONENTS = ("turn_chi2_train_rollout", "sequence_chi2_train_rollout", "sequence_ppl_ratio_mean")


def largest(ds: Iterable[float]) -> float:
    """The largest log-ratio in a sum, at least 1."""
    return max([1.0, *(abs(saturate(d, D_RANGE)) for d in ds if math.isfinite(d))])


def exponents(answer: oracle.Answer, weight: rc.Weight | None) -> list[float]:
    """For each sequence the largest number that the log of a weight is made of."""
    if weight is None:
        return [1.0] * len(answer.keep)
    if weight.over == "token":
        sizes = [largest(math.log(x) for x in row if x) for row in answer.raw]
    else:
        sizes = [largest(clamp(x.d, weight.token_clamp) for x in row if x) for row in answer.tokens]
    # A mean over other sequences may come from the least exact.
    return [max(sizes, default=1.0)] * len(sizes) if weight.normalize in ("batch", "group") else sizes


def exponent(answer: oracle.Answer, most: float, of_turns: bool) -> float:
    """The largest log-ratio of a turn or sequence whose sum is not clamped."""
    sizes = [1.0]
    for sequence, row in zip(answer.sequences, answer.tokens, strict=True):
        for places in sequence.units("turn" if of_turns else "sequence"):
            ds = [row[t].d for t in oracle.measured(row, places)]
            size = largest(ds)
            sizes += [size] * (abs(add(saturate(d, D_RANGE) for d in ds)) <= most + size * 1e-3)
    return max(sizes)


def spread(answer: oracle.Answer, computes: torch.dtype) -> float:
    """By what a correlation multiplies the rounding of probabilities: they are about 1, over their spread.

    Their sums are in float64, which leaves its own rounding of the squares around 1, over the variance.
    """
    tokens = [row[t] for row in answer.tokens for t in oracle.measured(row, range(len(row)))]
    sides = [[probability(x) - 1.0 for x in row] for row in ([t.train for t in tokens], [t.rollout for t in tokens])]
    of_sums = torch.finfo(torch.float64).eps / torch.finfo(computes).eps
    spreads = [(oracle_metrics.std(x), oracle_metrics.mean(y * y for y in x)) for x in sides]
    return max([1.0, *(1.0 / std + of_sums * square / std**2 for std, square in spreads if std)])


# --- a loss ---


def loss(
    objective: Objective,
    out: rc.PolicyLoss,
    sequences: list[oracle_loss.Sequence],
    gradients: list[tuple[list[list[float]], list[float]]],
    dtype: torch.dtype,
    case: str,
    total: float | None = None,
    bonus: rc.EntropyBonus | None = None,
) -> None:
    """Compare value, gradients and metrics; a gradient is 0 at every token that has no part in the loss.

    Args:
        objective: The objective.
        out: What the call gave.
        sequences: As the oracle takes them.
        gradients: By new_logp, and by the entropy where it has a bonus: of each sequence, and elsewhere.
        dtype: Of new_logp and the entropy.
        case: What the call was.
        total: The divisor that the call was given.
        bonus: Of the entropy.
    """
    within = margin(torch.promote_types(dtype, torch.float32))
    if objective.surrogate.traits.sees != "token":
        within = max(within, GRID)
    # Of terms that cancel, a sum has the rounding of the largest.
    size = max(1.0, oracle_loss.largest_term(objective, sequences, total))

    def is_near(got: float, wanted: float, by: float) -> bool:
        return error(got, wanted) <= by * max(1.0, size / max(1.0, abs(wanted)))

    wanted, slopes = oracle_loss.value(objective, sequences, total), [oracle_loss.gradient(objective, sequences, total)]
    if bonus is not None:
        more, of_entropy = oracle_loss.bonus(bonus, objective, sequences, total)
        wanted, slopes = wanted + more, [*slopes, of_entropy]
    assert is_near(out.value.item(), wanted, within), f"value {out.value.item()} for {wanted}: {case}"
    # A gradient has the dtype of its leaf.
    by, names = max(within, margin(dtype, 1)), ("new_logp", "entropy")[: len(slopes)]
    for of, (rows, elsewhere), every in zip(names, gradients, slopes, strict=True):
        assert not any(elsewhere), case
        for q, row, expected in zip(sequences, rows, every, strict=True):
            touched = oracle_loss.known(q, objective.surrogate) if of == "new_logp" else oracle_loss.valid(q)
            for t, (a, b) in enumerate(zip(row, rounded(expected, dtype), strict=True)):
                # Beyond the range of float16 a term is infinite, and two of them may be no number.
                right = math.isnan(b) or (math.isinf(b) and not math.isfinite(a)) or is_near(a, b, by)
                assert right, f"gradient by {of} at {t}: {a} for {b}: {case}"
                assert t in touched or a == 0.0, case
    found, every = out.metrics(), oracle_loss.metrics(objective, sequences)
    for key, value in every.items():
        got, allowed = found[key], within
        if key == "surrogate_loss_mean":
            allowed *= max(1.0, oracle_loss.largest_policy_loss(objective, sequences) / max(1.0, abs(value)))
        if key.endswith("std"):
            got, value, allowed = got**2, value**2, allowed * (1.0 + found["surrogate_ratio_max"] ** 2)
        assert error(got, value) <= allowed, f"{key}: {found[key]} for {every[key]}: {case}"

"""Weights by what lies before and behind a token in its sequence: FIPO's and IW-OPD's."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from ..backends import whole
from ..backends.batch import Reader, per_token
from ..backends.given import Batch, batch_given
from ..backends.layouts import L, LogProbs
from ..backends.read import reader
from ..backends.staleness import read_versions
from ..specs.checked import known_keywords
from ..specs.operands import compute_dtype
from ..specs.validate import LARGEST_CLAMP, choice, number, positive


@known_keywords
def future_kl_weights(
    new_logp: L,
    old_logp: LogProbs,
    batch: Batch | None = None,
    *,
    mask: LogProbs | None = None,
    cu_seqlens: Tensor | None = None,
    advantages: LogProbs | None = None,
    half_life: float = 32.0,
    lower: float = 1.0,
    upper: float = 1.2,
    delta: float | None = None,
    safety: float | None = None,
) -> L:
    """Weigh tokens by how far the policy has moved after them, for `Factors` of `policy_loss` (FIPO).

    The weight of token t is exp of the sum of 2^(-(u - t) / half_life) x_u over the valid tokens u at and after it,
    x = new_logp - old_logp, clamped to [lower, upper]. It is a constant, as all weights are.

    Args:
        new_logp: Log-probs under the policy being trained, in any layout of `correct`.
        old_logp: Log-probs under the proximal policy, same layout.
        batch: Mask and offsets; whatever else it holds is not read.
        mask: Short for `Batch(mask=...)`: non-zero at generated tokens; None: every token. Other tokens add nothing,
            but count in the distance u - t.
        cu_seqlens: The offsets of packed sequences, short for `Batch(cu_seqlens=...)`: [S + 1] int32 or int64.
        advantages: Per token or per sequence; read where `safety` is given.
        half_life: The number of tokens after which x counts half.
        lower: Least weight.
        upper: Largest weight.
        delta: A token whose ratio exceeds it adds nothing, or None.
        safety: Where A < 0 and the ratio exceeds it, the weight is clamped to [0.8, 1] in the end, or None.

    Returns:
        Weights in the layout of new_logp, in fp32 (fp64 for fp64 log-probs), 0 at tokens that are not valid. An x
        that is not finite counts as 0. No host sync has happened.

    Raises:
        ValueError: A wrong shape, dtype, device or number, named.
    """
    half_life, lower, upper = positive("half_life", half_life), number("lower", lower), number("upper", upper)
    if not 0.0 <= lower <= upper:
        raise ValueError(f"lower: expected 0 <= lower <= upper, got lower={lower!r}, upper={upper!r}")
    if safety is not None and advantages is None:
        raise ValueError("advantages: expected a value, because safety is given, got None")
    of = batch_given(batch, mask, cu_seqlens)
    read = reader("new_logp", new_logp, of)
    old = read.tensor("old_logp", old_logp)
    dtype = compute_dtype(read.first.dtype, old.dtype)
    x = read.first.detach().to(dtype) - old.to(dtype)
    sequence, valid = _sequence_and_valid(read, of)
    x = torch.where(x.isfinite() & valid, x, 0.0)
    adds = x if delta is None else torch.where(x.exp() > positive("delta", delta), 0.0, x)
    behind = decayed_suffix_sums(adds.reshape(-1), sequence, 0.5 ** (1.0 / half_life)).view(x.shape)
    weight = behind.clamp(-LARGEST_CLAMP, LARGEST_CLAMP).exp().clamp(lower, upper)
    if safety is not None:
        found, per_sequence = read.per_token_or_sequence("advantages", advantages)
        found = found.to(dtype)
        if per_sequence:
            found = whole.sequences_of(read)[0].spread(found).expand(x.shape)
        far = (found < 0) & (x.exp() > positive("safety", safety))
        weight = torch.where(far, weight.clamp(0.8, 1.0), weight)
    return read.layout.give_back(torch.where(valid, weight, 0.0))


@known_keywords
def early_token_weights(
    advantages: L,
    batch: Batch | None = None,
    *,
    mask: LogProbs | None = None,
    cu_seqlens: Tensor | None = None,
    gamma: float = 1.0,
    eps: float = 1e-8,
) -> L:
    """Weigh tokens by the share of the sequence's |A| that lies at and after them, to multiply advantages (IW-OPD).

    The weight of a token is 1 + gamma (1 - before / total), where before is the sum of |A| over the valid tokens before
    it, and total the sum over the sequence, at least eps: 1 + gamma at the first token, and less the more has been
    said. For on-policy distillation, whose advantages are teacher_logp - rollout_logp.

    Args:
        advantages: Per token, in any layout of `correct`, any floating dtype.
        batch: Mask and offsets; whatever else it holds is not read.
        mask: Short for `Batch(mask=...)`: non-zero at generated tokens; None: every token.
        cu_seqlens: The offsets of packed sequences, short for `Batch(cu_seqlens=...)`: [S + 1] int32 or int64.
        gamma: The weight's excess over 1 at the first token.
        eps: Least total.

    Returns:
        Weights in the layout of the advantages, in fp32 (fp64 for fp64), 0 at tokens that are not valid. An advantage
        that is not finite counts as 0. No host sync has happened.

    Raises:
        ValueError: A wrong shape, dtype, device or number, named.
    """
    gamma, eps = number("gamma", gamma), positive("eps", eps)
    of = batch_given(batch, mask, cu_seqlens)
    read = reader("advantages", advantages, of)
    sequence, valid = _sequence_and_valid(read, of)
    given = read.first.detach()
    given = given.to(compute_dtype(given.dtype, given.dtype))
    size = torch.where(given.isfinite() & valid, given.abs(), 0.0).double().reshape(-1)
    before = sums_before(size, sequence)
    total = before + decayed_suffix_sums(size, sequence, 1.0)
    weight = (1.0 + gamma * (1.0 - before / total.clamp(min=eps))).to(given.dtype).view(given.shape)
    return read.layout.give_back(torch.where(valid, weight, 0.0))


def _sequence_and_valid(read: Reader, batch: Batch) -> tuple[Tensor, Tensor]:
    """Number the sequence of each token, [N], and find the valid ones, in the shape of the batch."""
    read.read_mask(batch.mask)
    sequences, valid = whole.sequences_of(read)
    numbers = torch.arange(read.count, device=read.device)
    sequence = sequences.spread(numbers).expand(read.first.shape).reshape(-1)
    return sequence, torch.ones_like(read.first, dtype=torch.bool) if valid is None else valid


Interpolation = Literal["loglinear", "linear"]
INTERPOLATIONS: tuple[Interpolation, ...] = get_args(Interpolation)


@known_keywords
def proximal(new_logp: L, rollout_logp: LogProbs, batch: Batch, *, interpolation: Interpolation = "loglinear") -> L:
    """Interpolate the log-probs of the proximal policy, for `old_logp` of `policy_loss`.

    The proximal policy is the one before the current. A token of age a = current - version lies a - 1 of a steps from
    the rollout's policy to the current one, so alpha = (a - 1) / a: 0 for a token that the proximal policy sampled
    itself. It is 0 too for ages below 1, and for versions below 0, which say that nothing was sampled.
    This is A-3PO's approximation, which takes the result as a constant; so does `policy_loss`. See docs/math.md.

    Args:
        new_logp: Log-probs under the policy being trained, in any layout of `correct`. The result has their gradient,
            alpha times; detach them where none is wanted.
        rollout_logp: Log-probs under the engine that sampled the tokens, same layout.
        batch: A Batch with versions; of the rest only the offsets are read.
        interpolation: "loglinear" between the log-probs, or "linear" between the probabilities.

    Returns:
        Log-probs in the layout of new_logp, in fp32 (fp64 for fp64 log-probs). No host sync has happened.

    Raises:
        ValueError: A wrong shape, dtype or device, named.
        TypeError: An argument of the wrong type.
    """
    choice("interpolation", interpolation, INTERPOLATIONS)
    of = batch_given(batch, None, None)
    if of.versions is None:
        raise ValueError("versions: expected rc.Batch(versions=rc.Versions(ids, current)), got None")
    read = reader("new_logp", new_logp, of)
    rollout = read.tensor("rollout_logp", rollout_logp)
    found = read_versions(read, of.versions)
    dtype = compute_dtype(read.first.dtype, rollout.dtype)
    new, rollout = read.first.to(dtype), rollout.to(dtype)
    age = found.ages()
    alpha = torch.where((age > 0) & (found.ids >= 0), (age - 1).to(dtype) / age.clamp(min=1).to(dtype), 0.0)
    alpha = per_token(alpha, found.per_sequence, read.first.shape, read.offsets)
    # Where alpha is 0 nothing of the new policy may reach the result or the gradient, NaN neither.
    inside = alpha > 0
    start, end, alpha = torch.where(inside, rollout, 0.0), torch.where(inside, new, 0.0), alpha.where(inside, 0.5)
    if interpolation == "loglinear":
        between = start + alpha * (end - start)
    else:
        between = torch.logaddexp(start + (-alpha).log1p(), end + alpha.log())
    return read.layout.give_back(torch.where(inside, between, rollout))


# --- sums along a sequence ---

# Decays below the smallest float64 add nothing.
_LEAST_LOG = -745.0


def decayed_suffix_sums(x: Tensor, sequence: Tensor, decay: float) -> Tensor:
    """Sum decay^(u - t) x_u over the tokens u at and behind t of its sequence, [N]; `sequence` is [N].

    Each round doubles the tokens that a sum covers, until decays are 0: no value is read, and no sum depends
    on what is packed around a sequence.
    """
    reach, found = 1, x
    while reach < x.shape[0] and reach * math.log(decay) > _LEAST_LOG:
        behind = torch.where(sequence[reach:] == sequence[:-reach], found[reach:], 0.0)
        found = torch.cat((found[:-reach] + decay**reach * behind, found[-reach:]))
        reach *= 2
    return found


def sums_before(x: Tensor, sequence: Tensor) -> Tensor:
    """Sum x over the tokens before t of its sequence, [N]."""
    return decayed_suffix_sums(x.flip(0), sequence.flip(0), 1.0).flip(0) - x

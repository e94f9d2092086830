"""`proximal`: log-probs of the proximal policy, interpolated by versions instead of computed by a forward pass."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rollout_corr.backends.batch import reader
from rollout_corr.backends.layouts import LogProbs
from rollout_corr.backends.staleness import Versions, ages_of, per_token, read_versions
from rollout_corr.definition.tokens import compute_dtype
from rollout_corr.spec.validate import choice

Interpolation = Literal["loglinear", "linear"]
INTERPOLATIONS: tuple[Interpolation, ...] = get_args(Interpolation)


def proximal(
    new_logp: LogProbs,
    rollout_logp: LogProbs,
    versions: LogProbs,
    current_version: int,
    *,
    cu_seqlens: Tensor | None = None,
    interpolation: Interpolation = "loglinear",
) -> Any:
    """Interpolate the log-probs of the proximal policy, for `old_logp` of `policy_loss`.

    The proximal policy is the one before the current. A token of age a = current_version - version lies a - 1 of a
    steps from the rollout's policy to the current one, so alpha = (a - 1) / a: 0 for a token that the proximal policy
    sampled itself. It is 0 too for ages below 1, and for versions below 0, which say that nothing was sampled.
    This is A-3PO's approximation, which takes the result as a constant; so does `policy_loss`. See docs/math.md.

    Args:
        new_logp: Log-probs under the policy that trains, in any layout of `correct`. The result has their gradient,
            alpha times; detach them where none is wanted.
        rollout_logp: Log-probs under the engine that sampled the tokens, same layout.
        versions: The version of the policy that sampled each token (same layout) or sequence ([S] or [S, 1]), any
            integer dtype.
        current_version: The version of the policy that trains.
        cu_seqlens: [S + 1] int32 or int64 offsets of packed sequences.
        interpolation: "loglinear" between the log-probs, or "linear" between the probabilities.

    Returns:
        Log-probs in the layout of new_logp, in fp32 (fp64 beside fp64 log-probs). No host sync has happened.

    Raises:
        ValueError: A wrong shape, dtype or device, named.
        TypeError: An argument of the wrong type.
    """
    choice("interpolation", interpolation, INTERPOLATIONS)
    read = reader("new_logp", new_logp, cu_seqlens, False)
    rollout = read.tensor("rollout_logp", rollout_logp)
    given = Versions(versions, current_version)
    found, per_sequence = read_versions(read, given)
    dtype = compute_dtype(read.first.dtype, rollout.dtype)
    new, rollout = read.first.to(dtype), rollout.to(dtype)
    age = ages_of(found, given)
    alpha = torch.where((age > 0) & (found >= 0), (age - 1).to(dtype) / age.clamp(min=1).to(dtype), 0.0)
    alpha = per_token(read, alpha, per_sequence)
    # Where alpha is 0 nothing of the new policy may reach the result or the gradient, NaN neither.
    inside = alpha > 0
    start, end, alpha = torch.where(inside, rollout, 0.0), torch.where(inside, new, 0.0), alpha.where(inside, 0.5)
    if interpolation == "loglinear":
        between = start + alpha * (end - start)
    else:
        between = torch.logaddexp(start + (-alpha).log1p(), end + alpha.log())
    return read.layout.give_back(torch.where(inside, between, rollout))

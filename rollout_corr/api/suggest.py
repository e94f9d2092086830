"""`suggest`: bounds of rejection that keep a healthy batch, from its lengths and its mismatch."""

from __future__ import annotations

from torch import Tensor

from rollout_corr.api.by_keyword import mask_by_keyword
from rollout_corr.api.correct import Renormalized
from rollout_corr.api.suggestion import Sequences, suggested
from rollout_corr.api.suggestion import Suggestion as Suggestion
from rollout_corr.backends.layouts import LogProbs
from rollout_corr.backends.read import Given, read_batch
from rollout_corr.spec.validate import number


@mask_by_keyword
def suggest(
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    mask: LogProbs | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    keep: float = 0.95,
    log_mass: LogProbs | None = None,
    renormalized: Renormalized = "rollout",
) -> Suggestion:
    """Suggest bounds of rejection that keep a given share of the sequences of a healthy batch.

    The mean of D over a sequence of n tokens scatters around -KL with the standard deviation of D over sqrt(n), so that
    a bound has to know the mismatch and the lengths. The bounds keep that share by this rule and of this very batch.
    Inputs are those of `correct`. Values are read on the host, so call it now and then and not in every step.

    Args:
        train_logp: Log-probs under the trainer's policy, in any layout that `correct` takes.
        rollout_logp: Log-probs under the engine that sampled the tokens, same layout.
        mask: Non-zero is valid, same layout. None: every token is valid.
        cu_seqlens: [S + 1] int32 or int64 offsets of packed log-probs.
        keep: The share of the sequences to keep, between 0 and 1.
        log_mass: The log of the probability mass that truncated sampling kept, as for `correct`.
        renormalized: As for `correct`.

    Returns:
        A `Suggestion`: print it, and pass its `spec` to `correct`.

    Raises:
        ValueError: A wrong shape, dtype, device or value, named; or no valid token with finite log-probs.
        TypeError: An argument of the wrong type.
    """
    keep = number("keep", keep)
    if not 0.0 < keep < 1.0:
        raise ValueError(f"keep: expected a number between 0 and 1, got {keep!r}")
    given = Given(train_logp, rollout_logp, mask, cu_seqlens, log_mass=log_mass, renormalized=renormalized)
    found = Sequences.of(read_batch(given))
    if not found.n.numel():
        raise ValueError("mask: expected a valid token with finite log-probs, got none")
    return suggested(found, keep)

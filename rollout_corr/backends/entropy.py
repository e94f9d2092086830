"""The entropy of tokens, which the caller brings: read, and measured."""

from __future__ import annotations

from torch import Tensor

from rollout_corr.backends import whole
from rollout_corr.backends.batch import LOGP_DTYPES, Batch, Reader, checked_tensor, external_names
from rollout_corr.metrics.extra import Extra, entropy_of
from rollout_corr.metrics.statistics import Statistics
from rollout_corr.spec.correction import Spec
from rollout_corr.spec.criterion import ENTROPY


def read_entropy(read: Reader, entropy: object) -> Tensor:
    """Check the entropy of a call, and give it in the shape of the batch with its history."""
    first = read.first
    like = first if first.dim() == len(read.shape) else first.view(read.shape)
    return checked_tensor("entropy", read.layout.open("entropy", entropy), LOGP_DTYPES, like, read.leader).reshape(
        first.shape
    )


def add_entropy(batch: Batch, entropy: Tensor | None, spec: Spec) -> None:
    """Let a correction measure the entropy of tokens and test it; refuse none where a criterion does.

    Args:
        batch: Gets it.
        entropy: As `read_entropy` gives it; None: the call brings none.
        spec: The Spec.
    """
    if entropy is None:
        raise ValueError(
            "entropy: expected the entropy of each token for a criterion with stat='entropy', as the head that gives "
            "log-probs returns it, got None"
        )
    batch.entropy = entropy.detach()
    if ENTROPY in external_names(spec):
        batch.external[ENTROPY] = batch.entropy


def statistics_of_entropy(entropy: Tensor, batch: Batch, beside: Statistics | None = None) -> Statistics:
    """Append the statistics of entropy to others, or make statistics of them alone.

    Args:
        entropy: Per token, in the shape of the batch, detached.
        batch: Tells which tokens are valid.
        beside: Statistics of a correction; None: there are none.
    """
    _, valid = whole.sequences_of(batch)
    sums, maxima = entropy_of(entropy.to(batch.dtype), valid)
    if beside is None:
        return Statistics(None, sums, maxima, extra=Extra(entropy=True))
    return beside.beside(Extra(entropy=True), sums, maxima)

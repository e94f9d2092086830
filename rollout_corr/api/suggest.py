"""`suggest`: bounds of rejection that keep a healthy batch, from its lengths and its mismatch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_corr.api.correct import Renormalized, correct
from rollout_corr.backends.batch import Batch, read_batch
from rollout_corr.backends.layouts import LogProbs
from rollout_corr.metrics.limits import BY_KEY, NEAR_CLAMP
from rollout_corr.spec.correction import Criterion, Spec
from rollout_corr.spec.validate import number

# The bound of a veto: where to start, and the lowest, below which a token is broken and no bound should keep it.
VETO, LOWEST_VETO = 1e-4, 1e-6
# Identical log-probs would give bounds of exactly 1, which the next batch fails.
NARROWEST = 1e-4


@dataclass(frozen=True, repr=False)
class Suggestion:
    """Bounds that keep most of a batch. It prints as sentences.

    Attributes:
        geometric: Rejects sequences by the geometric mean of their ratios.
        product: Rejects sequences by the product of their ratios; None where no bound on it means anything.
        veto: Rejects sequences with one token of a tiny ratio.
        rejected: The share of these sequences that each of them rejects, by its label.
        sentences: Each bound, why, and what it rejects.
    """

    geometric: Criterion
    product: Criterion | None
    veto: Criterion
    rejected: dict[str, float]
    sentences: tuple[str, ...]

    @property
    def spec(self) -> Spec:
        """The geometric criterion and the veto; add a weight with `Spec(weight=..., criteria=found.spec.criteria)`."""
        return Spec(criteria=(self.geometric, self.veto))

    def __repr__(self) -> str:
        """Give the sentences, one a line."""
        return "\n".join(self.sentences)


@dataclass(frozen=True)
class _Sequences:
    """Sequences with a valid, finite token: their tokens, sum, sum of squares and least D, [S] float64 each."""

    n: Tensor
    d: Tensor
    d2: Tensor
    least: Tensor

    @staticmethod
    def of(batch: Batch) -> _Sequences:
        train, rollout = batch.train.double(), batch.rollout.double()
        if batch.mass is not None:
            train, rollout = batch.mass.each(Tensor.double).taken_from(train, rollout)
        d = (train - rollout).cpu()
        valid = d.isfinite()
        if batch.mask is not None:
            valid &= batch.mask.cpu() != 0
        if batch.offsets is None:
            owner = torch.arange(batch.count)[:, None].expand(d.shape)
        else:
            offsets = batch.offsets.cpu().long()
            owner = torch.bucketize(torch.arange(d.shape[0]), offsets[1:], right=True)
            valid[: int(offsets[0])] = False
            valid[int(offsets[-1]) :] = False
        d, owner = d[valid], owner[valid]
        least = d.new_full((batch.count,), math.inf).scatter_reduce(0, owner, d, "amin")
        n, total, squares = (torch.bincount(owner, x, minlength=batch.count) for x in (torch.ones_like(d), d, d * d))
        return _Sequences(n, total, squares, least).where(n > 0)

    def where(self, chosen: Tensor) -> _Sequences:
        """Some of the sequences."""
        return _Sequences(self.n[chosen], self.d[chosen], self.d2[chosen], self.least[chosen])


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
    tensors = train_logp, rollout_logp, mask
    found = _Sequences.of(read_batch(*tensors, cu_seqlens, Spec(), None, None, False, log_mass, renormalized))
    count = found.n.shape[0]
    if not count:
        raise ValueError("mask: expected a valid token with finite log-probs, got none")
    allowed = math.floor((1.0 - keep) * count + 1e-9)

    lower = _veto(found.least, allowed // 2)
    left = found.where(found.least >= math.log(lower))
    allowed -= count - left.n.shape[0]
    tokens = left.n.sum().clamp(min=1)
    kl = float(-left.d.sum() / tokens)
    std = math.sqrt(max(0.0, float(left.d2.sum() / tokens) - kl * kl))

    means = _bound(left.d / left.n, -kl, std / left.n.sqrt(), allowed, keep)
    sums = _bound(left.d, -kl * left.n, std * left.n.sqrt(), allowed, keep)
    geometric, veto = (
        _around_one("mean", means, "geometric"),
        Criterion("ratio", "sequence", "min", lower, label="veto"),
    )
    tried = [geometric, veto]
    product = None
    if sums <= NEAR_CLAMP * Spec().clamp:
        product = _around_one("sum", sums, "product")
        tried.append(product)

    dry = Spec(criteria=tuple(tried), apply=False)
    metrics = correct(*tensors, cu_seqlens=cu_seqlens, spec=dry, log_mass=log_mass, renormalized=renormalized).metrics()
    rejected = {c.label: metrics[f"{c.label}/rejected_sequences_fraction"] for c in tried}

    def says(criterion: Criterion, reason: str) -> str:
        low, high = criterion.lower, criterion.upper
        bounds = f"no token's ratio below {low:g}" if high is None else f"{low:.5g} to {high:.5g}"
        return (
            f"{criterion.label}: {bounds}. {reason}. Rejects {100 * rejected[criterion.label]:.1f} % of these sequences"
        )

    short, long = (int(x) for x in found.n.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64)))
    sentences = [
        f"{count} sequences, most of {short} to {long} tokens; k3 {metrics['kl_k3']:.2g}; D of a token is {-kl:.2g} "
        f"on average, with a standard deviation of {std:.2g}",
        says(
            geometric,
            f"The mean D of a sequence scatters by {std:.2g} / sqrt(length), {std / math.sqrt(max(short, 1)):.2g} for "
            f"{short} tokens",
        ),
        says(veto, "The trainer finds no token of a healthy sequence that much less likely than the engine did"),
    ]
    if product is None:
        sentences.append(
            f"product: none. To keep {100 * keep:g} % it would have to accept products up to e^{sums:.0f}: these "
            "sequences are too long for products"
        )
    else:
        sentences.append(says(product, f"The sum of D scatters by {std:.2g} * sqrt(length)"))
    limit = BY_KEY["kl_k3"]
    if limit.crossed(metrics["kl_k3"]):
        sentences.append(f"k3 is far above {limit.healthy:g}: these bounds keep what is broken; {limit.hint}")
    return Suggestion(geometric, product, veto, rejected, tuple(sentences))


def _veto(least: Tensor, allowed: int) -> float:
    """The highest power of ten, between the bounds, below which at most `allowed` sequences have a token."""
    lower = VETO
    while lower > 1.5 * LOWEST_VETO and int((least < math.log(lower)).sum()) > allowed:
        lower /= 10.0
    return float(f"{lower:.0e}")


def _bound(values: Tensor, centre: Tensor | float, spread: Tensor, allowed: int, keep: float) -> float:
    """The bound of |x| that keeps enough of normal x, and all but `allowed` of the values, [S] float64."""
    size = values.abs().sort(descending=True).values
    measured = float(size[max(allowed, 0)]) if max(allowed, 0) < size.shape[0] else 0.0
    if not size.shape[0]:
        return NARROWEST

    def kept(bound: float) -> float:
        above, below = ((side * bound - centre) / spread.clamp(min=1e-300) for side in (1.0, -1.0))
        return float((torch.special.ndtr(above) - torch.special.ndtr(below)).mean())

    return max(NARROWEST, measured, _least(kept, keep))


def _least(kept: Callable[[float], float], keep: float) -> float:
    """The least bound that keeps a share, by bisection."""
    low, high = 0.0, 1.0
    while kept(high) < keep and high < 1e6:
        high *= 2.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if kept(middle) >= keep else (middle, high)
    return high


def _around_one(reduce: str, log_bound: float, label: str) -> Criterion:
    """Keep ratios from 1 / u to u, where u - 1 has two digits and is rounded up, so that a tie is kept."""
    excess = math.expm1(min(log_bound, 30.0)) * (1.0 + 1e-6)
    digit = 10.0 ** (math.floor(math.log10(excess)) - 1)
    upper = float(f"{1.0 + math.ceil(excess / digit) * digit:.10g}")
    return Criterion(
        "ratio", "sequence", "mean" if reduce == "mean" else "sum", lower=1.0 / upper, upper=upper, label=label
    )

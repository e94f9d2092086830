"""`suggest`: bounds of rejection that keep a healthy batch, from its lengths and its mismatch."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from ..backends.batch import OpenBatch
from ..backends.given import Batch, batch_given
from ..backends.layouts import LogProbs
from ..backends.read import Given, read_batch
from ..metrics.limits import BY_KEY
from ..specs.checked import known_keywords
from ..specs.correction import Criterion, Spec
from ..specs.validate import number


@known_keywords
def suggest(
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    batch: Batch | None = None,
    *,
    mask: LogProbs | None = None,
    cu_seqlens: Tensor | None = None,
    keep: float = 0.99,
) -> Suggestion:
    """Suggest bounds of rejection that keep a given share of the sequences of a healthy batch.

    The mean of D over a sequence of n tokens scatters around -KL with the standard deviation of D over sqrt(n), so that
    a bound must fit the mismatch and the lengths. The bounds keep that share of this batch, and by this rule,
    with some room, of batches like it.
    Values are read on the host, so call it now and then and not in every step.

    Args:
        train_logp: Log-probs under the trainer's policy, in any layout that `correct` takes.
        rollout_logp: Log-probs under the engine that sampled the tokens, same layout.
        batch: Mask, offsets and the kept mass; whatever else it holds is not read.
        mask: Short for `Batch(mask=...)`: non-zero is valid, same layout. None: every token is valid.
        cu_seqlens: The offsets of packed sequences, short for `Batch(cu_seqlens=...)`: [S + 1] int32 or int64.
        keep: The share of the sequences to keep, between 0 and 1.

    Returns:
        A `Suggestion`: print it, and pass its `spec` to `correct`.

    Raises:
        ValueError: A wrong shape, dtype, device or value, named; or no valid token with finite log-probs.
        TypeError: An argument of the wrong type.
    """
    keep = number("keep", keep)
    if not 0.0 < keep < 1.0:
        raise ValueError(f"keep: expected a number between 0 and 1, got {keep!r}")
    of = batch_given(batch, mask, cu_seqlens)
    read_here = Batch(mask=of.mask, cu_seqlens=of.cu_seqlens, kept_mass=of.kept_mass, validate=of.validate)
    found = Sequences.of(read_batch(Given(train_logp, rollout_logp, read_here)))
    if not found.n.numel():
        raise ValueError("mask: expected a valid token with finite log-probs, got none")
    return suggested(found, keep)


# D beyond this is cut in k3, as a Spec does.
CLAMP = Spec().clamp
# The bound of a veto: where to start, and the lowest, below which a token is broken and no bound should keep it.
VETO, LOWEST_VETO = 1e-4, 1e-6
# The spread of all sequences counts as so many tokens of each.
PRIOR = 3.0
# Bounds are made for less than may be rejected, because the next batch has other lengths and longer tails: less by this
# share of the sequences, but not below this part.
LESS, PART = 0.0075, 0.25
# A bound of products beyond this factor rejects nothing that the veto would not.
LARGEST_PRODUCT = 10.0
# Identical log-probs would give bounds of exactly 1, which the next batch fails.
NARROWEST = 1e-4


@dataclass(frozen=True, repr=False)
class Suggestion:
    """Bounds that keep most of a batch. It prints as sentences.

    Attributes:
        geometric: Rejects sequences by the geometric mean of their ratios.
        product: Rejects sequences by the product of their ratios; None where its bound would lie beyond a factor of 10.
        veto: Rejects sequences with one token of a tiny ratio.
        rejected: The share of these sequences that each of them rejects, by its label.
        sentences: Each bound, why, and what it rejects.
    """

    geometric: Criterion
    product: Criterion | None
    veto: Criterion
    rejected: dict[str, float]
    sentences: tuple[str, ...]

    def to_paste(self, framework: str) -> str:
        """Write the geometric criterion and the veto as lines of a framework's configuration (YAML).

        Args:
            framework: A name that `Spec.to_config` takes.

        Returns:
            The lines; what the framework cannot say is a comment with the reason.

        Raises:
            ValueError: An unknown framework, or one whose configuration cannot be written.
        """
        # By name, because the core imports no framework.
        module = import_module(f"{__name__.partition('.')[0]}.frameworks.shared.nearest")
        return str(module.pasted(self.geometric, self.veto, framework))

    @property
    def spec(self) -> Spec:
        """The geometric criterion and the veto; add a weight with `Spec(weight=..., criteria=found.spec.criteria)`."""
        return Spec(criteria=(self.geometric, self.veto))

    def __repr__(self) -> str:
        """Return the sentences, each on lines of its own, folded at the width of the terminal."""
        width = shutil.get_terminal_size().columns
        fold = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
        return "\n".join(map(fold, self.sentences))


@dataclass(frozen=True)
class Sequences:
    """Sequences with a valid, finite token: their tokens, and of D the sum, squares, the least, the sum of k3."""

    n: Tensor
    d: Tensor
    d2: Tensor
    least: Tensor
    k3: Tensor

    @staticmethod
    def of(batch: OpenBatch) -> Sequences:
        train, rollout = batch.train.double(), batch.rollout.double()
        if batch.mass is not None:
            train, rollout = batch.mass.each(Tensor.double).taken_from(train, rollout)
        d = (train - rollout).cpu()
        valid = d.isfinite()
        if batch.mask is not None:
            valid &= batch.mask.cpu() != 0
        if batch.offsets is None:
            owner = torch.arange(batch.count, device="cpu")[:, None].expand(d.shape)
        else:
            offsets = batch.offsets.cpu().long()
            owner = torch.bucketize(torch.arange(d.shape[0], device="cpu"), offsets[1:], right=True)
            valid[: int(offsets[0])] = False
            valid[int(offsets[-1]) :] = False
        d, owner = d[valid], owner[valid]
        return Sequences.by_owner(d, owner, batch.count)

    @staticmethod
    def by_owner(d: Tensor, owner: Tensor, count: int) -> Sequences:
        """Sum up the finite D of valid tokens, [M] float64, by their sequences, [M] int64 below `count`."""
        least = d.new_full((count,), math.inf).scatter_reduce(0, owner, d, "amin")
        bounded = d.clamp(-CLAMP, CLAMP)
        # exp(D) - 1 - D cancels where D is small; its series does not.
        k3 = torch.where(d.abs() < 1e-3, d * d * (0.5 + d / 6.0), bounded.expm1() - bounded)
        n, total, squares, thirds = (
            torch.bincount(owner, x, minlength=count) for x in (torch.ones_like(d), d, d * d, k3)
        )
        return Sequences(n, total, squares, least, thirds).where(n > 0)

    @staticmethod
    def joined(parts: Iterable[Sequences]) -> Sequences:
        """Join the sequences of several batches."""
        names = [field.name for field in fields(Sequences)]
        held = list(parts)
        return Sequences(*(torch.cat([getattr(part, name) for part in held]) for name in names))

    def where(self, chosen: Tensor) -> Sequences:
        """Some of the sequences."""
        return Sequences(*(getattr(self, field.name)[chosen] for field in fields(self)))


def suggested(found: Sequences, keep: float, diagnosed: bool = False) -> Suggestion:
    """Suggest bounds that keep a share of these sequences, at least one; `diagnosed`: doctor's verdict stands above."""
    count = found.n.shape[0]
    allowed = math.floor((1.0 - keep) * count + 1e-9)

    lower = _veto(found.least, allowed // 2)
    left = found.where(found.least >= math.log(lower))
    allowed -= count - left.n.shape[0]
    tokens = left.n.sum().clamp(min=1)
    kl = float(-left.d.sum() / tokens)
    std = math.sqrt(max(0.0, float(left.d2.sum() / tokens) - kl * kl))

    # A sequence's own spread where it has the tokens to tell, as sequences differ in it.
    own = ((left.d2 + PRIOR * std * std) / (left.n + PRIOR)).sqrt()
    means = _bound(left.d / left.n, -kl, own / left.n.sqrt(), allowed, keep)
    sums = _bound(left.d, -kl * left.n, own * left.n.sqrt(), allowed, keep)
    geometric, veto = (
        _around_one("mean", means, "geometric"),
        Criterion("ratio", "sequence", "min", lower, label="veto"),
    )
    tried = [geometric, veto]
    product = None
    if sums <= math.log(LARGEST_PRODUCT):
        product = _around_one("sum", sums, "product")
        tried.append(product)

    values = {"mean": found.d / found.n, "sum": found.d, "min": found.least}
    rejected = {c.label: _outside(values[str(c.reduce)], c) for c in tried}
    k3 = float(found.k3.sum() / found.n.sum())

    def says(criterion: Criterion, reason: str) -> str:
        low, high = criterion.low, criterion.high
        bounds = f"no token's ratio below {low:g}" if high is None else f"{low:.5g} to {high:.5g}"
        return (
            f"{criterion.label}: {bounds}. {reason}. Rejects {100 * rejected[criterion.label]:.1f} % of these sequences"
        )

    why = "In a healthy sequence no token's probability drops that far"
    if lower < VETO:
        share = 100 * float((found.least < math.log(VETO)).double().mean())
        why = f"{VETO:g} would reject {share:.1f} %, more than half of what may go: look at those tokens first"
    short, long = (int(x) for x in found.n.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64, device="cpu")))
    sentences = [
        f"{count} sequences of {short} to {long} tokens (10th to 90th percentile); k3 {k3:.2g}; D of a token is "
        f"{-kl:.2g} on average, with a standard deviation of {std:.2g}",
        says(
            geometric,
            f"The mean D of a sequence scatters by {std:.2g} / sqrt(length), {std / math.sqrt(max(short, 1)):.2g} for "
            f"{short} tokens",
        ),
        says(veto, why),
    ]
    if product is None:
        factor = f"{math.exp(sums):,.0f}" if sums < 14.0 else f"e^{sums:.0f}"
        sentences.append(
            f"product: none. It would have to accept products from 1/{factor} to {factor}: these sequences are too "
            "long for products"
        )
    else:
        sentences.append(says(product, f"The sum of D scatters by {std:.2g} * sqrt(length)"))
    limit = BY_KEY["kl_rollout_train_k3"]
    if limit.state(k3) != "healthy" and not diagnosed:
        sentences.insert(
            0,
            f"Find out why they differ first: k3 is {k3:.2g} (healthy: {limit.range}), and `rollout-corr doctor` or "
            "rc.doctor names the cause. Bounds fitted to broken data would let the bug through",
        )
    return Suggestion(geometric, product, veto, rejected, tuple(sentences))


def _outside(values: Tensor, criterion: Criterion) -> float:
    """The share of log-ratios, [S] float64, outside of a criterion's bounds."""
    lower = -math.inf if criterion.low is None else math.log(criterion.low)
    upper = math.inf if criterion.high is None else math.log(criterion.high)
    return float(((values < lower) | (values > upper)).double().mean())


def _veto(least: Tensor, allowed: int) -> float:
    """The highest power of ten, between the bounds, below which at most `allowed` sequences have a token."""
    lower = VETO
    while lower > 1.5 * LOWEST_VETO and int((least < math.log(lower)).sum()) > allowed:
        lower /= 10.0
    return float(f"{lower:.0e}")


def _bound(values: Tensor, center: Tensor | float, spread: Tensor, allowed: int, keep: float) -> float:
    """The bound of |x| that keeps enough of normal x, and all but `allowed` of the values, [S] float64."""
    size = values.abs().sort(descending=True).values
    measured = float(size[max(allowed, 0)]) if max(allowed, 0) < size.shape[0] else 0.0
    if not size.shape[0]:
        return NARROWEST

    def kept(bound: float) -> float:
        above, below = ((side * bound - center) / spread.clamp(min=1e-300) for side in (1.0, -1.0))
        return float((torch.special.ndtr(above) - torch.special.ndtr(below)).mean())

    return max(NARROWEST, measured, _least(kept, 1.0 - max(PART * (1.0 - keep), 1.0 - keep - LESS)))


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

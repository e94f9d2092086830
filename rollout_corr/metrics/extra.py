"""Statistics that the Spec does not ask for: of a call's other inputs, and of what runs after the backends.

Labels, the means of self-normalized weights, ages, entropy, and the bounds that the batch decided. They are taken in
plain torch on the batch's device and stand behind the Spec's, so they merge as those do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..definition.sequences import Sequences
from ..definition.tokens import select
from ..specs.bounds_of_batch import WEIGHT
from ..specs.correction import Spec
from .formulas import Values, maximum, mean, minimum, plain, std
from .labels import LabelSet, count_outside, outside_of
from .limits import healthy
from .rows import EACH, Metric, Over, both_ends
from .sums import OfBatch

VALID = Over("valid tokens", "tokens")

# fmt: off
AGE_METRICS = [
    Metric("age_mean", "mean age, versions.current - version of the token", "versions", VALID, "-", mean("age")),
    Metric("age_max", "max age", "versions", VALID, "-", maximum("age")),
    Metric("age_min", "min age; below 0 a version is newer than versions.current", "versions", VALID, ">= 0",
           minimum("age")),
    Metric("tokens_stale_fraction", "valid tokens whose age is above 0", "fraction", VALID, "-", mean("tokens_stale")),
    Metric("tokens_newer", "valid tokens whose version is above versions.current", "tokens", EACH, "0",
           plain("tokens_newer")),
]

FINITE = Over("valid tokens with a finite entropy", "entropy_tokens")
PAIRED = Over("valid tokens with a finite entropy and train_logp", "entropy_gap_tokens")
ENTROPY_METRICS = [
    Metric("entropy_mean", "mean of the entropy given", "nats", FINITE, "not falling to 0", mean("entropy")),
    Metric("entropy_max", "max of it", "nats", FINITE, "-", maximum("entropy")),
    Metric("entropy_min", "min of it", "nats", FINITE, ">= 0", minimum("entropy")),
    Metric("tokens_entropy_nonfinite", "valid tokens whose entropy is NaN or infinite", "tokens", EACH, "0",
           plain("entropy_nonfinite")),
    Metric("entropy_gap_mean",
           "mean of entropy + train_logp, as given: 0 where the tokens were sampled from that policy", "nats", PAIRED,
           "near 0", mean("entropy_gap")),
    Metric("entropy_gap_std", "population standard deviation of it", "nats", PAIRED, "-", std("entropy_gap")),
]
# Where a correction has measured the KL.
ENTROPY_METRICS_OF_D = [
    Metric("kl_rollout_train_k3_over_entropy",
           "kl_rollout_train_k3 / entropy_mean: mismatch relative to how open the policy is", "fraction", FINITE,
           healthy("kl_rollout_train_k3"),
           "('k3' / 'tokens_measured') / ('entropy' / n)"),
]
DIVIDED = Over("sequences divided by a mean", "sequences_divided")
DIVISOR_METRICS = [
    Metric("sequence_weight_divisor_max",
           "the largest mean that weights were divided by (`normalize` group or sequence)", "ratio", DIVIDED,
           "near 1", maximum("divisor")),
    Metric("sequence_weight_divisor_min", "the smallest such mean", "ratio", DIVIDED, "near 1", minimum("divisor")),
    Metric("sequences_undivided", "non-empty sequences whose weights were left, their mean being <= 1e-8", "sequences",
           EACH, "0", plain("sequences_undivided")),
]
# fmt: on


def _name(place: tuple[str, str]) -> str:
    return "/".join(place)


def bound_metrics(label: str, side: str, log: bool) -> list[Metric]:
    """The metrics of a criterion's or WEIGHT's bound that the batch decides; `log`: it is the log of a ratio."""
    name = _name((label, side))
    over = Over("calls", f"{name}/calls")

    largest, smallest = (f"exp({end(name)})" if log else end(name) for end in (maximum, minimum))
    words = f"{side} bound that a call's batch decided, infinite where it needed none"
    return [
        Metric(f"{name}_max", f"largest {words}", "its own", over, "-", largest),
        Metric(f"{name}_min", f"smallest {words}", "its own", over, "-", smallest),
    ]


def bounds_of(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Take the sums, [K], and the maxima, [2 K], of bounds from the smallest and the largest of each, [2, K]."""
    return torch.ones_like(ends[0]), torch.stack([ends[1], -ends[0]], 1).reshape(-1)


class Part(NamedTuple):
    """Statistics that one argument brings, or one step, and their metrics."""

    when: Callable[[Extra], bool]  # tells from an `Extra` if they are there
    sums: tuple[str, ...]  # names of the sums
    end: str  # name of the maximum and of the minimum
    metrics: list[Metric]


ENTROPY_SUMS = (
    *("entropy", "entropy_tokens", "entropy_nonfinite"),
    *("entropy_gap", "entropy_gap2", "entropy_gap_tokens"),
    # Over sequences, of the sum e of the gap over n tokens: e^2, n e and n^2.
    *("entropy_gap_squares", "entropy_gap_cross", "entropy_gap_lengths"),
)
# In the order of the fields of Extra, which is that in which they are appended.
PARTS = (
    Part(lambda extra: extra.divisors, ("sequences_divided", "sequences_undivided"), "divisor", DIVISOR_METRICS),
    Part(lambda extra: extra.entropy, ENTROPY_SUMS, "entropy", ENTROPY_METRICS),
    Part(lambda extra: extra.ages, ("age", "tokens_stale", "tokens_newer"), "age", AGE_METRICS),
)


class Extra(NamedTuple):
    """Statistics that belong neither to the Spec nor to the loss."""

    labels: tuple[LabelSet, ...] = ()  # of sequences; all of these are statistics of whole sequences
    divisors: bool = False  # the means that self-normalized weights were divided by, of whole sequences too
    entropy: bool = False
    ages: bool = False
    bounds: tuple[tuple[str, str], ...] = ()  # that the batch decides

    def sums(self) -> tuple[str, ...]:
        """Names of the sums besides those of labels, in order."""
        names = [name for part in PARTS if part.when(self) for name in part.sums]
        return (*names, *(f"{name}/calls" for name in map(_name, self.bounds)))

    def maxima(self) -> tuple[str, ...]:
        """Names of the maxima besides those of labels, in order."""
        ends = *(part.end for part in PARTS if part.when(self)), *map(_name, self.bounds)
        return tuple(name for end in ends for name in both_ends(end))

    def rows(self, spec: Spec | None) -> list[Metric]:
        """The rows of the metrics of the whole batch."""
        rows = []
        for labels in self.labels:
            key, words = outside_of(labels), f"{labels.units} whose id names no label"
            rows.append(Metric(key, words, labels.units, EACH, "0", plain(count_outside(labels))))
        rows += [row for part in PARTS if part.when(self) for row in part.metrics]
        if spec is not None:
            rows += ENTROPY_METRICS_OF_D if self.entropy else []
            logs = {WEIGHT, *(criterion.label for criterion in spec.criteria if criterion.statistic.log_space)}
            for label, side in self.bounds:
                rows += bound_metrics(label, side, label in logs)
        return rows

    def followed_by(self, other: Extra) -> Extra:
        """Join what is in these statistics and in others that stand behind them."""
        return Extra(
            self.labels + other.labels,
            self.divisors or other.divisors,
            self.entropy or other.entropy,
            self.ages or other.ages,
            self.bounds + other.bounds,
        )

    def warnings(self, values: Values) -> list[str]:
        """Say in plain words what is wrong with the labels and the ages."""
        sentences = []
        for labels in self.labels:
            if outside := values[count_outside(labels)]:
                sentences.append(
                    f"{outside:.0f} {labels.units} have an id of {labels.name!r} without a label (ids are 0 to "
                    f"{len(labels.values) - 1}) and count under no label"
                )
        newer = values["tokens_newer"] if self.ages else 0.0
        if not newer:
            return sentences
        tokens, most = "1 valid token was" if newer == 1 else f"{newer:.0f} valid tokens were", values["-min_age"]
        sentences.append(
            f"{tokens} sampled by a newer version than versions.current, by up to {most:g}: the counter of the trainer "
            "may be read before it moves on, or the two sides count from other starts; such an age is negative in "
            "metrics and criteria, and no weight grows with it"
        )
        return sentences

    def named(self, name: object) -> LabelSet:
        """Find labels by their name."""
        for labels in self.labels:
            if labels.name == name:
                return labels
        held = [labels.name for labels in self.labels]
        raise ValueError(f"by: expected one of {held} (the labels of the Batch), got {name!r}")


# --- taking them: the sums, [K] float64, and the maxima, [2] float64 ---


def _numbers(sums: list[Tensor], x: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums, and the ends of the chosen x."""
    return torch.stack([total.double() for total in sums]), torch.stack(OfBatch(x).ends(x, counted)).double()


def ages_of(ages: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Take the statistics of ages, per token; `valid` is bool per token, None: all are."""
    counted = select(valid, ages)
    beyond = [torch.count_nonzero(side) for side in (counted > 0, counted < 0)]
    return _numbers([counted.sum(dtype=torch.float64), *beyond], ages, valid)


def divisors_of(mean: Tensor, divides: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Take the statistics of the means that weights were divided by, [S] float64, of each sequence or its group.

    `divides`: it was divided by it. `counts`: the sequence has a weight in a mean.
    """
    divided = divides & counts
    return _numbers([divided.sum(), (counts & ~divides).sum()], mean, divided)


def entropy_of(
    entropy: Tensor, train_logp: Tensor, sequences: Sequences, valid: Tensor | None, first: bool
) -> tuple[Tensor, Tensor]:
    """Take the statistics of entropies, per token; `valid` is bool per token, None: all are.

    Of the ranks that share sequences only the `first` adds what is of whole sequences.
    """
    finite = entropy.isfinite()
    counted, broken = (finite, ~finite) if valid is None else (finite & valid, ~finite & valid)
    counts = [torch.count_nonzero(which) for which in (counted, broken)]
    paired = counted & train_logp.isfinite()
    gap = select(paired, entropy + train_logp).double()
    n, e = sequences.sum_integers(paired).double(), sequences.sum(gap)
    of_gap = gap.sum(), gap.square().sum(), torch.count_nonzero(paired)
    of_sequences = [x.sum() if first else x.new_zeros(()) for x in (e * e, n * e, n * n)]
    of_tokens = select(counted, entropy).sum(dtype=torch.float64), *counts
    return _numbers([*of_tokens, *of_gap, *of_sequences], entropy, counted)

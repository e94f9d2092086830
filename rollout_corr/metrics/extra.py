"""Statistics beyond those of the Spec, for what a call brings besides log-probs and for what follows the backends.

Labels, the means of self-normalised weights, ages, entropy, and the bounds that the batch decided. They are taken in
plain torch on the batch's device and stand behind the Spec's, so they merge as those do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.metrics.labels import Labels, count_outside, outside_of
from rollout_corr.metrics.rows import Formula, Metric, Over, Values, exp, maximum, mean, minimum, plain, ratio_of
from rollout_corr.spec.bounds_of_batch import WEIGHT
from rollout_corr.spec.correction import Spec

AGE_SUMS = ("age", "tokens_stale", "tokens_newer")
AGE_MAXIMA = ("max_age", "-min_age")
ENTROPY_SUMS = ("entropy", "entropy_tokens", "entropy_nonfinite")
ENTROPY_MAXIMA = ("max_entropy", "-min_entropy")
DIVISOR_SUMS = ("sequences_divided", "sequences_undivided")
DIVISOR_MAXIMA = ("max_divisor", "-min_divisor")
EACH = Over("-", None)
VALID = Over("valid tokens", "tokens")

# fmt: off
AGE_METRICS = [
    Metric("age_mean", "mean age, current_version - version of the token", "versions", VALID, "-", mean("age")),
    Metric("age_max", "max age", "versions", VALID, "-", maximum("age")),
    Metric("age_min", "min age; below 0 a version is newer than current_version", "versions", VALID, ">= 0",
           minimum("age")),
    Metric("stale_fraction", "valid tokens whose age is above 0", "fraction", VALID, "-", mean("tokens_stale")),
    Metric("tokens_newer", "valid tokens whose version is above current_version", "tokens", EACH, "0",
           plain("tokens_newer")),
]

FINITE = Over("valid tokens with a finite entropy", "entropy_tokens")
ENTROPY_METRICS = [
    Metric("entropy_mean", "mean of the entropy given", "nats", FINITE, "not falling to 0", mean("entropy")),
    Metric("entropy_max", "max of it", "nats", FINITE, "-", maximum("entropy")),
    Metric("entropy_min", "min of it", "nats", FINITE, ">= 0", minimum("entropy")),
    Metric("entropy_nonfinite", "valid tokens whose entropy is NaN or infinite", "tokens", EACH, "0",
           plain("entropy_nonfinite")),
]
# Where a correction has measured the KL.
ENTROPY_METRICS_OF_D = [
    Metric("kl_k3_over_entropy", "kl_k3 / entropy_mean: mismatch beside how open the policy is", "fraction", FINITE,
           "< 0.01", lambda v, n: ratio_of(ratio_of(v["k3"], v["tokens_measured"]), ratio_of(v["entropy"], n))),
]
DIVIDED = Over("sequences divided by a mean", "sequences_divided")
DIVISOR_METRICS = [
    Metric("weight_divisor_max", "the largest mean that weights were divided by (`normalize` group or sequence)",
           "ratio", DIVIDED, "near 1", maximum("divisor")),
    Metric("weight_divisor_min", "the smallest such mean", "ratio", DIVIDED, "near 1", minimum("divisor")),
    Metric("sequences_undivided", "non-empty sequences whose weights were left, their mean being <= 1e-8", "sequences",
           EACH, "0", plain("sequences_undivided")),
]
# fmt: on


CALLS = "calls"


def _name(place: tuple[str, str]) -> str:
    return "/".join(place)


def bound_metrics(label: str, side: str, log: bool) -> list[Metric]:
    """The metrics of a bound that the batch decides.

    Args:
        label: Of the criterion, or WEIGHT.
        side: "lower" or "upper".
        log: The bound is held as the log of a ratio.
    """
    name = _name((label, side))
    over = Over(CALLS, f"{name}/calls")

    def read(end: Callable[[str], Formula]) -> Formula:
        value = end(name)
        return (lambda v, n: exp(value(v, n)) if n else 0.0) if log else value

    words = f"{side} bound that a call's batch decided, infinite where it needed none"
    return [
        Metric(f"{name}_max", f"largest {words}", "its own", over, "-", read(maximum)),
        Metric(f"{name}_min", f"smallest {words}", "its own", over, "-", read(minimum)),
    ]


def bounds_of(found: Tensor) -> tuple[Tensor, Tensor]:
    """Take the sums, [K] float64, and the maxima, [2 K] float64, of `Extra.bounds`.

    Args:
        found: [2, K] float64, the smallest and the largest of each, which differ where groups decide.
    """
    return torch.ones_like(found[0]), torch.stack([found[1], -found[0]], 1).reshape(-1)


class Part(NamedTuple):
    """Statistics that one argument brings, or one step, and their metrics."""

    sums: tuple[str, ...]
    maxima: tuple[str, ...]
    metrics: list[Metric]


# In the order of the fields of Extra, which is that in which they are appended.
PARTS = (
    Part(DIVISOR_SUMS, DIVISOR_MAXIMA, DIVISOR_METRICS),
    Part(ENTROPY_SUMS, ENTROPY_MAXIMA, ENTROPY_METRICS),
    Part(AGE_SUMS, AGE_MAXIMA, AGE_METRICS),
)


class Extra(NamedTuple):
    """Statistics besides those of the Spec and of the loss.

    Attributes:
        labels: Labels of sequences; all of these are statistics of whole sequences.
        divisors: The means that self-normalised weights were divided by, of whole sequences too.
        entropy: Entropies of tokens.
        ages: Ages of tokens.
        bounds: The bounds that the batch decides, by the labels of criteria and their sides.
    """

    labels: tuple[Labels, ...] = ()
    divisors: bool = False
    entropy: bool = False
    ages: bool = False
    bounds: tuple[tuple[str, str], ...] = ()

    def _parts(self) -> list[Part]:
        """The parts besides labels that are there, in order."""
        there = self.divisors, self.entropy, self.ages
        return [part for part, is_there in zip(PARTS, there, strict=True) if is_there]

    def sums(self) -> tuple[str, ...]:
        """Names of the sums besides those of labels, in order."""
        found = [name for part in self._parts() for name in part.sums]
        return (*found, *(f"{name}/calls" for name in map(_name, self.bounds)))

    def maxima(self) -> tuple[str, ...]:
        """Names of the maxima besides those of labels, in order."""
        found = [name for part in self._parts() for name in part.maxima]
        return (*found, *(f"{end}{name}" for name in map(_name, self.bounds) for end in ("max_", "-min_")))

    def rows(self, spec: Spec | None) -> list[Metric]:
        """The rows of the metrics of the whole batch."""
        rows = [
            Metric(
                outside_of(one), f"{one.units} whose id names no label", one.units, EACH, "0", plain(count_outside(one))
            )
            for one in self.labels
        ]
        rows += [row for part in self._parts() for row in part.metrics]
        if spec is not None:
            rows += ENTROPY_METRICS_OF_D if self.entropy else []
            logs = {WEIGHT, *(criterion.label for criterion in spec.criteria if criterion.statistic.log_space)}
            for label, side in self.bounds:
                rows += bound_metrics(label, side, label in logs)
        return rows

    def read(self, values: Values, spec: Spec | None) -> dict[str, float]:
        """Compute what is reported of the whole batch, from statistics by name."""
        return {row.key: row.read(values) for row in self.rows(spec)}

    def beside(self, other: Extra) -> Extra:
        """Join what is in these statistics and in others that stand behind them."""
        return Extra(
            self.labels + other.labels,
            self.divisors or other.divisors,
            self.entropy or other.entropy,
            self.ages or other.ages,
            self.bounds + other.bounds,
        )

    def warnings(self, values: Values) -> list[str]:
        """Say in plain words what is wrong with the ages."""
        newer = values["tokens_newer"] if self.ages else 0.0
        if not newer:
            return []
        tokens, most = "1 valid token was" if newer == 1 else f"{newer:.0f} valid tokens were", values["-min_age"]
        return [
            f"{tokens} sampled by a newer version than current_version, by up to {most:g}: the counter of the trainer "
            "may be read before it moves on, or the two sides count from other starts; such an age is negative in "
            "metrics and criteria, and no weight grows with it"
        ]

    def named(self, name: object) -> Labels:
        """Find labels by their name."""
        for one in self.labels:
            if one.name == name:
                return one
        held = [one.name for one in self.labels]
        raise ValueError(f"by: expected one of {held} (`labels` and `label_names` of the call), got {name!r}")


def ages_of(ages: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Take the sums, [3] float64, and the maxima, [2] float64, of AGE_SUMS and AGE_MAXIMA.

    Args:
        ages: Per token.
        valid: Bool per token; None: all are.
    """
    counted = ages if valid is None else torch.where(valid, ages, 0.0)
    beyond = [torch.count_nonzero(side).double() for side in (counted > 0, counted < 0)]
    sums = [counted.sum(dtype=torch.float64), *beyond]
    if not ages.numel():
        return torch.stack(sums), torch.full((2,), -torch.inf, dtype=torch.float64, device=ages.device)
    among = [ages, -ages] if valid is None else [torch.where(valid, x, -torch.inf) for x in (ages, -ages)]
    return torch.stack(sums), torch.stack([x.amax() for x in among]).double()


def divisors_of(mean: Tensor, divides: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Take the sums, [2] float64, and the maxima, [2] float64, of DIVISOR_SUMS and DIVISOR_MAXIMA.

    Args:
        mean: [S] float64, of each sequence or of its group.
        divides: [S] bool, where it was divided by.
        counts: [S] bool, where the sequence has a weight in a mean.
    """
    among = divides & counts
    sums = torch.stack([among.sum(), (counts & ~divides).sum()]).double()
    if not mean.numel():
        return sums, torch.full((2,), -torch.inf, dtype=torch.float64, device=mean.device)
    return sums, torch.stack([torch.where(among, x, -torch.inf).amax() for x in (mean, -mean)])


def entropy_of(entropy: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Take the sums, [3] float64, and the maxima, [2] float64, of ENTROPY_SUMS and ENTROPY_MAXIMA.

    Args:
        entropy: Per token.
        valid: Bool per token; None: all are.
    """
    finite = entropy.isfinite()
    among = finite if valid is None else finite & valid
    broken = ~finite if valid is None else ~finite & valid
    total = torch.where(among, entropy, 0.0).sum(dtype=torch.float64)
    sums = torch.stack([total, torch.count_nonzero(among).double(), torch.count_nonzero(broken).double()])
    if not entropy.numel():
        return sums, torch.full((2,), -torch.inf, dtype=torch.float64, device=entropy.device)
    return sums, torch.stack([torch.where(among, x, -torch.inf).amax() for x in (entropy, -entropy)]).double()

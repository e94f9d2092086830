"""Statistics beyond those of the Spec, for what a call brings besides log-probs: labels, ages of tokens.

They are taken in plain torch on the batch's device and stand behind the Spec's, so they merge as those do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_corr.metrics import labels
from rollout_corr.metrics.labels import Labels
from rollout_corr.metrics.rows import Metric, Over, Values, maximum, mean, minimum
from rollout_corr.spec.correction import Spec

AGE_SUMS = ("age", "tokens_stale")
AGE_MAXIMA = ("max_age", "-min_age")
VALID = Over("valid tokens", "tokens")

# fmt: off
AGE_METRICS = [
    Metric("age_mean", "mean age, current_version - version of the token", "versions", VALID, "-", mean("age")),
    Metric("age_max", "max age", "versions", VALID, "-", maximum("age")),
    Metric("age_min", "min age; below 0 a version is newer than current_version", "versions", VALID, ">= 0",
           minimum("age")),
    Metric("stale_fraction", "valid tokens whose age is above 0", "fraction", VALID, "-", mean("tokens_stale")),
]
# fmt: on


@dataclass(frozen=True)
class Extra:
    """What statistics hold besides those of the Spec and of the loss.

    Attributes:
        labels: Labels of sequences; all of these are statistics of whole sequences.
        ages: Ages of tokens.
    """

    labels: tuple[Labels, ...] = ()
    ages: bool = False

    def sums(self, spec: Spec) -> tuple[str, ...]:
        """Names of the sums, in order."""
        found = [name for one in self.labels for name in labels.sums_of(one, spec)]
        return (*found, *AGE_SUMS) if self.ages else tuple(found)

    def maxima(self, spec: Spec) -> tuple[str, ...]:
        """Names of the maxima, in order."""
        found = [name for one in self.labels for name in labels.maxima_of(one, spec)]
        return (*found, *AGE_MAXIMA) if self.ages else tuple(found)

    def read(self, values: Values) -> dict[str, float]:
        """Compute what is reported of the whole batch, from statistics by name."""
        outside = {f"{one.name}/outside/sequences": values[one.outside] for one in self.labels}
        return outside | {row.key: row.read(values) for row in AGE_METRICS if self.ages}

    def by(self, name: object, spec: Spec, values: Values) -> dict[str, float]:
        """Compute the metrics by label."""
        for one in self.labels:
            if one.name == name:
                return labels.read(one, spec, values)
        raise ValueError(f"by: expected one of {[one.name for one in self.labels]} (labels of the call), got {name!r}")


def ages_of(ages: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Take the sums, [2] float64, and the maxima, [2] float64, of AGE_SUMS and AGE_MAXIMA.

    Args:
        ages: Per token.
        valid: Bool per token; None: all are.
    """
    counted = ages if valid is None else torch.where(valid, ages, 0.0)
    sums = [counted.sum(dtype=torch.float64), torch.count_nonzero(counted > 0).double()]
    if not ages.numel():
        return torch.stack(sums), torch.full((2,), -torch.inf, dtype=torch.float64, device=ages.device)
    among = [ages, -ages] if valid is None else [torch.where(valid, x, -torch.inf) for x in (ages, -ages)]
    return torch.stack(sums), torch.stack([x.amax() for x in among]).double()

"""The five numbers that a report begins with, each beside its healthy range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from rollout_corr.diagnose.measure.measurement import UPPER
from rollout_corr.metrics.limits import BY_KEY, State, ratio_room

# Metrics with a limit, and what a reader calls them. The mean ratio has its place among them.
NAMES = {
    "kl_rollout_train_k3": "KL of a token (k3), nats",
    "logratio_abs_mean": "mean |D|, nats",
    "logratio_abs_max": "largest |D|, nats",
    "ratio_mean": "mean ratio exp(D)",
    "token/weight_ess": f"effective sample, token weights <= {UPPER:g}",
}
WORDS: dict[State | Literal["none"], str] = {
    "good": "healthy",
    "warning": "watch",
    "error": "alarm",
    "none": "not measured",
}


class Tile(NamedTuple):
    """A number beside its healthy range.

    Attributes:
        key: The metric.
        name: Its name in words.
        value: The number, formatted.
        healthy: Its healthy range.
        state: Where it lies; "none" where nothing was measured.
    """

    key: str
    name: str
    value: str
    healthy: str
    state: State | Literal["none"]

    @property
    def range(self) -> str:
        """Its healthy range, to stand behind the word for its state."""
        return self.healthy if self.state == "good" else f"(healthy: {self.healthy})"


def ratio_room_of(metrics: Mapping[str, float]) -> float:
    """Return how far the mean ratio of a dump may lie from 1."""
    return ratio_room(metrics["ratio_std"], metrics["tokens"] - metrics["tokens_nonfinite"])


def tiles(metrics: Mapping[str, float]) -> list[Tile]:
    """Return the five numbers, from the metrics of a measurement."""
    measured = metrics["tokens"] > metrics["tokens_nonfinite"]
    found = []
    for key, name in NAMES.items():
        value = metrics[key]
        state: State
        if key == "ratio_mean":
            room = ratio_room_of(metrics)
            healthy, state = f"1 +- {room:.2g}", "good" if abs(value - 1.0) <= room else "error"
        else:
            limit = BY_KEY[key.rpartition("/")[2]]
            healthy, state = limit.range_of(limit.healthy), limit.state(value)
        if measured:
            near_one = key == "ratio_mean" and value < 100.0
            found.append(Tile(key, name, f"{value:.3f}" if near_one else f"{value:.3g}", healthy, state))
        else:
            found.append(Tile(key, name, "-", healthy, "none"))
    return found

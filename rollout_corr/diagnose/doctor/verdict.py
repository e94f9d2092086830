"""A cause that was recognised, and what all signatures share."""

from __future__ import annotations

from dataclasses import dataclass

# What is surely a bug; what deserves a look and fails a gate; what is worth knowing.
SEVERITIES = ("error", "warning", "note")

# k3 of a healthy engine stays below this (docs/metrics.md), and |sum D| of a sequence below this many nats.
HEALTHY_K3, HEALTHY_SUM = 0.01, 2.0

# Groups of tokens that differ by more than this at equal probability do so for a reason; a smaller |D| matters to none.
TIMES, MATTERS = 2.0, 5e-3


@dataclass(frozen=True)
class Verdict:
    """A cause that was recognised.

    Attributes:
        name: Short, for gates.
        severity: One of `SEVERITIES`.
        title: What it is.
        evidence: The numbers that it rests on.
        advice: What to do.
        strength: How much of the dump shows it, 0 to 1; verdicts of one severity are ranked by it.
    """

    name: str
    severity: str
    title: str
    evidence: tuple[str, ...]
    advice: str
    strength: float


def percent(share: float) -> str:
    """A fraction as text."""
    return f"{100 * share:.3g} %"

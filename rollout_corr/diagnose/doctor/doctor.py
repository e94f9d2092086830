"""Naming the cause: signatures of bugs that look like mismatch, ranked, with what they rest on and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout_corr.diagnose.doctor import wrong_policies, wrong_values
from rollout_corr.diagnose.doctor.verdict import SEVERITIES, Verdict
from rollout_corr.diagnose.measure.measuring import Measured

Signature = Callable[[Measured, dict[str, float]], Verdict | None]

SIGNATURES: tuple[Signature, ...] = (
    wrong_values.not_log_probs,
    wrong_values.nonfinite,
    wrong_values.filled,
    wrong_values.shifted,
    wrong_values.swapped,
    wrong_values.wrong_weights,
    wrong_values.turn_starts,
    wrong_values.sequence_starts,
    wrong_policies.renormalised,
    wrong_policies.temperature,
    wrong_policies.stale,
    wrong_policies.drift,
    wrong_policies.positions,
    wrong_policies.engine_alone,
    wrong_policies.not_the_sampler,
    wrong_policies.different_policies,
    wrong_values.copied,
    wrong_values.bfloat16,
    wrong_policies.long_products,
)

_OF_D = (
    *("renormalised", "temperature", "turn_starts", "sequence_starts", "positions", "different_policies"),
    *("long_products", "not_the_sampler"),
)
# What a cause brings with it, and is no cause beside it; a cause stands before what it hides in SIGNATURES.
HIDES: dict[str, Sequence[str]] = {
    "not_log_probs": (*_OF_D, "wrong_weights", "shifted", "swapped", "filled"),
    "filled": (*_OF_D, "wrong_weights"),
    "shifted": (*_OF_D, "wrong_weights", "swapped"),
    "swapped": (*_OF_D, "wrong_weights"),
    "wrong_weights": _OF_D,
    "turn_starts": (
        "not_the_sampler",
        "different_policies",
        "long_products",
        "temperature",
        "renormalised",
        "positions",
    ),
    "sequence_starts": ("not_the_sampler", "different_policies", "long_products", "temperature", "renormalised"),
    "renormalised": ("not_the_sampler", "temperature", "different_policies", "long_products"),
    "temperature": ("not_the_sampler", "different_policies", "long_products"),
    "stale": ("different_policies", "long_products"),
    "drift": ("different_policies", "long_products"),
    "positions": ("different_policies", "long_products"),
    "engine_alone": ("different_policies",),
    "not_the_sampler": ("different_policies", "long_products"),
}


def diagnose(measured: Measured, on_policy: bool = False) -> list[Verdict]:
    """All causes that are recognised, the gravest first; an empty list says healthy.

    Args:
        measured: What was measured.
        on_policy: `new_logp` and `train_logp` come from the same weights, so they ought to be equal.
    """
    metrics = measured.metrics()
    found: list[Verdict] = []
    hidden: set[str] = set()
    for signature in SIGNATURES:
        verdict = signature(measured, metrics)
        if verdict is not None and verdict.name not in hidden:
            found.append(verdict)
            hidden.update(HIDES.get(verdict.name, ()))
    if on_policy and (verdict := wrong_policies.trainer_disagrees(measured)) is not None:
        found.append(verdict)
    return sorted(found, key=lambda verdict: (SEVERITIES.index(verdict.severity), -verdict.strength))


def with_verdicts(metrics: dict[str, float], verdicts: Sequence[Verdict], problems: int) -> dict[str, float]:
    """What a condition may name: the metrics, every cause as 0 or 1, and how many there are."""
    names = [signature.__name__ for signature in SIGNATURES] + ["trainer_disagrees"]
    values = metrics | {name: float(any(verdict.name == name for verdict in verdicts)) for name in names}
    grave = sum(verdict.severity != "note" for verdict in verdicts)
    return values | {"verdicts": float(grave), "problems": float(problems)}

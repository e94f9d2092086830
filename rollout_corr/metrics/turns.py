"""The statistics and metrics of turns, rows as in aggregates.py and native.py; only where a Spec measures turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..definition.bounds import above, below
from ..definition.facts import TurnFacts
from ..definition.tokens import Number
from ..definition.turns import FIRST, LAST, MIDDLE
from ..specs.correction import Spec
from .formulas import mean, plain
from .rows import EACH, TURNS, Aggregate, Metric, Over, When, always, both_ends, total

PLACES = {"first": FIRST, "middle": MIDDLE, "last": LAST}

NONEMPTY = Over("non-empty turns", "turns")


def _weighed(spec: Spec) -> bool:
    return spec.weighs_turns


def _each(fact: str, squared: bool = False, place: int | None = None) -> Callable[[Any], Tensor]:
    """The value of a fact of each turn: its square, or 0 where the turn has another place."""

    def each(s: Any) -> Tensor:
        facts: TurnFacts = s.turns
        x: Tensor = getattr(facts, fact)
        x = x * x if squared else x
        return x if place is None else (facts.place == place) * x

    return each


def _of_place(name: str, place: int) -> list[Aggregate]:
    facts = {"tokens": "measured", "d": "d", "abs_d": "abs_d", "k3": "k3"}
    return [total(f"turn_{name}_{end}", "measured turns", _each(fact, place=place)) for end, fact in facts.items()]


def _chi2(s: Any) -> Tensor:
    d: Tensor = s.turns.d.clamp(-s.spec.clamp, s.spec.clamp)
    return (2.0 * d).expm1()


def _weight(name: str, fact: str, around_one: str) -> list[Aggregate]:
    """Sums over turns, of a weight, of its squares, and of those around 1."""
    return [
        total(f"turn_{name}", "measured turns", _each(fact), _weighed),
        total(f"turn_{name}2", "measured turns", _each(fact, squared=True), _weighed),
        total(f"turn_{name}_around_one2", "measured turns", _each(around_one, squared=True), _weighed),
    ]


def _ends(name: str, x: Callable[[TurnFacts], Tensor], when: When = always) -> Aggregate:
    """The maximum and the minimum over measured turns."""

    def of_all(s: Any) -> tuple[Number, ...]:
        return s.by.ends(x(s.turns), s.turns_measured)

    return Aggregate((), both_ends(name), "measured turns", when, of_all=of_all)


AGGREGATES: list[Aggregate] = [
    total("turns", "turns", lambda s: s.turns.tokens > 0),
    total("turns_measured", "turns", lambda s: s.turns_measured),
    total("turns_kept", "turns", lambda s: s.turns.keep & (s.turns.tokens > 0)),
    total("chi2_turn", "measured turns", _chi2),
    total("abs_sum_d_turn", "measured turns", lambda s: s.turns.d.abs()),
    _ends("turn_sum_d", lambda turns: turns.d),
    *(row for name, place in PLACES.items() for row in _of_place(name, place)),
    *_weight("raw", "ratio", "excess"),
    *_weight("weight", "weight", "weight_excess"),
    total("turns_above", "measured turns", lambda s: above(s.turns.log_weight, s.bounds.high), _weighed),
    total("turns_below", "measured turns", lambda s: below(s.turns.log_weight, s.bounds.low), _weighed),
    _ends("turn_raw", lambda turns: turns.ratio, _weighed),
    _ends("turn_weight", lambda turns: turns.weight, _weighed),
]


PLACES_IN_WORDS = {"first": "first", "middle": "neither first nor last", "last": "last, but not first"}


def _metrics_of_place(name: str, words: str) -> list[Metric]:
    tokens = Over(f"measured tokens of turns that are {words} in their sequence", f"turn_{name}_tokens")
    at, token = f"turn_{name}", f"{name}_turn_token"
    return [
        Metric(f"{token}_kl_rollout_train_k1", "mean -D", "nats", tokens, "near 0",
               f"(0.0 - '{at}_d') / n"),
        Metric(f"{token}_logratio_abs_mean", "mean |D|", "nats", tokens, "like logratio_abs_mean", mean(f"{at}_abs_d")),
        Metric(f"{token}_kl_rollout_train_k3", "mean e^D - 1 - D, D clamped", "nats", tokens,
               "like kl_rollout_train_k3", mean(f"{at}_k3")),
    ]  # fmt: skip


# fmt: off
METRICS = [
    Metric("turns", "turns with a valid token", "turns", EACH, "-", plain("turns")),
    Metric("turns_kept", "measured turns that no criterion over turns or on their sequence rejected whole", "turns",
           EACH, "-", plain("turns_kept")),
    Metric("turns_kept_fraction", "turns_kept / turns", "fraction", NONEMPTY, "> 0.5", mean("turns_kept")),
    Metric("turn_chi2_train_rollout", "mean e^(2 clamp(sum D of a turn)) - 1", "ratio", TURNS, "< 1",
           mean("chi2_turn")),
    Metric("turn_logratio_abs_mean", "mean |sum D of a turn|", "nats", TURNS, "< clamp / 2", mean("abs_sum_d_turn")),
    Metric("turn_logratio_abs_max", "max |sum D of a turn|", "nats", TURNS, "< clamp",
           "larger('max_turn_sum_d', '-min_turn_sum_d') + 0.0"),
    *(row for name, words in PLACES_IN_WORDS.items() for row in _metrics_of_place(name, words)),
]
# fmt: on

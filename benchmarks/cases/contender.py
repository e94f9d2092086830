"""Contenders: their names in tables, and the form in which they give their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

OURS = "rollout-corr"
VERL_METRICS = "rollout-corr, verl's metrics"
EAGER = "our reference"
BY_HAND = "torch by hand"
COMPILED = "torch by hand, torch.compile"
VERL = "verl"
ORDER = (OURS, VERL_METRICS, EAGER, BY_HAND, COMPILED, VERL)
# Computed by our definition, so masks must be equal to the bit.
OWN = (EAGER,)


class Outcome(NamedTuple):
    """Results of one call; None for what it does not compute."""

    weights: Tensor | None = None
    mask: Tensor | None = None
    value: Tensor | None = None
    gradient: Tensor | None = None
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Contender:
    """An implementation bound to a batch and an operation.

    Args:
        name: An entry of ORDER.
        on_device: The call without metrics on the host; its result is freed unread. None when absent.
        whole: The call with all results, metrics as floats. None when absent.
        note: Why it is absent, or what is different about it.
        slow: Its first call takes tens of seconds.
        capturable: It may be put into a CUDA graph, provided that the host does not wait in it.
    """

    name: str
    on_device: Callable[[], object] | None
    whole: Callable[[], Outcome] | None
    note: str = ""
    slow: bool = False
    capturable: bool = True


def absent(name: str, why: str) -> Contender:
    """Return a contender that cannot run, and why."""
    return Contender(name, None, None, f"absent: {why}")

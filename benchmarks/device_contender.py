"""A contender of the device benchmark: what it is called, what it does, and what its call gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from benchmarks.contenders import BY_HAND, COMPILED, OURS, VERL

EAGER = "our reference"
TRACED = "our reference, torch.compile"
XTUNER = "xtuner, restated"
XTUNER_ONCE = "xtuner, restated, lengths read once"
SKYRL = "SkyRL, restated"
TRL = "TRL"
TRL_RESTATED = "TRL, restated"
ORDER = (OURS, COMPILED, EAGER, TRACED, BY_HAND, VERL, XTUNER, XTUNER_ONCE, SKYRL, TRL, TRL_RESTATED)


class Outcome(NamedTuple):
    """What a call gives, in the batch's shape; None for what it does not give."""

    weights: Tensor | None = None
    mask: Tensor | None = None
    value: Tensor | None = None
    gradient: Tensor | None = None
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Contender:
    """Somebody to time.

    Args:
        name: One of ORDER.
        on_device: The call without metrics on the host. What it returns is held and freed, nobody looks at it. None
            when absent.
        whole: The call with everything that it gives, metrics as floats.
        note: Why it is absent, or what is different about it.
        slow: Its first call takes tens of seconds.
        capturable: It may be put into a CUDA graph, if it turns out that the host does not wait in it.
    """

    name: str
    on_device: Callable[[], object] | None
    whole: Callable[[], Outcome] | None
    note: str = ""
    slow: bool = False
    capturable: bool = True


def absent(name: str, why: str) -> Contender:
    return Contender(name, None, None, f"absent: {why}")

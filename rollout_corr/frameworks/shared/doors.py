"""How a framework calls a file that `rollout_corr.eject` writes: its names, its layout, its function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...specs.choices import Scheme
from ...specs.correction import Spec


class Within(NamedTuple):
    """The parts from which a door writes the public function of a file."""

    spec: Spec
    # The expression that runs the backend, given "train", "rollout", "mask" and, packed, "offsets": it has what the
    # door gives, and then numbers, where there are metrics.
    call: str
    metrics: str  # the expression of the metrics
    extra: tuple[str, ...]  # the names of further tensors that the Spec reads; of a loss those of all that it reads
    check: list[str]  # the lines that choose the backend and refuse what it cannot run
    fused: bool  # a call chooses between plain torch and Triton kernels


class Door(NamedTuple):
    """A framework's function for a file, of packed or padded sequences."""

    layout: str
    names: dict[str, str]  # what the framework calls train_logp, rollout_logp and mask
    metrics: Scheme | None  # the scheme of its metrics' names; None: native ones
    imports: tuple[str, ...]  # lines of imports besides torch's
    public: Callable[[Within], str]  # writes the function
    function: str
    # Calls it in the file's test on `batch`, a dict of tensors by the file's own names, as weights, mask, verdicts of
    # sequences or None, and metrics.
    tried: str
    width: int = 100  # the longest line that its formatter allows
    # What its function reads of weights, mask and keep, in this order.
    gives: tuple[str, ...] = ("weights", "mask", "keep")


def function_for(settings: Mapping[str, object], public: str, within: Within, mask: str, **parts: str) -> str:
    """Write SETTINGS, which the file is for, and a function with these parts; `mask` is the framework's name of it."""
    table = "\n".join(["SETTINGS = {", *(f'    "{name}": {value!r},' for name, value in settings.items()), "}"])
    parts["backend"] = '\n    backend: str = "eager",' if within.fused else ""
    parts["check"] = "".join(f"    {line}\n" for line in within.check)
    parts["call"] = within.call.format(train="train", rollout="rollout", mask=mask)
    return table.replace("'", '"') + "\n\n\n" + public.format(metrics=within.metrics, **parts)

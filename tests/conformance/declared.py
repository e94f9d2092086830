"""Differences from the frameworks that the documentation states, each with where it may appear and how it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conformance.batches import Batch

# Where a difference may be stated: differences.md here, and docs/.
PAGES = (Path(__file__).with_name("differences.md"), *(Path(__file__).resolve().parents[2] / "docs").glob("*.md"))

Shown = Callable[[Any, Any, Batch], bool]


@cache
def words_of(page: Path) -> str:
    """Read a page on one line."""
    return " ".join(page.read_text(encoding="utf-8").split())


@dataclass(frozen=True)
class Declared:
    """A difference that the documentation states.

    Attributes:
        name: A few words for the table.
        says: Words of a page; a test looks for them.
        when: Tells of a batch and settings whether the difference can appear there.
        keys: The results that may differ; none named: each of them.
        shows: Tells of the framework's value of such a result (None: it has none), ours and the batch whether they
            differ as the page says.
    """

    name: str
    says: str
    when: Callable[[Batch, dict[str, Any]], bool]
    keys: tuple[str, ...] = ()
    shows: Shown = lambda theirs, ours, given: True

    def explains(self, key: str, given: Batch, settings: dict[str, Any], theirs: Any, ours: Any) -> bool:
        """Tell whether this is why a result differs."""
        if (self.keys and key not in self.keys) or not self.when(given, settings):
            return False
        # What is declared of a bad value holds for the rows that have one.
        return self.shows(theirs, ours, given) and (self.when is not NONFINITE or in_clean_rows(theirs, ours, given))

    def is_documented(self) -> bool:
        """Tell whether a page has the words."""
        return any(self.says in words_of(page) for page in PAGES)


def among(*kinds: str) -> Callable[[Batch, dict[str, Any]], bool]:
    """Make the condition that a batch is of some kinds."""
    return lambda given, settings: given.kind in kinds


def beyond(clamp: float, first: str, second: str, sums: bool = False) -> Callable[[Batch, dict[str, Any]], bool]:
    """Make the condition that the log-ratio of two policies at a token, or of a sequence, lies beyond a clamp."""

    def when(given: Batch, settings: dict[str, Any]) -> bool:
        d = (getattr(given, first).detach() - getattr(given, second)).double().where(given.mask, 0.0)
        return bool((d.abs() > clamp).any() or (sums and (d.sum(1).abs() > clamp).any()))

    return when


def no_number(theirs: Any, ours: Any, given: Batch) -> bool:
    """Tell whether the framework has no number where ours differs: it raised, or it returned NaN or infinity."""
    if not isinstance(theirs, (float, Tensor)) or not isinstance(ours, (float, Tensor)):
        return theirs is None or ours is None
    a, b = torch.as_tensor(theirs).double(), torch.as_tensor(ours).double()
    return bool((~a.isfinite() | torch.isclose(a, b, rtol=1e-4, atol=1e-9)).all())


def where_ours_trains(theirs: Any, ours: Any, given: Batch) -> bool:
    """Tell whether a gradient differs only at tokens that have none here; a loss may differ."""
    if not isinstance(theirs, Tensor):
        return True
    at = ours != 0
    return torch.allclose(ours[at].double(), theirs[at].double(), rtol=1e-4, atol=1e-9)


def in_clean_rows(theirs: Any, ours: Any, given: Batch) -> bool:
    """Tell whether rows without a bad value agree: masks and weights as they are, gradients but for one divisor."""
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor) or theirs.shape != given.mask.shape:
        return True
    # Where bad values stand behind the mask, a row that has any is not clean: sums over rows multiply them by 0.
    excused = ~given.mask if given.kind != "nan_behind_mask" else torch.zeros_like(given.mask)
    clean = torch.stack([x.isfinite() | excused for x in (given.new, given.old, given.rollout, given.ref)])
    a, b = (x.double()[clean.all(0).all(1)] for x in (theirs, ours))
    at = a.isfinite() & b.isfinite()
    if not theirs.is_floating_point():
        return bool((a == b).all())
    a, b = a[at], b[at]
    by = (a * b).sum() / (b * b).sum().clamp(min=1e-300)
    scale = a.abs().max().item() if a.numel() else 0.0
    return any(torch.allclose(a, c * b, rtol=1e-4, atol=1e-5 * scale) for c in (1.0, by))


NONFINITE = among("infinite", "nan_in_front")
BF16 = Declared("subtract in bf16", "subtract in bf16", among("bf16"))
PROPAGATES = Declared("non-finite log-probs go on into the loss there", "let the NaN through into the loss", NONFINITE)
# What verl, SkyRL and xtuner do.
REJECTS = Declared(
    "a non-finite token rejects its sequence here",
    "Most frameworks let the NaN through into the loss (verl's weights, xtuner, SkyRL",
    NONFINITE,
)
# What verl and SkyRL do.
LEFT_OUT = Declared(
    "a token that is not finite is left out here",
    "NaN or infinity at a valid token; with a sum over rows at a masked one too (verl, SkyRL)",
    among("infinite", "nan_in_front", "nan_behind_mask"),
    shows=in_clean_rows,
)
FAR = (
    beyond(20.0, "new", "ref"),
    *(beyond(20.0, *pair, sums=True) for pair in (("old", "rollout"), ("new", "rollout"), ("new", "old"))),
)
CLAMP = Declared(
    "exponents beyond +-20",
    "the exponent is then clamped to +-20",
    lambda given, settings: any(far(given, settings) for far in FAR),
)


NO_LOWER_CLAMP = Declared(
    "GSPO without a lower clamp",
    "it does not clamp the log-ratio from below; this package clamps it at -10",
    lambda given, settings: bool(
        ((given.new - given.old).where(given.mask, 0.0).sum(1) < -10 * given.mask.sum(1)).any()
    ),
)

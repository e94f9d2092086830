"""Ages: the number of policy versions between the sampling of a token and its training."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING

import torch

from ..specs.operands import LARGEST_VERSION, ReadVersions
from ..specs.validate import shown, wrong_type
from .batch import INTEGERS, Reader

if TYPE_CHECKING:
    from .given import Versions


def read_versions(read: Reader, versions: Versions | None) -> ReadVersions:
    """Read versions, without which a Spec that reads ages is refused."""
    if versions is None:
        raise ValueError(
            "versions: expected rc.Versions(ids, current), because the Spec reads the age of tokens, got None"
        )
    current = versions.current
    if isinstance(current, bool) or not isinstance(current, Integral):
        raise wrong_type("versions.current", "a whole number", current)
    # Not int(): a compiled function would be compiled anew for every version.
    # The age of the oldest filler still fits.
    if not -LARGEST_VERSION < versions.current < LARGEST_VERSION:
        raise ValueError(f"versions.current: expected a number between -2^62 and 2^62, got {shown(current)}")
    nothing = isinstance(versions.ids, list) and not versions.ids
    # A list of no samples is opened in the dtype of log-probs.
    dtypes = (*INTEGERS, torch.float32) if nothing else INTEGERS
    ids, per_sequence = read.per_token_or_sequence("versions", versions.ids, dtypes)
    return ReadVersions(ids, per_sequence, versions.current)

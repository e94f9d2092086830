"""Ages: the number of policy versions between the sampling of a token and its training."""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from ..definition.sequences import Packed
from ..specs.validate import shown
from .batch import INTEGERS, Reader
from .layouts import LogProbs

LARGEST_VERSION = 2**62


class Versions(NamedTuple):
    """The versions of the policies that sampled, and the version that trains. A token's age is the difference.

    Attributes:
        ids: The version of the policy that sampled each token (same layout as the log-probs) or sequence ([S] or
            [S, 1]), any integer dtype.
        current: The version of the policy that trains.
    """

    ids: LogProbs
    current: int


def read_ages(read: Reader, versions: Versions | None, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Read versions, and give the age of every token in the shape of the batch; True if they are per sequence.

    Ages are of the dtype that computes; float32 holds them up to 2^24.
    """
    if versions is None:
        raise ValueError(
            "versions: expected rc.Versions(ids, current), because the Spec reads the age of tokens, got None"
        )
    found, per_sequence = read_versions(read, versions)
    return per_token(read, ages_of(found, versions).to(dtype), per_sequence), per_sequence


def read_versions(read: Reader, versions: Versions) -> tuple[Tensor, bool]:
    """Read versions, and whether they are per sequence, [S]."""
    current = versions.current
    if isinstance(current, bool) or not isinstance(current, Integral):
        raise TypeError(f"versions.current: expected a whole number, got {type(current).__name__} {shown(current)}")
    # Not int(): a compiled function would be compiled anew for every version.
    if not -LARGEST_VERSION <= versions.current <= LARGEST_VERSION:
        raise ValueError(f"versions.current: expected a number within +-2^62, got {shown(current)}")
    nothing = isinstance(versions.ids, list) and not versions.ids
    # A list of no samples is opened in the dtype of log-probs.
    dtypes = (*INTEGERS, torch.float32) if nothing else INTEGERS
    return read.per_token_or_sequence("versions", versions.ids, dtypes)


def ages_of(found: Tensor, versions: Versions) -> Tensor:
    """int64: current - version; a filler at the end of int64 must not wrap around to the other sign."""
    ages: Tensor = versions.current - found.long().clamp(-LARGEST_VERSION, LARGEST_VERSION)
    return ages


def per_token(read: Reader, x: Tensor, per_sequence: bool) -> Tensor:
    """Give every token the value of its sequence, where x is [S]; slots in no sequence get any sequence's."""
    if not per_sequence:
        return x
    if read.offsets is None:
        return x[:, None].expand(read.first.shape)
    offsets = read.offsets.to(x.device, torch.int64)
    return Packed(offsets, read.first.shape[0]).spread(x)

"""Comparing what the ranks of a group claim, in one collective whose size depends on nothing that is compared."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollout_corr.metrics import collectives

# A rank that raised claims this alone.
RAISED = "raised"

# Differences that a message lists before it counts the rest.
LISTED = 4


def compare(name: str, group: Any, claims: Mapping[str, str]) -> None:
    """Raise on every rank of a group if one of them claims anything else than the others.

    One all-reduce of two numbers a rank, and a read on the host; where they differ, one more, of the claims in full.

    Args:
        name: What the error begins with.
        group: A torch.distributed process group; None for the default one.
        claims: What has to be equal, as text by name.
    """
    package = sys.modules[__name__.partition(".")[0]]
    words = json.dumps({**claims, "rollout_corr": package.__version__, "torch": torch.__version__}).encode()
    digest = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big", signed=True)
    own = torch.tensor([digest, len(words)], dtype=torch.int64, device="cpu")
    told = _every(own, group, f"{name}: the digests of the calls")
    if bool((told == told[0]).all()):
        return
    lengths = told[:, 1].tolist()
    padded = torch.tensor(list(words.ljust(max(lengths))), dtype=torch.uint8, device="cpu")
    texts = _every(padded, group, f"{name}: the calls in words")
    every = [json.loads(bytes(row[:length].tolist())) for row, length in zip(texts, lengths, strict=True)]
    raise ValueError(f"{name}: {difference(every, collectives.ranks_of(group))}")


def difference(every: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> str:
    """Say in words which ranks claim what else than the others.

    Args:
        every: The claims of each rank.
        ranks: The ranks' numbers.
    """
    raised = [(rank, claims[RAISED]) for rank, claims in zip(ranks, every, strict=True) if RAISED in claims]
    if raised:
        return "; ".join(f"rank {rank} raised {error}" for rank, error in raised[:LISTED])
    found = []
    for key in dict.fromkeys(key for claims in every for key in claims):
        values = [claims.get(key) for claims in every]
        if None in values or len(set(values)) == 1:
            # A part of what one of them does not have at all, which is named itself.
            continue
        (usual, _), *_ = Counter(values).most_common()
        others = [rank for rank, value in zip(ranks, values, strict=True) if value == usual]
        unusual = [f"{value} on rank {rank}" for rank, value in zip(ranks, values, strict=True) if value != usual]
        rest = f" and other values on {len(unusual) - LISTED} more" if len(unusual) > LISTED else ""
        found.append(f"{key} {', '.join(unusual[:LISTED])}{rest} against {usual} on {collectives.named(others)}")
    more = f", and {len(found) - LISTED} further differences" if len(found) > LISTED else ""
    return f"expected the same call on every rank, got {'; '.join(found[:LISTED]) or 'calls of other versions'}{more}"


def _every(own: Tensor, group: Any, what: str) -> Tensor:
    """[ranks, ...] on the CPU: every rank's tensor, over a device that the group carries, whatever the batch is on."""
    devices = collectives.devices_of(group)
    every = own.new_zeros(dist.get_world_size(group), *own.shape, device="cpu" if "cpu" in devices else devices[0])
    every[dist.get_rank(group)] = own.to(every.device)
    return collectives.all_reduce(every, group, what).cpu()

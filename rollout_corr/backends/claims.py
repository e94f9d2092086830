"""Calls as ranks compare them with validate=True: each part as text by name, before anything else is exchanged."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from torch import Tensor

from rollout_corr.backends.batch import Batch
from rollout_corr.backends.choose import Groups
from rollout_corr.backends.layouts import dtype_of
from rollout_corr.metrics import agreement, collectives


class Claims(NamedTuple):
    """The parts of a call that have to be equal.

    Attributes:
        call: On all ranks.
        sequences: On ranks that share sequences.
    """

    call: dict[str, str]
    sequences: dict[str, str]


def claims_of(call: str, batch: Batch, tensors: dict[str, Tensor | None], fixed: dict[str, str]) -> Claims:
    """The claims of a call; reads advantages that are given per sequence.

    Args:
        call: Its name.
        batch: The batch, with its advantages.
        tensors: Those whose dtypes have to be equal, by name; None for one that was not given.
        fixed: Everything else that has to be equal, as text by name.
    """
    dtypes = {name: "None" if x is None else dtype_of(x) for name, x in tensors.items()}
    sequences = {"sequences": str(batch.count), "layout": "rows" if batch.offsets is None else "packed"}
    if batch.turns is not None:
        sequences["turns"] = str(batch.turns.shape[0] - 1)
    advantages = "None"
    if batch.advantages is not None:
        advantages = "per sequence" if batch.per_sequence else "per token"
        if batch.per_sequence:
            sequences |= {f"advantages[{i}]": repr(x) for i, x in enumerate(batch.advantages.tolist())}
    on = {"advantages": advantages, "device": batch.train.device.type}
    return Claims({"call": call, **fixed, **dtypes, **on}, sequences)


def compare(groups: Groups, claims: Claims) -> None:
    """Raise on all ranks of a group where their calls differ: one collective for each group, and a read on the host.

    First over the sequence group; the batch group hears of an error there, because its ranks wait.
    """
    raised: ValueError | None = None
    for name, group in (("sequence_group", groups.sequence), ("batch_group", groups.batch)):
        if group is None or (name == "batch_group" and group is groups.sequence):
            continue
        if raised is not None:
            told = {agreement.RAISED: f"ValueError: {raised}"}
        elif agreement.RAISED in claims.call:
            told = claims.call
        else:
            told = {**claims.call, name: collectives.named(collectives.ranks_of(group))}
            told |= claims.sequences if name == "sequence_group" else {}
        try:
            agreement.compare(name, group, told)
        except ValueError as error:
            raised = raised or error
    if raised is not None:
        raise raised


def tell(groups: Groups, error: Exception) -> None:
    """Let ranks that compare their calls know of the error that this one is about to raise."""
    # Neither their complaint about it nor a group that has gone is what this rank has to report.
    with contextlib.suppress(ValueError, RuntimeError):
        compare(groups, Claims({agreement.RAISED: f"{type(error).__name__}: {error}"}, {}))

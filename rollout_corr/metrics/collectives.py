"""All-reduces whose errors say in words which rank waited for which others, and for what; comparing what ranks claim.

torch.distributed raises where the backend reports: gloo does, at once when a process ends and at the group's timeout
when one stays away. NCCL's watchdog ends the process instead; see docs/ranks.md.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._version import __version__

# Seconds for which a rank whose collective failed listens for others with the same news. gloo closes its connections on
# an error, so they hear of it within milliseconds.
LISTENS = 1.0

# Ranks that a message lists before it counts the rest.
LISTED = 16


class Pending:
    """A tensor that is being reduced in place over the ranks of a group; None: of the default one.

    Errors name the caller and `what` travels: "correct: the sums of each sequence". With `wait` it is reduced before
    this returns, which on a GPU still waits for nothing.
    """

    def __init__(self, tensor: Tensor, group: Any, what: str, op: Any = None, wait: bool = False) -> None:
        self._tensor, self._group, self._what = tensor, group, what
        op = dist.ReduceOp.SUM if op is None else op
        try:
            if wait:
                dist.all_reduce(tensor, op=op, group=group)
            else:
                self._work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
        except RuntimeError as error:
            raise failed(error, tensor, group, what) from error

    def done(self) -> bool:
        """True where `wait` returns at once."""
        return bool(self._work.is_completed())

    def wait(self) -> Tensor:
        """The result. On a GPU its stream waits, not the host."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise failed(error, self._tensor, self._group, self._what) from error
        return self._tensor


def all_reduce(tensor: Tensor, group: Any, what: str, op: Any = None) -> Tensor:
    """Reduce a tensor in place over the ranks of a group; arguments as of `Pending`."""
    Pending(tensor, group, what, op, wait=True)
    return tensor


# --- groups ---


def check_group(name: str, group: Any) -> None:
    """Refuse what is neither None nor an initialized process group that this rank belongs to."""
    if group is None:
        return
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        got = type(group).__name__
        hint = "; take mesh.get_group(dimension)" if got == "DeviceMesh" else ""
        if dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
            got, hint = "a group that this rank does not belong to", "; only its members may call"
        raise TypeError(f"{name}: expected a torch.distributed process group or None, got {got}{hint}")
    try:
        # torch reduces nothing over a destroyed group, without a word.
        dist.get_rank(group)
    except ValueError as error:
        raise ValueError(f"{name}: expected an initialized process group, got one that has been destroyed") from error


def ranks_of(group: Any) -> list[int]:
    """The ranks of a group, in its order, by their numbers in the whole job."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def named(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0, 1, 2"."""
    ranks = list(ranks)
    rest = f" and {len(ranks) - LISTED} more" if len(ranks) > LISTED else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks[:LISTED]))}{rest}"


def devices_of(group: Any) -> list[str]:
    """The types of device whose tensors a group carries."""
    return [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]


# --- errors ---


def failed(error: RuntimeError, tensor: Tensor, group: Any, what: str) -> Exception:
    """The error of a collective that did not complete, with what is known of the other ranks."""
    carried = devices_of(group)
    if tensor.device.type not in carried:
        return ValueError(
            f"{what} cannot be sent from {tensor.device}: expected tensors on {' or '.join(carried)}, for which "
            f"the group has backends ({dist.get_backend_config(group)})"
        )
    ranks, own = ranks_of(group), dist.get_rank()
    silent = _silent(ranks)
    if silent is None:
        others = "which of them is missing is not known"
    elif silent:
        others = f"no report from {named(silent)}: missing, or still waiting"
    else:
        others = "all of them report the same, so they made different calls or lost their connection"
    words = (
        f"{what}: rank {own} timed out waiting for the other ranks of its group, "
        f"{named(r for r in ranks if r != own)}; {others}. A rank that raises or stops before the "
        "call, or makes other calls, leaves the rest waiting: see what it wrote last. "
        f"validate=True compares the calls first. torch.distributed: {str(error).strip()}"
    )
    return type(error)(words) if isinstance(error, dist.DistError) else RuntimeError(words)


def _silent(ranks: list[int]) -> list[int] | None:
    """The ranks that do not report a failed collective too; None if the job's store does not answer.

    In a thread, because a store whose process hangs answers after minutes.
    """
    heard: list[list[int]] = []

    def ask() -> None:
        try:
            store = dist.distributed_c10d._get_default_store()
            key = f"rollout_corr/waited/{ranks}"
            store.set(f"{key}/{dist.get_rank()}", "")
            for _ in range(20):
                silent = [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
                heard[:] = [silent]
                if not silent:
                    return
                time.sleep(LISTENS / 20)
        except (RuntimeError, ValueError):
            # The store lives in a process that may be the one that ended; the caller's own error is on its way.
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * LISTENS)
    return heard[0] if heard else None


# --- agreement ---

# A rank that raised claims this alone.
RAISED = "raised"

# Differences that a message lists before it counts the rest.
DIFFERENCES = 4


def compare(name: str, group: Any, claims: Mapping[str, str]) -> None:
    """Raise on every rank of a group if one of them claims anything else than the others; errors begin with `name`.

    One all-reduce of two numbers a rank, and a read on the host; where they differ, one more, of the claims in full.
    """
    words = json.dumps({**claims, "rollout_corr": __version__, "torch": torch.__version__}).encode()
    digest = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big", signed=True)
    own = torch.tensor([digest, len(words)], dtype=torch.int64, device="cpu")
    told = _every(own, group, f"{name}: the digests of the calls")
    if bool((told == told[0]).all()):
        return
    lengths = told[:, 1].tolist()
    padded = torch.tensor(list(words.ljust(max(lengths))), dtype=torch.uint8, device="cpu")
    texts = _every(padded, group, f"{name}: the calls in words")
    every = [json.loads(bytes(row[:length].tolist())) for row, length in zip(texts, lengths, strict=True)]
    raise ValueError(f"{name}: {difference(every, ranks_of(group))}")


def difference(every: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> str:
    """Say in words which ranks claim what else than the others."""
    raised = [(rank, claims[RAISED]) for rank, claims in zip(ranks, every, strict=True) if RAISED in claims]
    if raised:
        return "; ".join(f"rank {rank} raised {error}" for rank, error in raised[:DIFFERENCES])
    differences = []
    for key in dict.fromkeys(key for claims in every for key in claims):
        values = [claims.get(key) for claims in every]
        if None in values or len(set(values)) == 1:
            # A part of what one of them does not have at all, which is named itself.
            continue
        (usual, _), *_ = Counter(values).most_common()
        others = [rank for rank, value in zip(ranks, values, strict=True) if value == usual]
        unusual = [f"{value} on rank {rank}" for rank, value in zip(ranks, values, strict=True) if value != usual]
        rest = f" and other values on {len(unusual) - DIFFERENCES} more" if len(unusual) > DIFFERENCES else ""
        differences.append(f"{key} {', '.join(unusual[:DIFFERENCES])}{rest} against {usual} on {named(others)}")
    if not differences:
        keys = dict.fromkeys(key for claims in every for key in claims)
        having = {key: [rank for rank, claims in zip(ranks, every, strict=True) if key in claims] for key in keys}
        differences = [f"{key} on {named(some)} alone" for key, some in having.items() if len(some) < len(ranks)]
    said = "; ".join(differences[:DIFFERENCES])
    more = f", and {len(differences) - DIFFERENCES} further differences" if len(differences) > DIFFERENCES else ""
    return f"expected the same call on every rank, got {said}{more}"


def gathered(columns: Sequence[Tensor], group: Any, what: str) -> list[Tensor]:
    """The values of all ranks, one rank after the other; columns, [n] each, are of one length on a rank."""
    count = columns[0].shape[0]
    own = torch.tensor([count], dtype=torch.int64, device="cpu")
    lengths, rank = _every(own, group, what)[:, 0].tolist(), dist.get_rank(group)
    of_ranks = []
    for column in columns:
        every = column.new_zeros(len(lengths), max(lengths))
        every[rank, :count] = column
        rows = all_reduce(every, group, what)
        of_ranks.append(torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)]))
    return of_ranks


def _every(own: Tensor, group: Any, what: str) -> Tensor:
    """[ranks, ...] on the CPU: every rank's tensor, over a device that the group carries, whatever the batch is on."""
    devices = devices_of(group)
    every = own.new_zeros(dist.get_world_size(group), *own.shape, device="cpu" if "cpu" in devices else devices[0])
    every[dist.get_rank(group)] = own.to(every.device)
    return all_reduce(every, group, what).cpu()

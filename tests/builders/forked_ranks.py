"""Ranks in processes that are forked from this one, which has imported torch: some hundredths of a second for four.

Not from a process that has run a backward pass or several threads of torch, whose children cannot.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

# A first backward pass imports it, in every rank, for seconds.
import torch.fx.experimental.symbolic_shapes

from builders.fresh import fresh_processes, printed_by


@dataclass
class Ended:
    """How the work of a rank ended."""

    value: object = None
    error: str = ""  # "ValueError: mask: ..."
    seconds: float = 0.0
    answered: bool = True


def _rank(work, rank, ranks, given, timeout, folder, answer):
    """Be one rank: join the group, work, answer, and stay until the others are done."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=timeout)
    )
    # A rank that leaves while another one still joins would fail that one's start, which is not what is looked at.
    store.add("joined", 1)
    while store.add("joined", 0) < ranks:
        time.sleep(0.002)
    ended, begun = Ended(), time.monotonic()
    try:
        ended.value = work(rank, ranks, *given)
    except Exception as error:  # noqa: BLE001 - whatever a rank raises is what is looked at
        ended.error = f"{type(error).__name__}: {error}"
    ended.seconds = time.monotonic() - begun
    answer.send_bytes(pickle.dumps(ended))
    # A rank that leaves would close connections that others still read from.
    with contextlib.suppress(EOFError, ConnectionResetError):
        answer.recv_bytes()
    os._exit(0)


def run(work, ranks, *given, timeout=60.0, limit=90.0, awaited=None):
    """Call `work(rank, ranks, *given)` on every rank and list how it ended.

    A rank that has not answered after `limit` seconds is killed; `awaited`, None: all, are waited for.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        processes, answers = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (work, rank, ranks, given, timeout, Path(name), theirs)
            processes.append(context.Process(target=_rank, args=arguments))
            processes[-1].start()
            theirs.close()
            answers.append(ours)
        found = [Ended(answered=False) for _ in range(ranks)]
        ends = time.monotonic() + limit
        for rank in range(ranks) if awaited is None else awaited:
            with contextlib.suppress(EOFError, ConnectionResetError):
                if answers[rank].poll(max(0.0, ends - time.monotonic())):
                    found[rank] = pickle.loads(answers[rank].recv_bytes())
        # Later ranks have inherited the earlier ranks' ends, so closing them would tell nobody.
        for process in processes:
            process.kill()
            process.join()
        return found


@contextlib.contextmanager
def starter():
    """Start a process that has done nothing yet, and give a `run` that forks ranks from there."""
    with ProcessPoolExecutor(1, fresh_processes()) as pool:
        yield lambda *given, **options: pool.submit(run, *given, **options).result()


def example(rank, ranks, file, folder):
    """Run an example that is started once a rank, within the group that is there; give what it prints."""
    os.environ["RANK"] = str(rank)
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        return printed_by(file, folder, [])

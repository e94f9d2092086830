"""Ranks that are threads of this process, for calls that exchange more than once."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest import mock

import torch
from torch.distributed import ReduceOp

from rollout_corr.backends import ranks as process_groups
from rollout_corr.backends import split
from rollout_corr.metrics import collectives


class Rank(SimpleNamespace):
    """A member of a group: its `rank`, and the number of `ranks`."""


class Threads:
    """Ranks that are threads, one running at a time, and hand each other values."""

    def __init__(self, ranks):
        self.ranks, self._handed = ranks, [None] * ranks
        self._barrier, self._turn = threading.Barrier(ranks), threading.Lock()

    def exchange(self, rank, value):
        """Hand a value to all ranks, wait for theirs, and list them in order."""
        self._handed[rank] = value
        self._turn.release()
        try:
            self._barrier.wait(60)
            handed = list(self._handed)
            self._barrier.wait(60)
        finally:
            self._turn.acquire()
        return handed

    def run(self, of_rank):
        """Call a function on every rank, and list what they return; the first error is raised."""
        found, failed = [None] * self.ranks, []

        def one(rank):
            try:
                with self._turn:
                    found[rank] = of_rank(rank)
            except BaseException as error:  # noqa: BLE001  raised again below, in the thread that asked
                failed.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]  # of the others most say only that one has not come
        return found


class Ranks(Threads):
    """A process group of threads: Triton's interpreter knows one at a time."""

    def __init__(self, ranks):
        super().__init__(ranks)
        self.rounds, self.sent = 0, []

    def all_reduce(self, table, op, group, async_op=False):
        assert op in (ReduceOp.SUM, ReduceOp.MAX)

        def wait():
            self.sent.append(table)
            tables = torch.stack(self.exchange(group.rank, table.clone()))
            self.rounds += group.rank == 0
            table.copy_(tables.sum(0) if op == ReduceOp.SUM else tables.amax(0))

        if not async_op:
            return wait()
        return SimpleNamespace(wait=wait, is_completed=lambda: False)

    def run(self, of_rank):
        """Run a function of each rank within the group."""
        fake = SimpleNamespace(
            ProcessGroup=Rank,
            is_available=lambda: True,
            get_rank=lambda group: group.rank,
            get_world_size=lambda group: group.ranks,
            get_process_group_ranks=lambda group: list(range(group.ranks)),
            get_backend_config=lambda group: "cpu:threads",
            all_reduce=self.all_reduce,
            ReduceOp=ReduceOp,
        )
        with (
            mock.patch.multiple(split, dist=fake),
            mock.patch.multiple(process_groups, dist=fake),
            mock.patch.multiple(collectives, dist=fake),
        ):
            return super().run(of_rank)

"""Ranks that are threads of this process, for calls that exchange more than once."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest import mock

import torch

from rollout_corr.backends import ranks as process_groups
from rollout_corr.backends import split
from rollout_corr.metrics import collectives


class Rank(SimpleNamespace):
    """A member of a group: its `rank`, and the number of `ranks`."""


class Ranks:
    """A process group whose ranks are threads, one running at a time: Triton's interpreter knows one."""

    def __init__(self, ranks):
        self.ranks, self.rounds, self.sent = ranks, 0, []
        self._own, self._barrier = threading.local(), threading.Barrier(ranks)
        self._tables, self._turn = [None] * ranks, threading.Lock()

    def all_reduce(self, table, op, group, async_op=False):
        assert op in ("sum", "max")

        def wait():
            self._tables[group.rank] = table
            self.sent.append(table)
            self._turn.release()
            try:
                self._barrier.wait()
                tables = torch.stack(self._tables)
                total = tables.sum(0) if op == "sum" else tables.amax(0)
                self.rounds += group.rank == 0
                self._barrier.wait()
            finally:
                self._turn.acquire()
            table.copy_(total)

        if not async_op:
            return wait()
        return SimpleNamespace(wait=wait, is_completed=lambda: False)

    def run(self, of_rank):
        """Run a function of each rank at once."""
        fake = SimpleNamespace(
            ProcessGroup=Rank,
            is_available=lambda: True,
            get_rank=lambda group: group.rank,
            get_world_size=lambda group: group.ranks,
            get_backend_config=lambda group: "cpu:threads",
            all_reduce=self.all_reduce,
            ReduceOp=SimpleNamespace(SUM="sum", MAX="max"),
        )
        found, failed = [None] * self.ranks, []

        def one(rank):
            try:
                with self._turn:
                    found[rank] = of_rank(rank)
            except BaseException as error:  # noqa: BLE001  raised again below, in the thread that asked
                failed.append(error)
                self._barrier.abort()

        with (
            mock.patch.multiple(split, dist=fake),
            mock.patch.multiple(process_groups, dist=fake),
            mock.patch.multiple(collectives, dist=fake),
        ):
            threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failed:
            raise failed[0]  # of the others most say only that one has not come
        return found

"""The threads of `dump`: what waits for the disk, path by path, and what becomes of it at a fork and at the exit."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from queue import SimpleQueue
from traceback import clear_frames
from typing import NamedTuple

# The number of calls that may wait for the disk on one path, and the number of paths on which calls may wait. A further
# call is left out, because it would only pile up memory.
MOST_WAITING = 4
MOST_PATHS = 8

# A process that ends waits so long for its disk.
EXIT_SECONDS = 10.0


class _Job(NamedTuple):
    """A call that waits: what to run, and the future of its result."""

    write: Callable[[], int]
    future: Future[int]


class Threads:
    """Threads that write what waits: a path's calls in their order, and no path waits for another.

    Threads are daemons, for Python waits for others at exit without a limit. There are as many as paths had calls
    waiting at one time, mostly one.
    """

    def __init__(self) -> None:
        # A condition's lock may be taken again by its thread: a signal handler may dump.
        self._changed = threading.Condition()
        self._taken: Counter[Path] = Counter()
        self._waiting: dict[Path, deque[_Job]] = {}
        self._pending: set[Future[int]] = set()
        self._ready: SimpleQueue[Path] = SimpleQueue()
        self._threads = 0
        self._forgotten = False

    def take(self, path: Path) -> bool:
        """Take a place among the waiting calls on a path, if there is one."""
        with self._changed:
            if self._taken[path] >= MOST_WAITING or (path not in self._taken and len(self._taken) >= MOST_PATHS):
                return False
            self._taken[path] += 1
            return True

    def give_back(self, path: Path) -> None:
        """Give a place back."""
        with self._changed:
            self._taken[path] -= 1
            if not self._taken[path]:
                del self._taken[path]
            self._changed.notify_all()

    def submit(self, path: Path, write: Callable[[], int], future: Future[int]) -> None:
        """Let a thread run `write` for a call that has a place; RuntimeError where none can be started."""
        with self._changed:
            if path not in self._waiting:
                if len(self._waiting) == self._threads:
                    self._start()
                self._waiting[path] = deque()
                self._ready.put(path)
            self._waiting[path].append(_Job(write, future))
            self._pending.add(future)

    def _start(self) -> None:
        if self._threads == 0:
            # At the exit of a process that multiprocessing started too, which atexit does not see.
            Finalize(None, self._at_exit, exitpriority=0)
        try:
            threading.Thread(target=self._work, name="rollout_corr.dump", daemon=True).start()
        except RuntimeError:
            # One thread can do the work of all.
            if self._threads == 0:
                raise
        else:
            self._threads += 1

    def _work(self) -> None:
        while True:
            path = self._ready.get()
            while self._next(path):
                if self._forgotten:
                    # A callback of a future forked, and this is the one thread of the child.
                    return

    def _next(self, path: Path) -> bool:
        """Run the next call on a path; False if none waits."""
        with self._changed:
            if not self._waiting[path]:
                del self._waiting[path]
                self._changed.notify_all()
                return False
            write, future = self._waiting[path].popleft()
        count, failure = 0, None
        if future.set_running_or_notify_cancel():
            try:
                count = write()
            except BaseException as error:  # noqa: BLE001 - it goes to the future
                failure = error
                warn(str(error))
                _cleared(error)
        # The future's error holds this frame.
        del write
        # Before the result: who waits for it may call again.
        self.give_back(path)
        try:
            if failure is not None:
                future.set_exception(failure)
            elif not future.cancelled():
                future.set_result(count)
        except BaseException:  # noqa: BLE001 - a callback of the future, which may not end the thread
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        # Behind the result: whatever a fork copies is answered there.
        self._pending.discard(future)
        return True

    def _at_exit(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._waiting, EXIT_SECONDS):
                calls = ", ".join(f"{path} ({count} calls)" for path, count in self._taken.items())
                warn(f"the process ends, and after {EXIT_SECONDS:.0f} s these calls still wait for the disk: {calls}")

    def forget(self) -> None:
        """Answer the futures in a forked process, where no thread would: its parent writes those calls."""
        self._forgotten = True
        for future in list(self._pending):
            # Anew: the lock in it may be held by a thread that this process does not have.
            Future.__init__(future)
            future.set_exception(RuntimeError("rollout_corr.dump: the parent of this forked process made this call"))


def _cleared(error: BaseException | None) -> None:
    """Let go of the tensors that the frames of an error hold: its future may be kept for long."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def warn(what: str) -> None:
    """Warn of a call that did not write."""
    # Warnings may be errors, and neither a training step nor a thread may end by one; the future has it.
    with suppress(RuntimeWarning):
        warnings.warn(f"rollout_corr.dump: {what}", RuntimeWarning, stacklevel=2)


threads = Threads()


def _after_fork() -> None:
    global threads
    old, threads = threads, Threads()
    old.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

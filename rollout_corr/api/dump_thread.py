"""The thread of `dump`: one that writes the calls of a process in their order, and a queue of few places before it."""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from traceback import clear_frames
from typing import NamedTuple

# The number of calls that may wait for the disk. A further one is left out: it would only pile up memory.
MOST_WAITING = 8

# A process that ends waits so long for its disk.
EXIT_SECONDS = 10.0


class _Job(NamedTuple):
    """A call that waits: what to run, and the future of its result."""

    write: Callable[[], int]
    future: Future[int]


class _Writer:
    """A daemon thread, for Python waits for others at exit without a limit, and what waits for it."""

    def __init__(self) -> None:
        # Its `put` may interrupt itself, in a signal handler.
        self.waiting: SimpleQueue[_Job] = SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="rollout_corr.dump", daemon=True)
        self.thread.start()
        atexit.register(self._at_exit)

    def _work(self) -> None:
        while True:
            _run(*self.waiting.get())

    def _at_exit(self) -> None:
        if not self.thread.is_alive():
            return  # a forked process, whose parent writes what waits
        last: Future[int] = Future()
        self.waiting.put(_Job(lambda: 0, last))
        if wait([last], EXIT_SECONDS).not_done:
            count = self.waiting.qsize()
            warn(f"the process ends, and after {EXIT_SECONDS:.0f} s {count} calls still wait for the disk")


_writer: _Writer | None = None


def has_place() -> bool:
    """Return whether another call may wait."""
    return _writer is None or not _writer.thread.is_alive() or _writer.waiting.qsize() < MOST_WAITING


def submit(write: Callable[[], int], future: Future[int]) -> None:
    """Let the thread run `write` for a call; RuntimeError where none can be started."""
    global _writer
    # A forked process has a copy of the queue and no thread: what waits there is the parent's.
    if _writer is None or not _writer.thread.is_alive():
        _writer = _Writer()
    _writer.waiting.put(_Job(write, future))


def _run(write: Callable[[], int], future: Future[int]) -> None:
    """Run a call, and answer its future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(write())
    except BaseException as error:  # noqa: BLE001 - it goes to the future
        warn(str(error))
        # The future may be kept for long, and the frames of its error hold tensors: this one `write`.
        del write
        cause: BaseException | None = error
        while cause is not None:
            clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        future.set_exception(error)


def warn(what: str) -> None:
    """Warn of a call that did not write."""
    # Warnings may be errors, and neither a training step nor a thread may end by one; the future has it.
    with suppress(RuntimeWarning):
        warnings.warn(f"rollout_corr.dump: {what}", RuntimeWarning, stacklevel=2)

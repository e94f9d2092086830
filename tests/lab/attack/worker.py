"""A process that makes attempts, one after another. It may crash or hang: that is an answer too."""

from __future__ import annotations

import faulthandler
import os
import resource
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from builders.fresh import fresh_processes

# What a process may map, so that an attempt that asks for everything fails alone and not with its machine.
MEMORY = 24 * 1024**3
# So many lines of what a process wrote before it was lost are shown.
LINES = 15


class Lost(Exception):
    """The process died, or hung and has ended itself."""


def _begin(log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(function: Callable[[int], object], seed: int, limit: float) -> object:
    """What an attempt returns, or a traceback as text; one that hangs writes down where, and ends the process."""
    os.ftruncate(1, 0)  # what is kept is about this attempt
    faulthandler.dump_traceback_later(limit, exit=True)
    try:
        return function(seed)
    except BaseException:  # noqa: BLE001 - whatever leaves an attempt is what the campaign is looking for
        return traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()


class Worker:
    """A process that calls functions with seeds."""

    def __init__(self) -> None:
        descriptor, log = tempfile.mkstemp(prefix="attack-", suffix=".log")
        os.close(descriptor)
        self._log = Path(log)
        self._pool = ProcessPoolExecutor(1, fresh_processes(), _begin, (log,))

    def call(self, function: Callable[[int], object], seed: int, limit: float) -> object:
        """Call a function, which the process imports by its name.

        Returns:
            What it returned, or the text of a traceback.

        Raises:
            Lost: The process died, or had no answer after `limit` seconds. It has ended now.
        """
        try:
            return self._pool.submit(_answer, function, seed, limit).result()
        except BrokenProcessPool as error:
            said = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:]
            self.end()
            raise Lost("\n".join(["the process ended", *said])) from error

    def end(self) -> None:
        """End the process."""
        self._pool.shutdown()
        self._log.unlink(missing_ok=True)

"""A process that makes attempts, one after another. It may crash or hang: that is an answer too."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from builders.fresh import fresh_processes

# Seconds for a new process to start and import, on a machine that has other things to do.
START = 180.0
# Seconds in which a process that hangs may write down where.
LAST_WORDS = 5.0
# What a process may map, so that an attempt that asks for everything fails alone and not with its machine.
MEMORY = 24 * 1024**3
# So many lines of what a process wrote before it was lost are shown.
LINES = 15


class Lost(Exception):
    """The process died, or it hangs and was ended."""


def serve(calls: Connection, log: str) -> None:
    """Answer each (function, seed) with the value, or with the traceback as text, until there are no more calls."""
    # A group of its own, so that what an attempt started is ended with it.
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    calls.send("ready")
    while True:
        try:
            function, seed = calls.recv()
        except EOFError:
            return
        os.ftruncate(output, 0)  # what is kept is about this attempt
        try:
            answer = function(seed)
        except BaseException:  # noqa: BLE001 - whatever leaves an attempt is what the campaign is looking for
            answer = traceback.format_exc()
        calls.send(answer)


class Worker:
    """A process that calls functions with seeds."""

    def __init__(self):
        context = fresh_processes()
        descriptor, log = tempfile.mkstemp(prefix="attack-", suffix=".log")
        os.close(descriptor)
        self._log = Path(log)
        self._calls, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, log))
        self._process.start()
        theirs.close()
        self._answer(START)

    def call(self, function: Callable[[int], object], seed: int, limit: float) -> object:
        """Call a function, which the process imports by its name.

        Returns:
            What it returned, or the text of a traceback.

        Raises:
            Lost: The process died, or did not answer within `limit` seconds, not counting those that it waited for a
                core. It has ended now.
        """
        with contextlib.suppress(BrokenPipeError):  # its end is found below
            self._calls.send((function, seed))
        return self._answer(limit)

    def _answer(self, limit: float) -> object:
        begun, waited_before = time.monotonic(), self._waited()
        try:
            # On a machine with other work the waits grow too, so the time left is asked for again.
            while (left := limit + self._waited() - waited_before - (time.monotonic() - begun)) > 0:
                if self._calls.poll(left):
                    return self._calls.recv()
            # faulthandler writes down where it hangs.
            os.kill(self._process.pid, signal.SIGABRT)
            self._process.join(LAST_WORDS)
            how = f"no answer within {limit:g} s"
        except (EOFError, ConnectionResetError):
            self._process.join(10)
            code = self._process.exitcode or 0
            how = f"the process ended by {signal.Signals(-code).name}" if code < 0 else f"it left with exit code {code}"
        said = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:]
        self.end()
        raise Lost("\n".join([how, *said]))

    def _waited(self) -> float:
        """Seconds that the process was ready to run while others had the cores; 0 where the system does not say."""
        try:
            return int(Path(f"/proc/{self._process.pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def end(self) -> None:
        """End the process and whatever it has started."""
        self._calls.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._log.unlink(missing_ok=True)

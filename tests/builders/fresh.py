"""Processes that have imported torch and nothing else, for tests that need one of their own."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import ForkServerContext
from typing import Any


def fresh_processes(*also: str) -> ForkServerContext:
    """Make processes by forks of a server that has imported torch, which takes seconds once and not in each of them.

    They have the environment, and the modules in `also`, that were there when the first one was made.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", *also])
    return context


def in_a_fresh_process(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function in a process of its own; its errors are raised here."""
    with ProcessPoolExecutor(1, fresh_processes()) as pool:
        return pool.submit(function, *given).result()


def printed_by(file: str, folder: str, path: list[str]) -> str:
    """Run a script in a folder, in the process that calls this, and give what it prints."""
    sys.path[:0], sys.argv = path, [file]
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(file, run_name="__main__")
    return said.getvalue()

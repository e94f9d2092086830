"""A process in which the kernels are compiled: the tests' own imported them for Triton's interpreter."""

from __future__ import annotations

import gc
import os
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from builders.fresh import fresh_processes


def _begin() -> None:
    # Before the first import of a kernel.
    os.environ["TRITON_INTERPRET"] = "0"
    warnings.simplefilter("ignore")
    from lab.ptx import cases  # noqa: F401 - loads the kernels

    # A fifth of what is not compilation was to look for garbage among modules and syntax trees, which stay.
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def outcome_of(function: Callable[..., Any], *given: Any, **settings: Any) -> str:
    """Call a function; give what went wrong, or an empty text."""
    try:
        function(*given, **settings)
    except Exception:  # noqa: BLE001  whatever it is, the other process fails with its text
        return traceback.format_exc()
    return ""


def start() -> ProcessPoolExecutor:
    """Start the process."""
    return ProcessPoolExecutor(1, mp_context=fresh_processes(), initializer=_begin)

"""A process in which the kernels are compiled: the tests' own imported them for Triton's interpreter."""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor


def _begin() -> None:
    # Before the first import of a kernel.
    os.environ["TRITON_INTERPRET"] = "0"
    warnings.simplefilter("ignore")


def attempt(name: str, seed: int) -> str:
    """Run a case by name; give what went wrong, or an empty text."""
    from ptx.cases import CASES

    try:
        CASES[name](seed)
    except Exception:  # noqa: BLE001  whatever it is, the other process fails with its text
        return traceback.format_exc()
    return ""


def start() -> ProcessPoolExecutor:
    """Start the process."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)

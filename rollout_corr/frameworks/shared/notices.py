"""Warnings of the readers: once in a process, because a training loop may read its settings in every step."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PACKAGE = __name__.partition(".")[0]

_warned: set[tuple[str, ...]] = set()
_listener: ContextVar[list[str] | None] = ContextVar("listener", default=None)


def warn_once(key: tuple[str, ...], message: str) -> None:
    """Warn once in a process for each key, at the caller's line, which has to change."""
    listener = _listener.get()
    if listener is not None:
        listener.append(message)
        return
    if key in _warned:
        return
    _warned.add(key)
    # Python 3.12 has `skip_file_prefixes` for this.
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect all notices instead of warning, those that were given before too."""
    messages: list[str] = []
    token = _listener.set(messages)
    try:
        yield messages
    finally:
        _listener.reset(token)

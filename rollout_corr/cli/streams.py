"""The streams that commands write to: stdout and stderr, whatever they are connected with."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rollout_corr.diagnose.show.visible import visible


@contextmanager
def usable_streams() -> Iterator[None]:
    r"""Let stdout and stderr take any text while a command runs.

    What their encoding lacks is written as `\u` and a number. One that the caller has closed is replaced by os.devnull.
    """
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    errors = {}
    for name, stream in before.items():
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - closed below
        elif isinstance(stream, io.TextIOWrapper):
            errors[name] = stream.errors
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for name, stream in before.items():
            if stream is None:
                getattr(sys, name).close()
                setattr(sys, name, None)
            elif name in errors:
                # A stream that is full or closed cannot be flushed, which reconfigure does.
                with suppress(OSError, ValueError):
                    stream.reconfigure(errors=errors[name])


def print_line(text: str) -> None:
    """Print a text as a line on stdout."""
    sys.stdout.write(visible(text) + "\n")


def print_source(text: str) -> None:
    """Print a program of this package's own making, whose line breaks are part of it."""
    sys.stdout.write(text)


def error_line(text: str) -> None:
    """Print a text as a line on stderr, if anybody can still read it."""
    with suppress(OSError, ValueError):
        sys.stderr.write(visible(text) + "\n")
        sys.stderr.flush()


def let_go_of(stream: Any) -> None:
    """Send what a stream that cannot be written still holds to nowhere: the interpreter flushes it at exit."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError, io.UnsupportedOperation):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def print_json(data: Any) -> None:
    """Print data as JSON."""
    json.dump(data, sys.stdout, indent=1)
    sys.stdout.write("\n")

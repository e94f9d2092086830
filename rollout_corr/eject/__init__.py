"""Writing one file that does what a Spec says, with torch alone: for those who copy code rather than install it."""

from __future__ import annotations

from .file import Request, written
from .program import program_of


def eject(name: str, layout: str = "packed", metrics: str = "dashboard") -> str:
    from ..frameworks.shared.lookup import spec

    asked = spec(name)
    program = program_of(asked, layout, metrics)
    return written(Request(name, asked, layout, metrics, f"rollout-corr eject {name}"), program)

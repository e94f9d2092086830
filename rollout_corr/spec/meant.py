"""Errors of classes for keywords that they do not have: they name those that they have, and the one that was meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def keywords_meant(**meant: str) -> Callable[[type[T]], type[T]]:
    """Let a dataclass refuse an unknown keyword in words.

    Args:
        **meant: What to write in place of a likely wrong keyword.
    """

    def decorate(cls: type[T]) -> type[T]:
        init: Callable[..., None] = cls.__init__
        known = [*inspect.signature(init).parameters][1:]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in known:
                    close = difflib.get_close_matches(name, known, n=1)
                    write = meant.get(name) or (f"{close[0]}=" if close else "")
                    hint = f"; did you mean {write}?" if write else ""
                    raise TypeError(f"{cls.__name__}: unknown argument {name!r}, expected some of {known}{hint}")
            init(self, *args, **kwargs)

        setattr(cls, "__init__", checked)  # noqa: B010 - a plain assignment is an error to type checkers
        return cls

    return decorate

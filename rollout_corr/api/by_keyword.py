"""A warning for a mask that is passed by position, behind tensors that would pass for one."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def mask_by_keyword(call: Callable[P, R]) -> Callable[P, R]:
    """Let a call warn about a mask by position: swapped with a tensor before it, nothing would notice."""
    names = list(inspect.signature(call).parameters)
    first = names.index("mask")
    message = (
        f"{call.__name__}: pass the mask by keyword, mask=...; from 0.2.0 on only {', '.join(names[:first])} are taken "
        "by position"
    )

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > first and not torch.compiler.is_compiling():
            warnings.warn(message, FutureWarning, stacklevel=2)
        return call(*args, **kwargs)

    return called

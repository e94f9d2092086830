"""A warning for a mask that is passed by position, where two tensors of log-probs stand before it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def mask_by_keyword(call: Callable[P, R]) -> Callable[P, R]:
    """Let a call warn about a third positional argument: swapped with the second, it would pass for a mask silently."""

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > 2 and not torch.compiler.is_compiling():
            warnings.warn(
                f"{call.__name__}: pass the mask by keyword, mask=...; from 0.2.0 on only the two log-probs are taken "
                "by position",
                FutureWarning,
                stacklevel=2,
            )
        return call(*args, **kwargs)

    return called

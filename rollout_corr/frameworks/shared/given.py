"""Checks of the arguments that a framework hands over, by the names that its users know."""

from __future__ import annotations

from torch import Tensor


def tensor(name: str, x: object, how: str) -> None:
    """Raise TypeError if an argument is no tensor.

    Args:
        name: The framework's name of it.
        x: What was given.
        how: How the framework is told to provide it.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {'None' if x is None else type(x).__name__}; {how}")

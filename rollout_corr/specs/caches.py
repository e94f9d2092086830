"""All caches of the package in one list, so that one call empties them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper


class Clearable(Protocol):
    """A dictionary, a list or a set."""

    def clear(self) -> None:
        """Remove everything."""


R = TypeVar("R")
C = TypeVar("C", bound=Clearable)

_CLEARED: list[Callable[[], None]] = []


def cached(maxsize: int | None, typed: bool = False) -> Callable[[Callable[..., R]], _lru_cache_wrapper[R]]:
    """Cache a function as `functools.lru_cache` does, and register the cache."""

    def decorate(function: Callable[..., R]) -> _lru_cache_wrapper[R]:
        wrapped = lru_cache(maxsize=maxsize, typed=typed)(function)
        _CLEARED.append(wrapped.cache_clear)
        return wrapped

    return decorate


def unless_compiled(function: _lru_cache_wrapper[R]) -> Callable[..., R]:
    """A cached function, without its cache while a compiler follows the call: torch warns of each cache it finds."""
    return function.__wrapped__ if torch.compiler.is_compiling() else function


def registered(cache: C) -> C:
    """Register a cache that is no function, such as a dictionary of a module."""
    _CLEARED.append(cache.clear)
    return cache


def clear_caches() -> None:
    """Empty every cache of the package; calls give the same results as before and fill them again.

    Plans, schemas and kept kernel launches hold memory of the host alone. The thresholds that the kernels read
    (`kernels.uploads`) hold device memory, some bytes for each Spec and device; what a captured CUDA graph reads of
    them stays, so graphs can be replayed. Triton keeps its compiled kernels.
    """
    for clear in _CLEARED:
        clear()

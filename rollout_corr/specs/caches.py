"""All caches of the package in one list, so that one call empties them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from torch.compiler import is_compiling

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper


class Clearable(Protocol):
    """A dictionary, a list or a set."""

    def clear(self) -> None:
        """Remove everything."""


R = TypeVar("R")
C = TypeVar("C", bound=Clearable)

_CLEARED: list[Callable[[], None]] = []


def cached_untraced(maxsize: int | None, typed: bool = False) -> Callable[[Callable[..., R]], _lru_cache_wrapper[R]]:
    """Cache a function as `functools.lru_cache` does, and register the cache; for what runs behind an operator.

    There no compiler follows a call, and `cached` would cost it 0.1 us more.
    """

    def decorate(function: Callable[..., R]) -> _lru_cache_wrapper[R]:
        wrapped = lru_cache(maxsize=maxsize, typed=typed)(function)
        _CLEARED.append(wrapped.cache_clear)
        return wrapped

    return decorate


def cached(maxsize: int | None, typed: bool = False) -> Callable[[Callable[..., R]], _lru_cache_wrapper[R]]:
    """Cache a function as `cached_untraced` does, but for compilers: torch warns of each cache that it follows."""

    def decorate(function: Callable[..., R]) -> _lru_cache_wrapper[R]:
        kept = cached_untraced(maxsize, typed)(function)

        @wraps(function)
        def call(*given: Any, **named: Any) -> R:
            return function(*given, **named) if is_compiling() else kept(*given, **named)

        vars(call).update(cache_clear=kept.cache_clear, cache_info=kept.cache_info)
        return cast("_lru_cache_wrapper[R]", call)

    return decorate


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

"""Peak of temporaries: the most that a call holds beyond the outputs that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile


class Allocation(NamedTuple):
    """An event of the allocator; a negative size frees."""

    at: int  # nanoseconds
    address: int
    size: int


class Memory(NamedTuple):
    """Bytes: the most at a time that did not survive, and what survived."""

    temporaries: int
    outputs: int


def account(events: Iterable[Allocation]) -> Memory:
    """Return the peak of what did not survive a call, and the sum of what did.

    An allocation of the call that is still there at its end is an output, from its first moment on. Memory that was
    there before the call and is freed in it counts in nothing.
    """
    ordered = sorted(events, key=lambda event: event.at)
    alive: dict[int, int] = {}
    for position, event in enumerate(ordered):
        if event.size > 0:
            alive[event.address] = position
        else:
            alive.pop(event.address, None)
    survivors = set(alive.values())
    live: dict[int, int] = {}
    now = peak = 0
    for position, event in enumerate(ordered):
        if event.size > 0 and position not in survivors:
            live[event.address] = event.size
            now += event.size
            peak = max(peak, now)
        elif event.size < 0:
            now -= live.pop(event.address, 0)
    return Memory(peak, sum(ordered[position].size for position in survivors))


def measure(call: Callable[[], object]) -> Memory:
    """Run a call under torch's profiler, which reports every allocation of torch's CPU allocator, also inside an op."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        result = call()
    # The public events add up sizes but do not say which block was freed.
    tree = run.profiler.kineto_results.experimental_event_tree()
    events = [
        Allocation(event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
        for event in _walk(tree)
        if hasattr(event.extra_fields, "alloc_size")
    ]
    del result
    return account(events)


def _walk(tree: Iterable[Any]) -> Iterator[Any]:
    for event in tree:
        yield event
        yield from _walk(event.children)

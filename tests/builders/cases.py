"""Which cases of a long list `make test` runs, and which are left to `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest


def one_in(
    number: int, cases: Iterable[object], left_out: Callable[[object], bool] = lambda case: False
) -> list[object]:
    """Mark every case as slow but each `number`-th, where neighbors of a list share nearly all of their code.

    Args:
        number: 2 leaves every other case to `make test`.
        cases: The cases; a tuple becomes the values of several parameters.
        left_out: Tells whether a case is slow anyway, because another test sees what it would.
    """
    marked, counted = [], 0
    for case in cases:
        is_slow = left_out(case) or counted % number > 0
        counted += not left_out(case)
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=[pytest.mark.slow] * is_slow))
    return marked

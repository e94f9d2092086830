"""Which cases of a long list `make test` runs, and which are left to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def one_in(number: int, cases: Iterable[object]) -> list[object]:
    """Mark every case as slow but each `number`-th, where neighbors of a list share nearly all of their code.

    Args:
        number: 2 leaves every other case to `make test`.
        cases: The cases; a tuple becomes the values of several parameters.
    """
    marked = []
    for i, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=[] if i % number == 0 else [pytest.mark.slow]))
    return marked

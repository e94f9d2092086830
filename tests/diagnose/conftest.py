"""All tests of this room run in one thread."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def alone(one_thread):
    """Spend no time on waking other threads."""

"""A plugin for pytest: a part of the tests in random order, as many as fit into a number of seconds, and their counts.

`python -m pytest -p benchmarks.gpu_report.sample --part 0/8 --budget 100 --counts x.json`. The order is random, so that
the tests that fit are a sample of all. A test that was not reached is counted as that, not as passed.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

# Seconds before the end from which on no test begins.
LAST = 15.0
# Lines that are kept of a failure.
KEPT_LINES = 20


class Sample:
    """Selects tests, stops in time, and counts results."""

    def __init__(self, part: int, parts: int, seconds: float, path: Path) -> None:
        self.part, self.parts, self.path = part, parts, path
        self.end = time.monotonic() + seconds - LAST
        self.found: dict[str, Any] = {"selected": 0, "passed": 0, "not_run": 0, "failed": {}, "under_way": None}

    def save(self, under_way: str | None = None) -> None:
        self.found["under_way"] = under_way
        self.path.write_text(json.dumps(self.found), encoding="utf-8")

    @pytest.hookimpl(trylast=True)  # behind the selection by marks
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        random.Random(0).shuffle(items)
        items[:] = items[self.part :: self.parts]
        self.found["selected"] = len(items)
        self.save()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if time.monotonic() < self.end:
            self.save(item.nodeid)
            return None
        self.found["not_run"] += 1
        return True  # taken, so no other plugin runs it

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.pytest_collectreport(report)
        self.found["passed"] += report.when == "call" and report.passed

    def pytest_collectreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.found["failed"].setdefault(report.nodeid, report.longreprtext.splitlines()[-KEPT_LINES:])

    def pytest_sessionfinish(self) -> None:
        self.save()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", required=True, help="I/N")
    parser.addoption("--budget", type=float, required=True, help="seconds")
    parser.addoption("--counts", type=Path, required=True, help="the file that is written")


def pytest_configure(config: pytest.Config) -> None:
    part, _, parts = config.getoption("--part").partition("/")
    sample = Sample(int(part), int(parts), config.getoption("--budget"), config.getoption("--counts"))
    config.pluginmanager.register(sample, "sample of tests")

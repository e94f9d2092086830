"""A plugin for pytest: one part of the tests, as many as a budget of seconds allows, and a file that counts them.

`python -m pytest -p benchmarks.gpu_report.shard --shard 0/8 --budget 100 --shard-json x.json`. The order is shuffled,
so that what does not fit is a sample of everything. A test that was not reached is counted, not passed.
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


class Shard:
    """Which tests, until when, and what became of them."""

    def __init__(self, part: int, parts: int, seconds: float, path: Path) -> None:
        self.part, self.parts, self.path = part, parts, path
        self.end = time.monotonic() + seconds - LAST
        self.found: dict[str, Any] = {
            "selected": 0,
            "passed": 0,
            "not_run": 0,
            "failed": [],
            "why": {},
            "under_way": None,
        }

    def save(self) -> None:
        self.path.write_text(json.dumps(self.found), encoding="utf-8")

    @pytest.hookimpl(trylast=True)  # behind the selection by marks
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        random.Random(0).shuffle(items)
        mine = items[self.part :: self.parts]
        chosen = set(mine)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = mine
        self.found["selected"] = len(mine)
        self.save()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if time.monotonic() < self.end:
            self.found["under_way"] = item.nodeid
            self.save()
            return None
        self.found["not_run"] += 1
        # Taken: nobody else runs it.
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.note(report)
        self.found["passed"] += report.when == "call" and report.passed

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.note(report)

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Of what failed, its name and the end of what is said about it."""
        if report.failed and report.nodeid not in self.found["failed"]:
            self.found["failed"].append(report.nodeid)
            self.found["why"][report.nodeid] = report.longreprtext.splitlines()[-KEPT_LINES:]

    def pytest_sessionfinish(self) -> None:
        self.found["under_way"] = None
        self.save()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", required=True, help="I/N")
    parser.addoption("--budget", type=float, required=True, help="seconds")
    parser.addoption("--shard-json", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    part, _, parts = config.getoption("--shard").partition("/")
    shard = Shard(int(part), int(parts), config.getoption("--budget"), config.getoption("--shard-json"))
    config.pluginmanager.register(shard, "shard of tests")

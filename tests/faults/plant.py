"""Plant a fault in a copy of the checkout, and run tests there."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from builders.fresh import fresh_processes

from .table import Fault

# Seconds for the tests of a fault, which may have made a loop endless.
LONGEST = 1200
GREEN, RED = 0, (1, 2)  # pytest's exit codes: all passed; a test failed, or its file could not be imported


@contextmanager
def copied(checkout: Path) -> Iterator[Path]:
    """A copy of a checkout without its hidden and built files."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve() / "checkout"
        built = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
        shutil.copytree(checkout, copy, symlinks=True, ignore=built)
        yield copy


@contextmanager
def planted(fault: Fault, copy: Path) -> Iterator[None]:
    """The fault in a copy of the checkout, for as long as this is entered."""
    path = copy / fault.file
    right = path.read_text(encoding="utf-8") if path.exists() else ""
    if right.count(fault.right) != 1:
        raise ValueError(f"{fault}: expected its line once in the file, found it {right.count(fault.right)} times")
    path.write_text(right.replace(fault.right, fault.wrong), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(right, encoding="utf-8")


def run(tests: tuple[str, ...], copy: Path) -> tuple[int, str]:
    """Run tests of a copy until one fails, in a process of its own: pytest's exit code, and the first that failed."""
    begun = copy.with_suffix(".begun")
    begun.unlink(missing_ok=True)
    try:
        with ProcessPoolExecutor(1, fresh_processes("pytest", "hypothesis")) as pool:
            return pool.submit(_run, tests, str(copy), str(begun)).result()
    except BrokenProcessPool:
        if not begun.exists():
            raise
        return RED[0], f"the process ended, or took more than {LONGEST} s"


def _run(tests: tuple[str, ...], copy: str, begun: str) -> tuple[int, str]:
    Path(begun).touch()
    os.chdir(copy)
    sys.path[:0] = [copy, f"{copy}/tests"]
    sys.dont_write_bytecode = True  # an edit within a second and of the same length would not be noticed
    signal.alarm(LONGEST)
    import pytest

    failed: list[str] = []

    class Noted:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], [Noted()])
    return int(code), failed[0] if failed else said.getvalue()[-400:]

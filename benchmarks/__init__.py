"""Benchmarks: `python -m benchmarks`. What they measure is said in docs/benchmarks.md."""

import sys
from pathlib import Path

# Frameworks' functions are cut out of their files by what the tests of conformance cut them with.
TESTS = str(Path(__file__).resolve().parents[1] / "tests")
if TESTS not in sys.path:
    sys.path.append(TESTS)

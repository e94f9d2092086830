"""Benchmarks: `python -m benchmarks`. What they measure is said in docs/benchmarks.md."""

"""Benchmarks: `python -m benchmarks` and `pytest benchmarks/`. What they measure is said in docs/benchmarks.md."""

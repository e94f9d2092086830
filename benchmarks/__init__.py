"""Benchmarks: `python -m benchmarks.cpu` and `pytest benchmarks/`. What they measure is said in docs/benchmarks.md."""

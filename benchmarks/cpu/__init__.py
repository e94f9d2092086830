"""The CPU benchmark: `python -m benchmarks.cpu`."""

"""The cost of a call on the host: `python -m benchmarks.host`."""

"""What a call costs on the host: `python -m benchmarks.host`."""

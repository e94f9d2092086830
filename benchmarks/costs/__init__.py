"""Launches, waits and bytes of a call, beside the frameworks' own code: `python -m benchmarks.costs`."""

"""Launches, waits and bytes of a call, ours and the frameworks' own: `python -m benchmarks.costs`."""

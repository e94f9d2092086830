"""The report of a GPU about a commit: `python -m benchmarks.gpu_report`."""

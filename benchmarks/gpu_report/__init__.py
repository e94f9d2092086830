"""One command for a machine with a GPU: `python -m benchmarks.gpu_report`, described in docs/benchmarks.md."""

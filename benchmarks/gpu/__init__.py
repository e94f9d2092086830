"""The benchmark of a GPU: `python -m benchmarks.gpu`."""

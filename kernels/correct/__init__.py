"""The kernels of `correct`: read, decide, apply, and their launch."""

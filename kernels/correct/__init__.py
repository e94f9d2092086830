"""The kernels of `correct`: read, judge, apply, and their launch."""

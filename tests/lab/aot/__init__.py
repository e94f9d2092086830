"""Compiling the kernels ahead of time, without a GPU, and reporting on the code. For developers."""

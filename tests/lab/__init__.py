"""Machinery that judges the kernels and the package from outside, each with its own target; README.md has the list."""

"""Computations of other people: written by hand, or the framework itself."""

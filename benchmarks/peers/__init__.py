"""Computations of other people: written by hand, restated from a framework, or the framework itself."""

"""Stands in for xtuner, whose releases are older: the names that the example uses, and their numbers by plain loops."""

__version__ = "0.2.0"

"""Stands in for SkyRL, which needs Python 3.12: the names that the example uses, and their numbers by formula."""

__version__ = "0.3.0"

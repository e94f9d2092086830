"""The version of the package. setup.py reads it as text, because torch may not be there when that runs."""

__version__ = "0.1.0"

"""Naming the causes of a mismatch."""

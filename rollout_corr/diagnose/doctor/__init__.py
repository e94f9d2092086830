"""Name the causes of a mismatch."""

"""Measuring a dump block by block, in sums that merge."""

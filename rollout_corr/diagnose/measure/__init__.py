"""Measure a dump chunk by chunk, in sums that merge."""

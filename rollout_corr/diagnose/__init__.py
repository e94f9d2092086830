"""Diagnose log-probs in a dump or in memory: `report`, `doctor` and `what-if`; docs/mismatch.md shows them.

`calls` has the public functions. `read` streams files in chunks of whole sequences, `measure` adds up what merges over
chunks, `doctor` names causes, `what_if` tries other corrections, `show` prints and draws. Nothing here is imported with
the package.
"""

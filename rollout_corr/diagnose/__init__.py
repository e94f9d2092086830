"""Diagnose a dump of log-probs: `report`, `doctor` and `what-if`; docs/mismatch.md shows them.

`read` streams a file in chunks of whole sequences, `measure` adds up what merges over chunks, `doctor` names causes,
`what_if` tries other corrections, `show` prints and draws. Nothing here is imported with the package.
"""

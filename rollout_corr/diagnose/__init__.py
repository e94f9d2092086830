"""Looking at a dump of log-probs: report, doctor, what-if. docs/mismatch.md shows them.

`reading` streams a file in blocks of whole sequences; `measuring` adds up what merges over blocks; `page` and `summary`
show it, `doctor` names causes, `what_if` tries other settings. None of it is imported with the package.
"""

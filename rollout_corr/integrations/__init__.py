"""Drop-ins: a framework's own functions, with the same names, arguments and results, computed here.

A module per framework, each with `install()`, `uninstall()` and `installed()`. Importing one changes nothing, and
imports nothing of its framework. docs/integrations.md says what each replaces, and what it does about each known bug.
"""

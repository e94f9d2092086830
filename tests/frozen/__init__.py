"""Digests of what the package computes, taken before a redesign and compared after it.

`PYTHONPATH=tests python -m frozen record FILE` and `compare A B`; `--help` lists the options.

`batches.py` makes inputs of a seed, `cases.py` names what is called, `adapter.py` holds everything that a redesign may
rename, `records.py` writes one line a call, `comparison.py` says what moved. `variants.jsonl` has the Specs and losses
that kernels were compiled for when digests were first recorded, and random Specs: as data, so that they outlive both.
"""

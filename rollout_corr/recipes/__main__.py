"""`python -m rollout_corr.recipes` writes the tables of docs/losses.md."""

import sys

from rollout_corr.recipes.table import table

if __name__ == "__main__":
    sys.stdout.write(table())

"""`python -m rollout_corr.presets` writes the table of docs/presets.md."""

import sys

from rollout_corr.presets.table import table

if __name__ == "__main__":
    sys.stdout.write(table())

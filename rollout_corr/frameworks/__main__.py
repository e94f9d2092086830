"""`python -m rollout_corr.frameworks presets` writes the table of docs/presets.md, `losses` those of docs/losses.md."""

import sys

from rollout_corr.frameworks.shared import tables

TABLES = {"presets": tables.presets, "losses": tables.losses}

if __name__ == "__main__":
    sys.stdout.write(TABLES[sys.argv[1]]())

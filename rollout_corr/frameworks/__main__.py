"""`python -m rollout_corr.frameworks presets` prints the table of docs/presets.md, `losses` those of docs/losses.md.

`names` prints shared/names.py.
"""

import sys

from rollout_corr.frameworks.shared import tables

TABLES = {"presets": tables.presets, "losses": tables.losses, "names": tables.names}

if __name__ == "__main__":
    sys.stdout.write(TABLES[sys.argv[1]]())
